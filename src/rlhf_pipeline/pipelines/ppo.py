"""Stages that run the program of PPO: PPO, GRPO and distillation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import INPUT_PREFIX, CallableReward, ModelReward, ReferenceReward
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import NAME, common_contract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.pipelines.preparation import BASE_MODEL, base_model_identity
from rlhf_pipeline.runtime.hub import commit_of
from rlhf_pipeline.runtime.manifest import artifact_of, folder_digest
from rlhf_pipeline.stages.cache.fingerprint import library_version
from rlhf_pipeline.stages.job import Job, Stages, StageSpec
from rlhf_pipeline.stages.launch.resources import gpu_count


def _spec(block: type[PPOConfig]) -> StageSpec:
    sizes = ("rollout_batch_size", "minibatch_size", "ptx.batch_size")
    return StageSpec(
        name=block.stage,
        program="rlhf_pipeline.training.ppo",
        blocks={block.stage: block},
        batch_sizes=tuple(f"{block.stage}.{size}" for size in sizes),
        headline_metrics=("objective/score", "objective/kl", "validation/score"),
    )


PPO, GRPO = _spec(PPOConfig), _spec(GRPOConfig)
DISTILL = replace(
    _spec(DistillConfig),
    batch_sizes=(*_spec(DistillConfig).batch_sizes, "distill.given_batch_size"),
    headline_metrics=("objective/kl", "validation/kl"),
)
TEACHER = replace(BASE_MODEL, name="teacher", blocks={})
"""Fetches the teacher like a base model."""
CRITIC_BASE = replace(TEACHER, name="critic_base")
"""Fetches the model that a critic with `start: own` starts from."""


def _by_rewards(policy: StageSpec) -> Callable[..., Path]:
    def node(
        split: Path,
        sft_model: Path,
        reward_model: Path,
        trained: RewardModelConfig | None,
        config: Any,
        seed: int,
        stages: Stages,
    ) -> Path:
        """Train the SFT model on the scores of its rewards for the prompts of the phase `ppo`."""
        assert isinstance(config, PPOConfig), "checked before the run"
        rewards, identities = reward_inputs(config.rewards)
        own = {} if trained is None else {"reward_model": reward_model}
        if config.critic is not None and (base := config.critic.base_model) is not None:
            place = f"{policy.name}.critic.base_model"
            own["critic_base"] = _fetched(CRITIC_BASE, base, place, sft_model, stages)
        job = _job(policy, split, sft_model, config, own | rewards, seed)
        return stages.run(replace(job, identities=identities))

    return node


ppo, grpo = _by_rewards(PPO), _by_rewards(GRPO)


def distill(
    split: Path, sft_model: Path, config: DistillConfig | None, seed: int, stages: Stages
) -> Path:
    """Train the SFT model towards the teacher, on its own answers to the prompts of phase `ppo`."""
    assert config is not None, "checked before the run"
    teacher = _fetched(TEACHER, config.teacher, "distill.teacher", sft_model, stages)
    given = {"demonstrations": split / "sft"} if config.given_batch_size else {}
    return stages.run(_job(DISTILL, split, sft_model, config, {"teacher": teacher} | given, seed))


def _fetched(
    spec: StageSpec, config: BaseModelConfig, place: str, sft_model: Path, stages: Stages
) -> Path:
    """Fetch the model of the parameter `place`.

    Raises ArtifactError before PPO starts if the SFT model has another tokenizer.
    """
    identity = base_model_identity(config, place)
    model = stages.run(Job(spec, {"base_model": config}, {}, 0, identity))
    models = {"sft_model": sft_model, place: model}
    if all((folder / NAME).is_file() for folder in models.values()):  # a plan has none yet
        common_contract(models, "choose a model with the policy's tokenizer and chat template")
    return model


def _job(
    spec: StageSpec,
    split: Path,
    sft_model: Path,
    config: PPOConfig,
    more: dict[str, Path],
    seed: int,
) -> Job:
    inputs = {"prompts": split / "ppo", "sft_model": sft_model, **config.code_inputs()}
    if config.ptx is not None:
        inputs["pretraining"] = split / "pretraining"
    block = with_generator(config)
    return Job(spec.answering_by(block.generator), {spec.name: block}, inputs | more, seed)


def with_generator(config: PPOConfig) -> PPOConfig:
    """The parameters with vllm for `auto`, if this machine has vLLM and a GPU, and vLLM can answer
    with them; otherwise `auto` is transformers."""
    if config.generator != "auto" or find_spec("vllm") is None or gpu_count() == 0:
        return config
    refused = any(config.refused_by_vllm())
    return config if refused else config.model_copy(update={"generator": "vllm"})


def reward_inputs(
    rewards: Sequence[Block | None], prefix: str = INPUT_PREFIX
) -> tuple[dict[str, Path], dict[str, str]]:
    """Inputs of rewards or judges, by input name: paths, and identities.

    The paths are source files of functions and reward models that this pipeline made. The
    identities are digests of reward models made elsewhere, the commit of a judge on the hub, and
    the version of math-verify. Raises ArtifactError if the hub lacks a model, or is out of reach.
    """
    paths, identities = {}, {}
    for index, reward in enumerate(rewards):
        name = f"{prefix}{index}"
        match reward:
            case CallableReward():
                paths[name] = source_file(reward.callable)
            case ModelReward(on_hub=True):
                try:
                    identities[name] = commit_of("model", reward.path, reward.revision)
                except LookupError as error:
                    raise ArtifactError(f"evaluate.{name}: {error}") from error
            case ModelReward() if artifact_of(reward.folder) is not None:
                paths[name] = reward.folder
            case ModelReward():
                identities[name] = folder_digest(reward.folder)
            case ReferenceReward(reference="math"):
                identities[name] = library_version("math-verify")
    return paths, identities
