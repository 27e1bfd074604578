from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import INPUT_PREFIX, CallableReward, ModelReward, ReferenceReward
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.runtime.manifest import artifact_of, folder_digest
from rlhf_pipeline.stages.cache.code import library_version
from rlhf_pipeline.stages.job import Job, Stages, StageSpec


def spec_of(block: type[PPOConfig]) -> StageSpec:
    """The stage that runs the program of PPO with this block."""
    sizes = ("rollout_batch_size", "minibatch_size", "ptx.batch_size")
    return StageSpec(
        name=block.stage,
        program="rlhf_pipeline.training.ppo",
        blocks={block.stage: block},
        batch_sizes=tuple(f"{block.stage}.{size}" for size in sizes),
        headline_metrics=("objective/score", "objective/kl", "validation/score"),
    )


SPEC = spec_of(PPOConfig)
READS = "split sft_model reward_model params:reward_model"


def by_rewards(policy: StageSpec) -> Callable[..., Path]:
    """The node function of a stage that runs the program of PPO."""

    def node(
        split: Path,
        sft_model: Path,
        reward_model: Path,
        trained: RewardModelConfig | None,
        config: PPOConfig | None,
        seed: int,
        stages: Stages,
    ) -> Path:
        """Train the SFT model on the scores of its rewards for the prompts of the phase `ppo`."""
        assert config is not None, "checked before the run"
        rewards, reward_identities = reward_inputs(config.rewards)
        inputs = shared_inputs(split, sft_model, config)
        if trained is not None:
            inputs["reward_model"] = reward_model
        inputs |= rewards
        spec = policy.answering_by(config.generator)
        return stages.run(Job(spec, {spec.name: config}, inputs, seed, reward_identities))

    node.__annotations__["config"] = policy.blocks[policy.name] | None  # for Kedro
    return node


ppo = by_rewards(SPEC)


def shared_inputs(split: Path, sft_model: Path, config: PPOConfig) -> dict[str, Path]:
    """What every stage that runs the program of PPO reads: prompts, its start, the text of ptx."""
    inputs = {"prompts": split / "ppo", "sft_model": sft_model}
    return inputs if config.ptx is None else inputs | {"pretraining": split / "pretraining"}


def reward_inputs(
    rewards: Sequence[Block], prefix: str = INPUT_PREFIX
) -> tuple[dict[str, Path], dict[str, str]]:
    """Inputs of reward functions and reward models, by input name: paths, and identities.

    The paths are source files of functions and reward models that this pipeline made. The
    identities are digests of reward models made elsewhere, and the version of math-verify.
    """
    paths, identities = {}, {}
    for index, reward in enumerate(rewards):
        name = f"{prefix}{index}"
        if isinstance(reward, CallableReward):
            paths[name] = source_file(reward.callable)
        elif isinstance(reward, ModelReward) and artifact_of(reward.folder) is not None:
            paths[name] = reward.folder
        elif isinstance(reward, ModelReward):
            identities[name] = folder_digest(reward.folder)
        elif isinstance(reward, ReferenceReward) and reward.reference == "math":
            identities[name] = library_version("math-verify")
    return paths, identities
