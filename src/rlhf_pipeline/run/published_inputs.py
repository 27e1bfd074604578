"""Published results that a run starts from: do they come from the present parameters?

`kedro run --from-nodes=ppo` loads the newest split, SFT model and reward model. If another recipe
made them, PPO would train on a mixture that no single set of parameters describes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import Block, validated
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.config.stages import prompt_policies
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.pipelines.evaluate import TASKS, judge_inputs
from rlhf_pipeline.pipelines.judge_model import SPECS
from rlhf_pipeline.pipelines.ppo import reward_inputs, with_generator
from rlhf_pipeline.pipelines.preparation import base_model_identity, source_job
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest, content_digest
from rlhf_pipeline.stages.cache.planning import input_changes, value_changes

_SOURCE = itemgetter("name", "path", "subset", "split")
"""What two jobs that read the same source have in common."""
DERIVED = ("teacher", TASKS.name, *(spec.name for spec in SPECS))
"""Stages whose blocks follow from those of others."""


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
    inputs: Mapping[str, Path], blocks: Mapping[str, Any], seed: int
) -> dict[str, list[str]]:
    """The changes such as "seed 5 -> 1234" from the lineage of published inputs to the parameters.

    Code, libraries and the number of ranks are not parameters. Inputs without changes are missing.
    """
    split = blocks["split"]
    texts = split.pretraining.readings() if split.pretraining else []
    sources = {_SOURCE(vars(one)): one for one in (*texts, *split.readings())}
    inner = {
        one.sampler: one.sample for one in prompt_policies(blocks) if isinstance(one, SampledConfig)
    }
    found, known = {}, dict[str, dict[str, str] | None]()
    for name, artifact in inputs.items():
        made = Manifest.read(artifact)
        changes = [*value_changes({"seed": made.seed}, {"seed": seed})]
        read = set()
        for record in made.lineage:
            present = {**blocks, **inner}
            if record["stage"] == "source":
                read.add(key := _SOURCE(record["config"]["source"]))
                present = {"source": sources.get(key)}
            for each in record["config"] if record["stage"] not in DERIVED else ():
                if block := present.get(each):
                    changes += _changes(record, each, block, known)
        new = [key for key in map(_SOURCE, map(vars, split.readings())) if read and key not in read]
        changes += [f"source {' '.join(filter(None, key))} is new" for key in new]
        if changes:
            found[name] = list(dict.fromkeys(changes))
    return found


def _changes(
    record: Mapping[str, Any], name: str, block: Block, known: dict[str, dict[str, str] | None]
) -> Iterator[str]:
    """Of one block of a stage, and of the files and models of others that it has read; those of all
    blocks so far are `known`, by the block's text."""
    block = with_generator(block) if isinstance(block, PPOConfig) else block
    yours, theirs = as_json({name: block})[name], record["config"][name]
    if isinstance(block, EvaluateConfig) and not block.judges:
        theirs = theirs | {"judges": []}  # a policy's rewards may judge in their place
    # A stage records the part of its policy's block that its program reads.
    earlier, faults = validated(name, type(block), yours | theirs)
    yield from faults
    if earlier is not None:
        yield from value_changes(earlier.recipe(), block.recipe(), f"{name}.")
    if (text := repr(block)) not in known:
        known[text] = None
        with suppress(PipelineError, OSError):  # a hub is unreachable, or a file is gone
            known[text] = _digests(block)
    if (new := known[text]) is not None:
        old = record["inputs"]
        # Other stages have further inputs, and read a part of what their block names.
        others = () if isinstance(block, SourceConfig) else old.keys() ^ new.keys()
        yield from input_changes(old, new, others)


def _digests(block: Block) -> dict[str, str]:
    """The content of what a stage reads beside the results of others, by input."""
    paths: Mapping[str, Path] = {}
    identities: Mapping[str, str] = {}
    match block:
        case BaseModelConfig():
            identities = base_model_identity(block)
        case EvaluateConfig():
            paths, identities = judge_inputs(block.judges)
        case PPOConfig() | SampledConfig():
            paths, identities = reward_inputs(block.rewards)
        case SourceConfig():
            job = source_job(block, 0)
            paths, identities = job.inputs, job.identities
    return {name: content_digest(path) for name, path in paths.items()} | dict(identities)


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
        f"  {', '.join(names)}: {shorten(text, width=200, placeholder=' ...')}\n"
        for text, names in names_by_changes.items()
    ]
    raise ConfigError(
        f"the published inputs were made with other parameters (theirs -> yours):\n{''.join(lines)}"
        f"Fix: `{command}`, which reuses all that fits; or add --params=inputs=newest to use these "
        "inputs as they are"
    )
