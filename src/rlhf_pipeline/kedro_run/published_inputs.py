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
from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.config.stages import prompt_policies
from rlhf_pipeline.data.sources.registry import source_origin
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.kedro_run.faults import own_bases
from rlhf_pipeline.pipelines.ppo import reward_inputs, with_generator
from rlhf_pipeline.pipelines.preparation import base_model_identity
from rlhf_pipeline.pipelines.table import policy_stages, stage_specs
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, json_digest
from rlhf_pipeline.stages.cache.planning import input_changes, value_changes

FETCHED = {"reward_base": "reward_model.base_model", "critic_base": "ppo.critic.base_model"}
"""The parameters of what some stages fetch or build."""
_SOURCE = itemgetter("name", "path", "subset", "split")
"""What two jobs that read the same source have in common."""


def check_published(
    pipeline: Pipeline, catalog: CatalogProtocol, blocks: Mapping[str, Any], command: str
) -> dict[str, list[str]]:
    """The published artifacts that a pipeline loads, but other parameters made, with the changes.

    Raises ConfigError for these unless the parameter `inputs` accepts them, and if nothing is
    published. `command` is the `kedro run` that makes what is missing and reuses the rest.
    """
    entries = {name: catalog.get(name) for name in sorted(pipeline.inputs())}
    ours = {name: one for name, one in entries.items() if isinstance(one, ArtifactDataset)}
    if missing := [name for name, entry in ours.items() if not entry.exists()]:
        folders = ", ".join(str(ours[name]._filepath) for name in missing)
        raise ConfigError(
            f"no version of {', '.join(missing)} is published in {folders}. Fix: run the whole "
            "pipeline, `kedro run --pipeline=full`; it reuses all stages that are finished"
        )
    inputs = {name: entry.load() for name, entry in ours.items()}
    seeds = {name: catalog.load(f"params:{name}") for name in ("seed", "policy_seed")}
    changes = changes_since(inputs, blocks, seeds)
    if not changes or catalog.load("parameters").get("inputs") == "newest":
        return changes
    names_by_text: dict[str, list[str]] = {}
    for name, found in changes.items():
        text = shorten("; ".join(found), width=200, placeholder=" ...")
        names_by_text.setdefault(text, []).append(name)
    lines = "".join(f"  {', '.join(names)}: {text}\n" for text, names in names_by_text.items())
    raise ConfigError(
        f"the published inputs were made with other parameters (theirs -> yours):\n{lines}"
        f"Fix: `{command}`, which reuses all that fits; or add --params=inputs=newest to use these "
        "inputs as they are"
    )


def changes_since(
    inputs: Mapping[str, Path], blocks: Mapping[str, Any], seeds: Mapping[str, int]
) -> dict[str, list[str]]:
    """The changes such as "seed 5 -> 1234" from the lineage of published inputs to the parameters.

    Code, libraries and the number of ranks are not parameters. Inputs without changes are missing.
    """
    split, specs, bases = blocks["split"], stage_specs(), own_bases(blocks)
    texts = split.pretraining.readings() if split.pretraining else []
    sources = {_SOURCE(vars(source)): source for source in (*texts, *split.readings())}
    samples = {
        one.sampler: one.sample for one in prompt_policies(blocks) if isinstance(one, SampledConfig)
    }
    found, compared = {}, dict[str, list[str]]()
    for name, artifact in inputs.items():
        made, read = Manifest.read(artifact), set()
        of = "policy_seed" if made.stage in policy_stages() else "seed"
        changes = [*value_changes({of: made.seed}, {of: seeds[of]})]
        for record in made.lineage:
            # The blocks of a stage without blocks of its own follow from those of others.
            own = specs[record["stage"]].blocks if record["stage"] in specs else ()
            present = {block: blocks[block] for block in own} | samples
            if place := FETCHED.get(record["stage"]):
                present["base_model"] = bases.get(place)
                changes += [] if place in bases else [f"{place} is gone"]
            if record["stage"] == "source":
                read.add(key := _SOURCE(record["config"]["source"]))
                present["source"] = sources.get(key)
            digest = json_digest(record)
            if digest not in compared:  # several inputs share a part of their lineage
                compared[digest] = [*_changes(record, present, blocks["reward_model"])]
            changes += compared[digest]
        new = [key for key in map(_SOURCE, map(vars, split.readings())) if read and key not in read]
        changes += [f"source {' '.join(filter(None, key))} is new" for key in new]
        fetched = {FETCHED.get(record["stage"]) for record in made.lineage}
        if made.stage == "split" and "reward_model.base_model" in bases.keys() - fetched:
            changes.append("reward_model.base_model is new")
        if changes:
            found[name] = list(dict.fromkeys(changes))
    return found


def _changes(
    record: Mapping[str, Any], present: Mapping[str, Block | None], trained: Block | None
) -> Iterator[str]:
    """Of the blocks of a stage, and of the files and models that these name."""
    for name in record["config"]:
        if (block := present.get(name)) is None:
            continue
        block = with_generator(block) if isinstance(block, PPOConfig) else block
        yours, theirs = as_json({name: block})[name], record["config"][name]
        if isinstance(block, EvaluateConfig) and block.rewards_judge(trained):
            theirs = theirs | {"judges": []}  # recorded are the rewards of the policy
        # A stage records the part of its policy's block that its program reads.
        place = FETCHED.get(record["stage"], name)
        earlier, faults = validated(place, type(block), yours | theirs)
        yield from faults
        if earlier is not None:
            yield from value_changes(earlier.recipe(), block.recipe(), f"{place}.")
        with suppress(PipelineError, OSError):  # a hub is unreachable, or a file is gone
            old, new = record["inputs"], _digests(block)
            # Other stages have further inputs, and read a part of what their block names.
            others = () if isinstance(block, SourceConfig) else old.keys() ^ new.keys()
            yield from input_changes(old, new, others)


def _digests(block: Block) -> dict[str, str]:
    """The content of what a stage reads beside the results of others, by input."""
    match block:
        case BaseModelConfig():
            return base_model_identity(block)
        case EvaluateConfig():
            paths, identities = reward_inputs(block.judges, JUDGE_PREFIX)
        case PPOConfig() | SampledConfig():
            paths, identities = reward_inputs(block.rewards)
        case SourceConfig():
            paths, identities = source_origin(block)
        case _:
            return {}
    return {name: content_digest(path) for name, path in paths.items()} | identities
