from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.stages.external_inputs import reward_inputs
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="ppo",
    program="rlhf_pipeline.training.ppo",
    blocks={"ppo": PPOConfig},
    batch_sizes=("ppo.rollout_batch_size", "ppo.minibatch_size", "ppo.ptx.batch_size"),
    headline_metrics=("objective/score", "objective/kl", "validation/score"),
)


def ppo(
    split: Path, sft_model: Path, reward_model: Path, config: PPOConfig, seed: int, stages: Stages
) -> Path:
    """Train the SFT model by PPO on the scores of `ppo.rewards`."""
    rewards, reward_identities = reward_inputs(config.rewards)
    inputs = {"prompts": split / "ppo", "sft_model": sft_model, "reward_model": reward_model}
    inputs |= rewards
    if config.ptx is not None:
        inputs["pretraining"] = split / "pretraining"
    spec = SPEC
    if config.generator == "vllm":
        spec = replace(SPEC, libraries=(*SPEC.libraries, "vllm"))
    return stages.run(Job(spec, {"ppo": config}, inputs, seed, reward_identities))
