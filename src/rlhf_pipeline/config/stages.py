"""Which stages there are; which of them train, and on which rows, by all blocks (`blocks`)."""

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any, get_args

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import POLICIES
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.rewards import as_judges, uses_trained
from rlhf_pipeline.config.sample import IterativeDPOConfig, RejectionConfig, SampledConfig
from rlhf_pipeline.config.split import PHASES, Phase, SplitConfig
from rlhf_pipeline.config.training import (
    RewardModelConfig,
    SFTConfig,
    TrainedModel,
    TrainedModelConfig,
)
from rlhf_pipeline.errors import ConfigError

SupervisedStage = SFTConfig | RewardModelConfig | DPOConfig | KTOConfig
StageConfig = SupervisedStage | PPOConfig | EvaluateConfig

SELF_TRAINING: Mapping[str, type[Any]] = {
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
    **SELF_TRAINING,
    "evaluate": EvaluateConfig,
}
"""The parameter blocks of the stages that load models onto ranks."""
PROMPT_POLICIES = (*POLICIES, *SELF_TRAINING)
"""The policies that answer prompts and train on their answers."""

OPTIONAL: Mapping[str, Any] = {
    "sft": {},
    "reward_model": {},
    "ppo": {},
    **dict.fromkeys(("grpo", "distill", *SELF_TRAINING)),
}
"""The blocks that may be null, with the value of one that is missing."""


def trainers_of_phase(blocks: Mapping[str, Any]) -> dict[Phase, tuple[str, ...]]:
    """The nodes that train on the rows of each phase."""
    given = [name for name in PROMPT_POLICIES if getattr(blocks.get(name), "given_batch_size", 0)]
    comparing = ("reward_model", "dpo", "kto")
    return {"sft": ("sft", *given), "reward_model": comparing, "ppo": PROMPT_POLICIES}


def prompt_policies(blocks: Mapping[str, Any]) -> list[PPOConfig | SampledConfig]:
    """The blocks of `PROMPT_POLICIES` that are set."""
    return [blocks[name] for name in PROMPT_POLICIES if blocks[name] is not None]


def split_in_use(blocks: Mapping[str, Any]) -> SplitConfig:
    """The split, with weight 0 for phases out of use, and with what is held back for the second
    reward model; raises ConfigError if no weight is left.

    Without a reward model, comparisons serve DPO and KTO only if no policy trains on prompts.
    """
    split: SplitConfig = blocks["split"]
    prompts = bool(prompt_policies(blocks))
    comparisons = blocks["reward_model"] is not None or not prompts
    sft = any(blocks[name] for name in trainers_of_phase(blocks)["sft"])
    in_use = {"sft": sft, "reward_model": comparisons, "ppo": prompts}
    weights = tuple(one if in_use[phase] else 0.0 for phase, one in split.weight_of.items())
    if not any(weights):
        phases = ", ".join(phase for phase in PHASES if in_use[phase])
        raise ConfigError(
            f"split.weights: found {list(split.weights)}, expected more than 0 for one of the "
            f"phases in use: {phases}. Fix: raise it, or remove split.weights"
        )
    judge = blocks["evaluate"].judge_model
    held_back = 0.0 if judge is None else judge.held_back or 0.0
    return split.model_copy(update={"weights": weights, "held_back": held_back})


def shares_text(split: SplitConfig) -> str:
    """Which share of the conversations that train each phase gets, for a table's last line."""
    weights, total = split.weight_of, sum(split.weights)
    found = ", ".join(f"{phase} {one / total:.0%}" for phase, one in weights.items() if one)
    if split.held_back:
        found += f"; {split.held_back:.0%} of reward_model's train only the second one, a judge"
    return f"Training conversations that can serve each phase: {found}"


def unused_rows(
    report: Mapping[str, Any], nodes: Collection[str], blocks: Mapping[str, Any]
) -> str | None:
    """How much of a split, by its report, the nodes of a run leave to others, and how to use it."""
    weights = dict(zip(PHASES, report["settings"]["weights"], strict=True))
    used = [
        phase
        for phase in PHASES
        if weights[phase] and {*trainers_of_phase(blocks)[phase]} & {*nodes}
    ]
    sizes = {phase: report["conversations"][phase] for phase in PHASES}
    left = [phase for phase, size in sizes.items() if size and phase not in used]
    if not used or not left:
        return None
    share = sum(sizes[phase] for phase in used) / sum(sizes.values())
    text = (
        f"split: this run trains on {share:.0%} of the training conversations; the others are for "
        f"stages of {' and '.join(left)} that are not in it"
    )
    if not all({*used} & {*kind} for kind in report["serves"]):
        return text  # some rows serve nothing else
    given = ", ".join(f"{weights[phase] if phase in used else 0:g}" for phase in PHASES)
    return f"{text}. To train on all of them, set split.weights to [{given}]"


def in_bf16(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Raw parameters with bf16 for each model in training whose precision nobody set.

    At ZeRO stage 0, there is no bf16.
    """
    found = {name: deepcopy(block) for name, block in parameters.items()}  # may share parts
    for name, kind in BLOCKS.items():
        for model in _trained_parts(kind, found.get(name)):
            deepspeed = model.get("deepspeed") or {}
            if isinstance(deepspeed, dict) and deepspeed.get("zero_stage") != 0:
                model["deepspeed"] = {"precision": "bf16", **deepspeed}
    return found


def _trained_parts(kind: type[Any], block: Any) -> Iterator[dict[str, Any]]:
    """The raw blocks of the models that a raw block trains, those with defaults included."""
    if not isinstance(block, dict) or issubclass(kind, TrainedModelConfig):
        yield from [block] if isinstance(block, dict) else ()
        return
    for name, field in kind.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        trains = any(isinstance(one, type) and issubclass(one, TrainedModelConfig) for one in kinds)
        if trains and isinstance(block.get(name, {} if field.default else None), dict):
            yield block.setdefault(name, {})


def slow_precisions(blocks: Mapping[str, Any], nodes: Collection[str]) -> Iterator[str]:
    """Models of these nodes that train in fp32, for GPUs that have bf16."""
    models = trained_models(blocks, nodes)
    found = [each.block for each in models if each.config.deepspeed.precision == "fp32"]
    if found:
        yield (
            f"deepspeed.precision of {', '.join(found)}: found fp32, expected bf16, which these "
            "GPUs have: weights and activations take twice the memory, and products are in TF32. "
            "Fix: set bf16, which needs zero_stage 1 or higher"
        )


def trained_models(blocks: Mapping[str, Any], nodes: Collection[str]) -> list[TrainedModel]:
    """The models that these nodes train."""
    named = [name for name in BLOCKS if name in nodes and name != "evaluate" and blocks[name]]
    models = [model for name in named for model in blocks[name].models()]
    return [model for model in models if isinstance(model, TrainedModel)]


def adapter_rates(
    blocks: Mapping[str, Any], nodes: Collection[str], chosen: Collection[str]
) -> Iterator[str]:
    """Models of these nodes whose adapters train at the default rate, which suits whole models.

    `chosen` are the names of the parameters that the user set.
    """
    for model in trained_models(blocks, nodes):
        place = f"{model.block}.optimizer.learning_rate"
        if model.config.lora and place not in chosen:
            rate = model.config.optimizer.learning_rate
            yield (
                f"{model.block}.lora: the learning rate {rate:g} is the default for whole models, "
                f"and adapters need about ten times as much. Fix: set {place} to {10 * rate:g}"
            )


def faults_without_reward_model(
    blocks: Mapping[str, Any], nodes: Collection[str], *, has_gold: bool
) -> Iterator[str]:
    """Rewards of these nodes that need the reward model, a second one, and an evaluation without a
    judge, if `reward_model` is null. `has_gold`: the gold score judges."""
    if blocks["reward_model"] is not None:
        return
    if blocks["evaluate"].judge_model is not None:
        yield (
            "evaluate.judge_model: found a block, but reward_model is null, whose parameters it "
            "trains with. Fix: set reward_model, or judge_model to null"
        )
    for policy in prompt_policies(blocks):
        if policy.stage in nodes and uses_trained(policy.rewards):
            yield (
                f"{policy.sampler}.rewards: found trained, but reward_model is null. Fix: set "
                f"reward_model, or other rewards, or {policy.stage} to null"
            )
    evaluations = [name for name in nodes if name.startswith("evaluate")]
    evaluated = [name.removeprefix("evaluate").removeprefix("_") or "ppo" for name in evaluations]
    by_rewards = {policy.stage: as_judges(policy.rewards) for policy in prompt_policies(blocks)}
    judged = blocks["evaluate"].judges or has_gold
    if not judged and not all(by_rewards.get(policy) for policy in evaluated):
        yield (
            "evaluate.judges: found none, expected at least one, because reward_model is null. "
            "Fix: add a judge, such as {reference: last_number}, or set reward_model"
        )
