"""Stage program: direct preference optimization of the SFT model on comparisons.

    deepspeed --module rlhf_pipeline.training.dpo job.json

The policy trains, the reference is its frozen start, or with LoRA the policy with its adapters off.
Both process the same micro batch, so that no log-probabilities are stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.doors import DPO_LOSS, call_with
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rl.preference_losses import chosen_nll, log_ratios
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.preferences import (
    PairTask,
    answer_logprobs,
    chosen_and_rejected,
    load_reference,
    ranking_sums,
    reference_logprobs,
)
from rlhf_pipeline.training.supervised import Batch, train


@dataclass(frozen=True)
class DPOTask(PairTask):
    """`dpo.loss` on the log-probabilities of two answers under the policy and its reference."""

    reference: nn.Module | None
    """The frozen start of the policy. None: the policy itself with its adapters off, or none."""
    config: DPOConfig
    name: str = "dpo"

    def loss(self, model: nn.Module, batch: Batch, pairs: Tensor) -> tuple[Tensor, Sums]:
        config, answers = self.config, batch.answers
        lengths = answers.action_mask.sum(1)
        ref_logprobs = torch.zeros(len(answers), device=lengths.device)
        if config.has_reference:
            ref_logprobs = reference_logprobs(self.reference, model, answers, self.contract)
        logprobs = answer_logprobs(model, answers, self.contract)
        ratios = log_ratios(logprobs, ref_logprobs)
        chosen, rejected = chosen_and_rejected(logprobs)
        ref_chosen, ref_rejected = chosen_and_rejected(ref_logprobs)
        chosen_ratios, rejected_ratios = chosen_and_rejected(ratios)
        chosen_lengths, rejected_lengths = chosen_and_rejected(lengths)
        total, _ = call_with(
            DPO_LOSS.load(config.loss), config,
            chosen_logprobs=chosen, rejected_logprobs=rejected,
            ref_chosen_logprobs=ref_chosen, ref_rejected_logprobs=ref_rejected,
            chosen_log_ratios=chosen_ratios, rejected_log_ratios=rejected_ratios,
            chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths,
        )  # fmt: skip
        sums: Sums = {}
        if config.sft_coef:
            sums["nll"], _ = chosen_nll(chosen, chosen_lengths)
            total = total + config.sft_coef * sums["nll"]
        loss = total / pairs
        # The rewards are those that the loss compares: of a mean token if it reads the lengths.
        is_mean = "chosen_lengths" in config.asked
        rewards = config.beta * (ratios.detach() / lengths if is_mean else ratios.detach())
        chosen_rewards, rejected_rewards = chosen_and_rejected(rewards)
        return loss, sums | {
            **ranking_sums(chosen_rewards, rejected_rewards),
            "loss": loss * pairs,
            "rejected": rejected_rewards.double().sum(),
        }

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss; accuracy (a tie counts half), mean margin and means of the implicit rewards; with
        `dpo.sft_coef` the negative log-likelihood of the chosen answers, nats per token."""
        pairs = sums["pairs"]
        likelihood = {"chosen_nll": sums["nll"] / pairs} if "nll" in sums else {}
        return likelihood | {
            "loss": sums["loss"] / pairs,
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_reward": sums["chosen"] / pairs,
            "rejected_reward": sums["rejected"] / pairs,
        }


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out loss."""
    config = job.block(job.stage, DPOConfig)
    contract = common_contract({name: job.inputs[name] for name in ("sft_model", "comparisons")})
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    task = DPOTask(contract, load_reference(job, config, world), config, job.stage)
    return train(job, config, task, load_policy, world, start="sft_model", rows="comparisons")


if __name__ == "__main__":
    run_program(main)
