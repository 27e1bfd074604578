"""Stage program: a Bradley-Terry reward model, from the SFT model with a scalar head.

deepspeed --module rlhf_pipeline.training.reward_model job.json
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.distributed.zero import gathered
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores, store_score_mean
from rlhf_pipeline.rl.losses import pairwise_loss
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.pairs import Pairs, PairTask, chosen_and_rejected, ranking_sums
from rlhf_pipeline.training.reward_report import write_report
from rlhf_pipeline.training.supervised import train


@dataclass(frozen=True)
class RewardModelTask(PairTask):
    """Bradley-Terry loss on the scores of two answers, each at the last token of its answer."""

    name: str = "reward_model"

    def loss(self, model: nn.Module, batch: Pairs, pairs: Tensor) -> tuple[Tensor, Sums]:
        chosen, rejected = chosen_and_rejected(sequence_scores(model, batch.answers))
        total, _ = pairwise_loss(chosen, rejected)
        sums = {
            **ranking_sums(chosen, rejected),
            "nll": total,
            "chosen_squared": chosen.detach().double().square().sum(),
        }
        return total / pairs, sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss, accuracy (a tie counts half), mean margin; mean and deviation of chosen scores."""
        pairs = sums["pairs"]
        mean = sums["chosen"] / pairs
        variance = max(0.0, sums["chosen_squared"] / pairs - mean**2)
        return {
            "loss": sums["nll"] / pairs,
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_score_mean": mean,
            "chosen_score_std": variance**0.5,
        }


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out loss, and store its mean chosen score.

    The metrics have the 95% interval of the held-out accuracy; `reward_report.json` has more.
    """
    config = job.block("reward_model", RewardModelConfig)
    task = RewardModelTask(common_contract(job.inputs))
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    metrics = train(job, config, task, untrained, world, start="sft_model", rows="comparisons")
    if world.rank == 0:
        store_score_mean(job.export, metrics["validation/chosen_score_mean"])
    return metrics | write_report(job, config, task.contract, world)


def untrained(sft_model: Path, precision: Precision, **how: Any) -> TokenScores:
    """The SFT model with a new scalar head; all ranks draw the same one. See `load_scores`.

    Its standard deviation is 1 / sqrt(d + 1) for width d (Huang et al., 2024, arXiv 2403.17031). A
    head of zeros would give the other weights no gradient until it has moved.
    """
    model = load_scores(sft_model, precision, new_head=True, **how)
    with gathered(model.head.parameters()):
        nn.init.normal_(model.head.weight, std=(model.head.in_features + 1) ** -0.5)
    return model


if __name__ == "__main__":
    run_program(main)
