from pathlib import Path

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.hub import commit_of
from rlhf_pipeline.pipelines.split import read_sources
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.manifest import folder_digest
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="base_model",
    program="rlhf_pipeline.models.base_model",
    blocks={"base_model": BaseModelConfig},
    distributed=False,
)


def base_model(config: BaseModelConfig, split: SplitConfig, seed: int, stages: Stages) -> Path:
    """Fetch the base model, or build a small one with a tokenizer trained on the sources."""
    records = {} if config.path else read_sources("source", split.records(), split, seed, stages)
    job = Job(SPEC, {"base_model": config}, records, seed, base_model_identity(config))
    return stages.run(job)


def base_model_identity(config: BaseModelConfig, block: str = "base_model") -> dict[str, str]:
    """The commit of `revision` on the hub, or the digest of a local folder or file.

    Empty for a model that is built from `base_model.architecture`. Raises ArtifactError if the hub
    cannot be reached, or has no such model.
    """
    if config.path is None:
        return {}
    if config.is_gguf:
        return {BYTES: file_digest(Path(config.path))}
    if Path(config.path).is_dir():
        return {BYTES: folder_digest(Path(config.path))}
    try:
        return {COMMIT: commit_of("model", config.path, config.revision)}
    except LookupError as error:
        raise ArtifactError(
            f"{block}.path: {error}; no local folder has this name either. Fix: check the spelling"
            f" and the network, or set {block}.revision to a commit that was downloaded before"
        ) from error
