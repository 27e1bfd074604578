"""Nodes that prepare the base model and the data: stages base_model, source and split."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.records import RowCounts
from rlhf_pipeline.data.sources.registry import adapter_module, find_source, source_origin
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.hub import commit_of
from rlhf_pipeline.runtime.manifest import folder_digest
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SOURCE = StageSpec(
    name="source",
    program="rlhf_pipeline.data.source",
    distributed=False,
    libraries=("datasets", "pyarrow"),
)

SPLIT = StageSpec(
    name="split",
    program="rlhf_pipeline.data.split",
    distributed=False,
    libraries=("transformers", "tokenizers", "numpy", "pyarrow"),
    blocks={"split": SplitConfig},
)

BASE_MODEL = StageSpec(
    name="base_model",
    program="rlhf_pipeline.models.base_model",
    blocks={"base_model": BaseModelConfig},
    distributed=False,
)
REWARD_BASE = replace(BASE_MODEL, name="reward_base", blocks={})
"""Fetches the model that a reward model with `start: own` starts from."""


def base_model(
    config: BaseModelConfig,
    split: SplitConfig,
    seed: int,
    stages: Stages,
    spec: StageSpec = BASE_MODEL,
    block: str = "base_model",
) -> Path:
    """Fetch the base model, or build a small one with a tokenizer trained on the sources."""
    records = {} if config.path else read_sources("source", split.readings(), split, seed, stages)
    identities = base_model_identity(config, block)
    return stages.run(Job(spec, {"base_model": config}, records, seed, identities))


def reward_base(
    config: RewardModelConfig | None, split: SplitConfig, seed: int, stages: Stages
) -> Path | None:
    """The model that the reward model starts from, if it has its own."""
    if config is None or config.base_model is None:
        return None
    block = "reward_model.base_model"
    return base_model(config.base_model, split, seed, stages, REWARD_BASE, block)


def base_model_identity(config: BaseModelConfig, block: str = "base_model") -> dict[str, str]:
    """The commit of `revision` on the hub, or the digest of a local folder.

    Empty for a model that is built from `base_model.architecture`. Raises ArtifactError if the hub
    cannot be reached, or has no such model.
    """
    if config.path is None:
        return {}
    if Path(config.path).is_dir():
        return {BYTES: folder_digest(Path(config.path))}
    try:
        return {COMMIT: commit_of("model", config.path, config.revision)}
    except LookupError as error:
        raise ArtifactError(
            f"{block}.path: {error}; no local folder has this name either. Fix: check the spelling"
            f" and the network, or set {block}.revision to a commit that was downloaded before"
        ) from error


def split(
    base_model: Path,
    config: SplitConfig,
    trained: RewardModelConfig | None,
    seed: int,
    stages: Stages,
    spec: StageSpec = SPLIT,
) -> Path:
    """Divide the sources into disjoint, tokenized rows for each phase, validation and test."""
    inputs = {"base_model": base_model}
    if own := reward_base(trained, config, seed, stages):
        inputs["reward_base"] = own
    inputs |= read_sources("source", config.readings(), config, seed, stages)
    if config.pretraining is not None:
        inputs |= read_sources("pretraining", config.pretraining.readings(), config, seed, stages)
    return stages.run(Job(spec, {"split": config}, inputs, seed))


def read_sources(
    kind: str, sources: Sequence[SourceConfig], config: SplitConfig, seed: int, stages: Stages
) -> dict[str, Path]:
    """Read each source, or reuse its records; return them as inputs `kind_0`, `kind_1`, ...

    Raises DataError if a source has more bad rows than `split.max_bad_fraction` allows.
    """
    jobs = {f"{kind}_{index}": source_job(source, seed) for index, source in enumerate(sources)}
    records = {name: stages.run(job) for name, job in jobs.items()}
    for folder, source in zip(records.values(), sources, strict=True):
        RowCounts.read(folder).check_bad_fraction(config.max_bad_fraction, source.label())
    return records


def source_job(config: SourceConfig, seed: int) -> Job:
    """The job that reads one source; the adapter and the files or the commit are in its recipe.

    Raises the errors of `source_origin`.
    """
    (files, identities), source = source_origin(config), find_source(config)
    spec = replace(SOURCE, libraries=(*SOURCE.libraries, *source.libraries))
    seed = 0 if source.generate is None else seed
    modules = (adapter_module(config.name),)
    return Job(spec, {"source": config}, files, seed, identities, modules)
