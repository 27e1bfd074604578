"""Published results that a run starts from: do they come from the present parameters?

`kedro run --from-nodes=ppo` loads the newest split, SFT model and reward model. If another recipe
made them, PPO would train on a mixture that no single set of parameters describes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import artifact_of, content_digest
from rlhf_pipeline.stage_registry import parameter_blocks
from rlhf_pipeline.stages.cache.fingerprint import FORM
from rlhf_pipeline.stages.cache.recipe_diff import recipe_changes
from rlhf_pipeline.stages.cache.workspace import RECIPE, work_directory

SHOWN = 200
"""Characters of the changes that a refusal shows."""


def published_inputs(pipeline: Pipeline, catalog: CatalogProtocol) -> dict[str, Path]:
    """The published artifacts that the pipeline loads but does not make, by data set.

    Raises:
        ConfigError: a data set has no published version.
    """
    names = sorted(
        name for name in pipeline.inputs() if isinstance(catalog.get(name), ArtifactDataset)
    )
    missing = [name for name in names if not catalog.exists(name)]
    if missing:
        folders = ", ".join(str(catalog.get(name)._filepath) for name in missing)
        raise ConfigError(
            f"no version of {', '.join(missing)} is published in {folders}. Fix: run the whole "
            "pipeline, `kedro run --pipeline=full`; it reuses all stages that are finished"
        )
    return {name: catalog.load(name) for name in names}


def changes_since(inputs: Mapping[str, Path], catalog: CatalogProtocol) -> dict[str, list[str]]:
    """How the recipes of published inputs differ from the present parameters.

    Code, libraries, the number of ranks and what a hub or store contains do not count: they are not
    parameters. Local data files and reward functions do.

    Returns:
        Data set to changes such as "seed 5 -> 1234"; inputs without a change are missing.
    """
    workspace = Path(catalog.load("workspace"))
    parameters: dict[str, Any] = catalog.load("parameters")
    present = {
        name: block.model_validate(parameters.get(name, {})).recipe()
        for name, block in parameter_blocks().items()
    }
    found = {}
    for name, artifact in inputs.items():
        changes: list[str] = []
        for directory, job in _jobs_behind(artifact, workspace).items():
            old = json.loads((directory / RECIPE).read_text())
            files = {
                key: content_digest(path) for key, path in job.inputs.items() if path.is_file()
            }
            new = old | {"form": FORM, "inputs": old["inputs"] | files}
            if job.stage != "source":  # its parameters are those of the split
                new["config"] = {key: present.get(key, old["config"][key]) for key in old["config"]}
                new["seed"] = parameters["seed"]
            changes += recipe_changes(old, new, pending=())
        if changes:
            found[name] = list(dict.fromkeys(changes))
    return found


def _jobs_behind(artifact: Path, workspace: Path) -> dict[Path, LaunchedJob]:
    """The jobs that led to an artifact, the earliest first, by their work directories.

    Jobs whose work directory was removed are missing, with those before them.
    """
    directory = work_directory(artifact, workspace)
    if directory is None or not (directory / RECIPE).is_file():
        return {}
    job = LaunchedJob.read(directory / "job.json")
    jobs: dict[Path, LaunchedJob] = {}
    for parent in filter(None, map(artifact_of, job.inputs.values())):
        jobs |= _jobs_behind(parent, workspace)
    return jobs | {directory: job}


def refuse_mixture(changes: Mapping[str, list[str]], command: str) -> None:
    """Stop a run whose published inputs come from other parameters.

    Args:
        changes: see `changes_since`.
        command: the `kedro run` that makes what is missing and reuses the rest.

    Raises:
        ConfigError: names the first changes, and both ways to proceed.
    """
    if not changes:
        return
    names_by_changes: dict[str, list[str]] = {}
    for name, found in changes.items():
        names_by_changes.setdefault("; ".join(found), []).append(name)
    lines = [
        f"  {', '.join(names)}: {shorten(found, SHOWN, placeholder=' ...')}"
        for found, names in names_by_changes.items()
    ]
    raise ConfigError(
        "\n".join(
            [
                "the published inputs were made with other parameters (theirs -> yours):",
                *lines,
                f"Fix: `{command}`, which reuses all that fits; or add --params=inputs=newest to "
                "use these inputs as they are",
            ]
        )
    )
