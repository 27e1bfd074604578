from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.sample import RejectionConfig, SampledConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.ppo import READS as READS
from rlhf_pipeline.pipelines.ppo import reward_inputs
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SAMPLE = StageSpec(
    name="sample",
    program="rlhf_pipeline.evaluation.sample",
    headline_metrics=("sample/score", "sample/chosen_score", "sample/without_row"),
)
"""Answers of the present policy, as rows to train on."""

SPEC = StageSpec(
    name="rejection",
    program="rlhf_pipeline.training.sft",
    blocks={"rejection": RejectionConfig},
    batch_sizes=("rejection.batch_size",),
    headline_metrics=("rejection/loss", "validation/perplexity"),
)


def rejection(
    split: Path,
    sft_model: Path,
    reward_model: Path,
    trained: RewardModelConfig | None,
    config: RejectionConfig,
    seed: int,
    stages: Stages,
) -> Path:
    """Fine-tune the SFT model on the best of its own answers to the prompts of the phase `ppo`."""
    return in_rounds(SPEC, "base_model", split, sft_model, reward_model, config, seed, stages)


def in_rounds(
    spec: StageSpec,
    start: str,
    split: Path,
    policy: Path,
    reward_model: Path,
    config: SampledConfig,
    seed: int,
    stages: Stages,
) -> Path:
    """Let the policy answer and train on its answers, in each round; return the last policy.

    Each round is two cached jobs. `start` is the input of the program `spec` from which its
    training starts.
    """
    rewards, identities = reward_inputs(config.rewards)
    judging = {"reward_model": reward_model} if config.needs_reward_model else {}
    sampler = SAMPLE
    if config.sample.generator == "vllm":
        sampler = replace(SAMPLE, libraries=(*SAMPLE.libraries, "vllm"))
    for number in range(1, config.rounds + 1):
        table = config.table(number)
        blocks = {config.sampler: config.sample, "table": table}
        inputs = {"prompts": split / "ppo", "policy": policy} | judging | rewards
        samples = stages.run(Job(sampler, blocks, inputs, seed, identities))
        blocks = {spec.name: config.training(), "table": table}
        inputs = {start: policy, config.kind: samples} | rewards
        policy = stages.run(Job(spec, blocks, inputs, seed, identities))
    return policy
