"""Published results that a run starts from: do they come from the present parameters?

`kedro run --from-nodes=ppo` loads the newest split, SFT model and reward model. If another recipe
made them, PPO would train on a mixture that no single set of parameters describes.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.io.core import DatasetError
from kedro.pipeline import Pipeline

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.pipelines.table import PASSES_ON, as_used
from rlhf_pipeline.runtime.job import LaunchedJob, as_json, title
from rlhf_pipeline.runtime.manifest import artifact_of, content_digest
from rlhf_pipeline.stages.cache.fingerprint import recipe
from rlhf_pipeline.stages.cache.planning import recipe_changes
from rlhf_pipeline.stages.cache.workspace import RECIPE, work_directory
from rlhf_pipeline.stages.job import STAGES, Job, RunContext

SHOWN = 200
"""Characters of the changes that a refusal shows."""


def published_inputs(pipeline: Pipeline, catalog: CatalogProtocol) -> dict[str, Path]:
    """The published artifacts that the pipeline loads but does not make, by data set.

    Raises ConfigError if a data set has no published version.
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


def changes_since(
    inputs: Mapping[str, Path], catalog: CatalogProtocol, context: RunContext
) -> dict[str, list[str]]:
    """The changes such as "seed 5 -> 1234" from the recipes of published inputs to the parameters.

    Code, libraries and the number of ranks are not parameters. Inputs without changes are missing.
    """
    found = {}
    blocks = {name: catalog.load(f"params:{name}") for name in PASSES_ON}
    makers = as_used(sum((pipelines[name] for name in pipelines), Pipeline([])), blocks)
    for name, artifact in inputs.items():
        comparison = _Comparison(artifact, context)
        results: dict[str, Any] = {STAGES: comparison, **inputs}
        for node in makers.to_outputs(name).nodes:
            try:
                values = [results.get(each) or catalog.load(each) for each in node.inputs]
                results[node.outputs[0]] = node.func(*values)
            except (PipelineError, DatasetError, OSError):
                continue  # the node needs a result that is gone, or a hub that is unreachable
        if comparison.changes:
            found[name] = list(dict.fromkeys(comparison.changes))
    return found


def refuse_mixture(changes: Mapping[str, list[str]], command: str) -> None:
    """Raise ConfigError if published inputs come from other parameters, see `changes_since`.

    The message shows the first changes and both ways to proceed; `command` is the `kedro run` that
    makes what is missing and reuses the rest.
    """
    if not changes:
        return
    names_by_changes: dict[str, list[str]] = {}
    for name, found in changes.items():
        names_by_changes.setdefault("; ".join(found), []).append(name)
    lines = [
        f"  {', '.join(names)}: {shorten(text, SHOWN, placeholder=' ...')}\n"
        for text, names in names_by_changes.items()
    ]
    raise ConfigError(
        f"the published inputs were made with other parameters (theirs -> yours):\n{''.join(lines)}"
        f"Fix: `{command}`, which reuses all that fits; or add --params=inputs=newest to use these "
        "inputs as they are"
    )


Key = tuple[str | None, ...]


class _Comparison:
    """Compares the jobs of the nodes with the recipes behind an artifact; replaces a `StageRunner`.

    Recipes of removed work directories are missing.
    """

    def __init__(self, artifact: Path, context: RunContext) -> None:
        self._context = context
        self._earlier: dict[Key, tuple[dict[str, Any], Path]] = {}
        self._complete = True
        self.changes: list[str] = []
        pending = [artifact]
        while pending:
            path = pending.pop()
            directory = work_directory(path, context.workspace)
            if directory is None or not (directory / RECIPE).is_file():
                self._complete = False
                continue
            job = LaunchedJob.read(directory / "job.json")
            earlier = json.loads((directory / RECIPE).read_text())
            self._earlier[_key(job.stage, job.config)] = earlier, path
            pending += filter(None, map(artifact_of, job.inputs.values()))
            self._complete &= all(parent.exists() for parent in job.inputs.values())

    def run(self, job: Job) -> Path:
        """Note the changes of the stage's parameters; return its artifact in the lineage.

        Raises ConfigError if the lineage does not contain the stage.
        """
        key = _key(job.spec.name, as_json(job.config))
        if key not in self._earlier:
            if self._complete:
                self.changes.append(f"{' '.join(filter(None, key))} is new")
            raise ConfigError(f"no earlier {key}")
        old, artifact = self._earlier[key]
        made = [name for name, path in job.inputs.items() if artifact_of(path) is not None]
        files = {name: _digest(path) for name, path in job.inputs.items() if name not in made}
        new = recipe(
            job,
            digests=files | dict(job.identities),
            processes=old["processes"],
            trust_remote_code=self._context.trust_remote_code,
        )
        same = {name: old[name] for name in ("code", "versions", "processes")}
        self.changes += recipe_changes(old, new | same, pending=made)
        return artifact


def _key(stage: str, config: Mapping[str, Any]) -> Key:
    """What identifies a stage in a lineage: its title; for stage `source` also the source."""
    source = config.get("source", {})
    return title(stage, config), *(source.get(name) for name in ("path", "subset", "split"))


_digest = cache(content_digest)  # every input of the run may come from the same file
