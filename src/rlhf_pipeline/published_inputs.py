"""Published results that a run starts from: do they come from the present parameters?

`kedro run --from-nodes=ppo` loads the newest split, SFT model and reward model. If another recipe
made them, PPO would train on a mixture that no single set of parameters describes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.io.core import DatasetError
from kedro.pipeline import Pipeline

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of, content_digest
from rlhf_pipeline.stage_registry import parameter_blocks
from rlhf_pipeline.stages.cache.fingerprint import recipe
from rlhf_pipeline.stages.cache.recipe_diff import recipe_changes
from rlhf_pipeline.stages.cache.workspace import RECIPE, attempts, first_attempt
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import STAGES, Job

SHOWN = 3
"""Changes that a refusal shows of each input, and inputs."""


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


def changes_since(
    inputs: Mapping[str, Path], catalog: CatalogProtocol, context: RunContext
) -> dict[str, list[str]]:
    """How the recipes of published inputs differ from the present parameters.

    Code, libraries and the number of ranks do not count: they are not parameters.

    Returns:
        Data set to changes such as "seed 5 -> 1234"; inputs without a change are missing.
    """
    found = {}
    makers = sum((pipelines[name] for name in pipelines), Pipeline([]))
    for name, artifact in inputs.items():
        comparison = _Comparison(_lineage(artifact, context.workspace), context)
        results: dict[str, Any] = {STAGES: comparison, **inputs}
        for node in makers.to_outputs(name).nodes:
            try:
                values = [results.get(each) or _load(each, catalog) for each in node.inputs]
                results[node.outputs[0]] = node.func(*values)
            except (PipelineError, DatasetError, OSError):
                continue  # the node needs a result that is gone, or a hub that is unreachable
        if comparison.changes:
            found[name] = list(dict.fromkeys(comparison.changes))
    return found


def _load(name: str, catalog: CatalogProtocol) -> Any:
    """Load a data set. Kedro validates only the blocks that the chosen pipeline reads."""
    value = catalog.load(name)
    block = parameter_blocks().get(name.removeprefix("params:"))
    return block.model_validate(value) if block and isinstance(value, dict) else value


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
    inputs_by_changes: dict[tuple[str, ...], list[str]] = {}
    for name, found in changes.items():
        inputs_by_changes.setdefault(tuple(found), []).append(name)
    lines = [
        f"  {', '.join(names)}: {'; '.join(found[:SHOWN])}"
        + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        for found, names in inputs_by_changes.items()
    ]
    more = len(lines) - SHOWN
    raise ConfigError(
        "\n".join(
            [
                "the published inputs were made with other parameters (theirs -> yours):",
                *lines[:SHOWN],
                f"Fix: `{command}`, which reuses all that fits; or add --params=inputs=newest to "
                "use these inputs as they are" + (f" ({more} more differ)" if more > 0 else ""),
            ]
        )
    )


Key = tuple[str | None, ...]


@dataclass
class _Lineage:
    """The recipes behind an artifact, as far as their work directories exist."""

    recipes: dict[Key, dict[str, Any]] = field(default_factory=dict)
    artifacts: dict[Key, Path] = field(default_factory=dict)
    complete: bool = True


def _lineage(artifact: Path, workspace: Path) -> _Lineage:
    lineage = _Lineage()
    pending = [artifact]
    while pending:
        path = pending.pop()
        manifest = Manifest.read(path)
        directory = first_attempt(workspace, manifest.stage, manifest.fingerprint)
        try:
            made_by = next(each for each in attempts(directory) if (each / RECIPE).is_file())
            recipe = json.loads((made_by / RECIPE).read_text())
            job = LaunchedJob.read(made_by / "job.json")
        except (StopIteration, OSError, ValueError):
            lineage.complete = False
            continue
        key = _key(manifest.stage, manifest.config)
        lineage.recipes[key], lineage.artifacts[key] = recipe, path
        for parent in map(artifact_of, job.inputs.values()):
            if parent is not None:
                pending.append(parent)
        if not all(parent.exists() for parent in job.inputs.values()):
            lineage.complete = False
    return lineage


def _key(stage: str, config: Mapping[str, Any]) -> Key:
    """What identifies a stage in a lineage: its name; for stage `source` also the source."""
    source = config.get("source")
    if source is None:
        return (stage,)
    return (stage, *(source[name] for name in ("name", "path", "subset", "split")))


@dataclass
class _Comparison:
    """Compares the jobs of the nodes with the recipes of a lineage, in place of a `StageRunner`."""

    lineage: _Lineage
    context: RunContext
    changes: list[str] = field(default_factory=list)

    def run(self, job: Job) -> Path:
        """Note the changes of the stage's parameters; return its artifact in the lineage.

        Raises:
            ConfigError: the lineage does not contain the stage.
        """
        key = _key(job.spec.name, as_json(job.config))
        old = self.lineage.recipes.get(key)
        if old is None:
            if self.lineage.complete:
                self.changes.append(f"{' '.join(filter(None, key))} is new")
            raise ConfigError(f"no earlier {key}")
        made = [name for name, path in job.inputs.items() if artifact_of(path) is not None]
        files = {name: _digest(path) for name, path in job.inputs.items() if name not in made}
        new = recipe(
            job,
            digests=files | dict(job.identities),
            processes=old["processes"],
            trust_remote_code=self.context.trust_remote_code,
        )
        same = {name: old[name] for name in ("code", "versions", "processes")}
        self.changes += recipe_changes(old, new | same, pending=made)
        return self.lineage.artifacts[key]


_digest = cache(content_digest)  # every input of the run may come from the same file
