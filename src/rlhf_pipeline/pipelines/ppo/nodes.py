"""Stage ppo: trains the policy by PPO."""

from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import uses_trained
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.stages.external_inputs import reward_inputs
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="ppo",
    program="rlhf_pipeline.training.ppo",
    blocks={"ppo": PPOConfig},
    batch_sizes=("ppo.rollout_batch_size", "ppo.minibatch_size", "ppo.ptx.batch_size"),
    headline_metrics=("objective/score", "objective/kl", "validation/score"),
    caveats={
        "score": "PPO was trained to maximize the score of the reward model, so this judge "
        "favours PPO.",
        "gold": "PPO never saw the scores of this judge.",
    },
)


def ppo(
    split: Path,
    sft_model: Path,
    reward_model: Path,
    config: PPOConfig,
    reward_model_config: RewardModelConfig,
    seed: int,
    stages: Stages,
) -> Path:
    """Train the SFT model by PPO on the scores of `ppo.rewards`."""
    if uses_trained(config.rewards):
        check_gate(reward_model, reward_model_config.gate)
    rewards, reward_identities = reward_inputs(config.rewards)
    inputs = {"prompts": split / "ppo", "sft_model": sft_model, "reward_model": reward_model}
    inputs |= rewards
    if config.ptx is not None:
        inputs["pretraining"] = split / "pretraining"
    spec = SPEC
    if config.generator == "vllm":
        spec = replace(SPEC, libraries=(*SPEC.libraries, "vllm"))
    return stages.run(Job(spec, {"ppo": config}, inputs, seed, reward_identities))


def check_gate(reward_model: Path, gate: float | None) -> None:
    """Refuse a finished reward model that may be no better than chance.

    Raises StageError with its accuracy.
    """
    if gate is None or not (reward_model / NAME).is_file():
        return
    metrics = Manifest.read(reward_model).metrics
    accuracy, lower, upper = (
        metrics[f"validation/accuracy{end}"] for end in ("", "_lower", "_upper")
    )
    if not lower > gate:
        raise StageError(
            f"reward_model.gate: found an accuracy of {accuracy:.1%} (95%: {lower:.1%} to "
            f"{upper:.1%}) on held-out comparisons, expected a lower end above {gate:.1%}. PPO "
            "would maximize noise. Fix: use more comparisons or train longer, or set "
            "reward_model.gate to null"
        )
