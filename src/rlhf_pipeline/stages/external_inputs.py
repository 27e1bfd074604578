"""Inputs that no stage makes, and how their content is identified: base models and rewards.

A changed file, another commit on the hub or a changed reward function changes the fingerprint.
"""

from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import JUDGE_PREFIX
from rlhf_pipeline.config.reward_files import source_file
from rlhf_pipeline.config.rewards import (
    INPUT_PREFIX,
    CallableReward,
    Judge,
    ModelJudge,
    ModelReward,
    local_source,
)
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.hub import commit_of
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.manifest import artifact_of, folder_digest


def base_model_identity(config: BaseModelConfig) -> dict[str, str]:
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
            f"base_model.path: {error}; no local folder has this name either. Fix: check the "
            "spelling and the network, or set base_model.revision to a commit that was downloaded "
            "before"
        ) from error


def judge_inputs(judges: Sequence[Judge]) -> tuple[dict[str, Path], dict[str, str]]:
    """Inputs of the judges, like `reward_inputs`; for a reward model on the hub, its commit.

    Raises ArtifactError if the hub cannot be reached, or has no such model.
    """
    paths, identities = reward_inputs([local_source(judge) for judge in judges], JUDGE_PREFIX)
    for index, judge in enumerate(judges):
        if isinstance(judge, ModelJudge) and judge.folder is None:
            place = f"{JUDGE_PREFIX}{index}"
            try:
                identities[place] = commit_of("model", judge.model, judge.revision)
            except LookupError as error:
                raise ArtifactError(f"evaluate.{place}: {error}") from error
    return paths, identities


def reward_inputs(
    rewards: Sequence[Block], prefix: str = INPUT_PREFIX
) -> tuple[dict[str, Path], dict[str, str]]:
    """Inputs of reward functions and reward models, by input name.

    Source files of functions, and reward models made by this pipeline; digests of reward models
    made elsewhere.
    """
    paths, identities = {}, {}
    for index, reward in enumerate(rewards):
        name = f"{prefix}{index}"
        if isinstance(reward, CallableReward):
            paths[name] = source_file(reward)
        elif isinstance(reward, ModelReward) and artifact_of(reward.folder) is not None:
            paths[name] = reward.folder
        elif isinstance(reward, ModelReward):
            identities[name] = folder_digest(reward.folder)
    return paths, identities
