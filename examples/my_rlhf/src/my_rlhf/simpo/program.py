from dataclasses import dataclass

from my_rlhf.simpo.config import SimPOConfig
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rl.losses import pairwise_loss
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.preferences import (
    PairTask,
    answer_logprobs,
    chosen_and_rejected,
    ranking_sums,
)
from rlhf_pipeline.training.supervised import train


@dataclass(frozen=True)
class SimPOTask(PairTask):
    """-log sigmoid(beta * (mean log pi(chosen) - mean log pi(rejected)) - margin)"""

    config: SimPOConfig
    name: str = "simpo"

    def loss(self, model, batch, pairs):
        answers = batch.answers
        mean = answer_logprobs(model, answers, self.contract) / answers.action_mask.sum(1)
        chosen, rejected = chosen_and_rejected(self.config.beta * mean)
        total, _ = pairwise_loss(chosen - self.config.margin, rejected)
        return total / pairs, ranking_sums(chosen, rejected) | {"loss": total}

    def metrics(self, sums):
        return {"loss": sums["loss"] / sums["pairs"], "accuracy": sums["correct"] / sums["pairs"]}


def main(job):
    config = job.block("simpo", SimPOConfig)
    task = SimPOTask(common_contract(job.inputs), config)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    return train(job, config, task, load_policy, world, start="sft_model", rows="comparisons")


if __name__ == "__main__":
    run_program(main)
