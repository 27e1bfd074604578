"""Which stages there are; which of them train, and on which rows, by all blocks (`blocks`)."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.rewards import as_judges
from rlhf_pipeline.config.sample import IterativeDPOConfig, RejectionConfig, SampledConfig
from rlhf_pipeline.config.split import PHASES, Phase, SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.errors import ConfigError

SupervisedStage = SFTConfig | RewardModelConfig | DPOConfig | KTOConfig
StageConfig = SupervisedStage | PPOConfig | EvaluateConfig

POLICIES: Mapping[str, type[PPOConfig]] = {
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "distill": DistillConfig,
}
"""The blocks of the stages that run the program of PPO."""
SAMPLED: Mapping[str, type[Any]] = {
    "rejection": RejectionConfig,
    "iterative_dpo": IterativeDPOConfig,
}
"""The blocks of policies that train on their own answers."""
BLOCKS: Mapping[str, type[StageConfig]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    **POLICIES,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    **SAMPLED,
    "evaluate": EvaluateConfig,
}
"""The parameter blocks of the stages that load models onto ranks."""
ON_PROMPTS = (*POLICIES, *SAMPLED)
"""The policies that answer prompts and train on their answers."""

OPTIONAL: Mapping[str, Any] = {
    "sft": {},
    "reward_model": {},
    "ppo": {},
    **dict.fromkeys(("grpo", "distill", *SAMPLED)),
}
"""The blocks that may be null, with the value of one that is missing."""

READERS: Mapping[Phase, Collection[str]] = {
    "sft": ("sft",),
    "reward_model": ("reward_model", "dpo", "kto"),
    "ppo": ON_PROMPTS,
}
"""The nodes that train on the rows of each phase."""


def samplers(blocks: Mapping[str, Any]) -> list[PPOConfig | SampledConfig]:
    """The blocks of `ON_PROMPTS` that are set."""
    return [blocks[name] for name in ON_PROMPTS if blocks[name] is not None]


def split_in_use(blocks: Mapping[str, Any]) -> SplitConfig:
    """The split, with weight 0 for phases out of use; raises ConfigError if no weight is left.

    Without a reward model, comparisons serve DPO and KTO only if no policy trains on prompts.
    """
    split: SplitConfig = blocks["split"]
    prompts = bool(samplers(blocks))
    comparisons = blocks["reward_model"] is not None or not prompts
    sft = blocks["sft"] or any(getattr(one, "given_batch_size", 0) for one in samplers(blocks))
    in_use = {"sft": bool(sft), "reward_model": comparisons, "ppo": prompts}
    phases = [phase for phase in PHASES if in_use[phase]]
    pairs = zip(PHASES, split.weights, strict=True)
    weights = tuple(weight if in_use[phase] else 0.0 for phase, weight in pairs)
    if not any(weights):
        raise ConfigError(
            f"split.weights: found {list(split.weights)}, expected more than 0 for one of the "
            f"phases in use: {', '.join(phases)}. Fix: raise it, or remove split.weights"
        )
    return split if weights == split.weights else split.model_copy(update={"weights": weights})


def shares(split: SplitConfig) -> dict[Phase, float]:
    """The share of each phase of a positive weight in the conversations that train."""
    weights = zip(PHASES, split.weights, strict=True)
    return {phase: weight / sum(split.weights) for phase, weight in weights if weight}


def shares_text(split: SplitConfig) -> str:
    """Which share of the rows each phase gets, for a table's last line."""
    found = ", ".join(f"{phase} {share:.0%}" for phase, share in shares(split).items())
    return f"Training conversations by phase: {found}"


def unused_phases(split: SplitConfig, nodes: Collection[str]) -> Iterator[str]:
    """Phases that get rows, but none of the nodes of a run trains on them, one line each."""
    policies = [name for name in (*ON_PROMPTS, "dpo", "kto") if name in nodes]
    for phase, share in shares(split).items() if policies and "split" in nodes else ():
        if not {*READERS[phase]} & {*nodes}:
            blocks = ", ".join(name for name in READERS[phase] if name in OPTIONAL)
            yield (
                f"split: phase {phase} gets {share:.0%} of the training conversations, which "
                f"pipeline {' and '.join(policies)} does not use. Fix: set {blocks} to null"
            )


def faults_without_reward_model(
    blocks: Mapping[str, Any], nodes: Collection[str], *, has_gold: bool
) -> Iterator[str]:
    """Rewards of these nodes that need the reward model, and an evaluation without a judge, if
    `reward_model` is null. `has_gold`: the gold score judges."""
    if blocks["reward_model"] is not None:
        return
    for policy in samplers(blocks):
        if policy.stage in nodes and policy.needs_reward_model:
            yield (
                f"{policy.sampler}.rewards: found trained, but reward_model is null. Fix: set "
                f"reward_model, or other rewards, or {policy.stage} to null"
            )
    evaluations = [name for name in nodes if name.startswith("evaluate")]
    evaluated = [name.removeprefix("evaluate").removeprefix("_") or "ppo" for name in evaluations]
    by_rewards = {policy.stage: as_judges(policy.rewards) for policy in samplers(blocks)}
    judged = blocks["evaluate"].judges or has_gold
    if not judged and not all(by_rewards.get(policy) for policy in evaluated):
        yield (
            "evaluate.judges: found none, expected at least one, because reward_model is null. "
            "Fix: add a judge, such as {reference: last_number}, or set reward_model"
        )
