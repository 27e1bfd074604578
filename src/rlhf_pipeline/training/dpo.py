"""Stage program: direct preference optimization of the SFT model on comparisons.

    deepspeed --module rlhf_pipeline.training.dpo job.json

Two models: the policy trains, the reference is its frozen start. With LoRA, the reference is the
policy with its adapters off. Both process the same micro batch, so the log-probabilities of the
reference are computed on the fly and never stored.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.doors import DPO_LOSS, by_name
from rlhf_pipeline.config.training import DPOConfig, FrozenModel
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.engine import frozen_model
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.losses import implicit_rewards
from rlhf_pipeline.rl.masking import masked_row_sums
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.pairs import Pairs, PairTask, chosen_and_rejected, ranking_sums
from rlhf_pipeline.training.supervised import train


@dataclass(frozen=True)
class DPOTask(PairTask):
    """`dpo.loss` on the log-probabilities of two answers under the policy and its reference."""

    reference: nn.Module | None
    """The frozen start of the policy. None: the policy itself with its adapters off."""
    config: DPOConfig
    name: str = "dpo"

    def loss(self, model: nn.Module, batch: Pairs, pairs: Tensor) -> tuple[Tensor, Sums]:
        reference = self.reference if self.reference is not None else WithoutAdapters(model)
        with torch.no_grad():
            ref_chosen, ref_rejected = chosen_and_rejected(self.logprobs(reference, batch.answers))
        chosen, rejected = chosen_and_rejected(self.logprobs(model, batch.answers))
        total, _ = by_name(
            DPO_LOSS.load(self.config.loss), self.config,
            chosen_logprobs=chosen, rejected_logprobs=rejected,
            ref_chosen_logprobs=ref_chosen, ref_rejected_logprobs=ref_rejected,
        )  # fmt: skip
        loss = total / pairs
        rewards = partial(implicit_rewards, beta=self.config.beta)
        chosen_rewards = rewards(chosen.detach(), ref_chosen)
        rejected_rewards = rewards(rejected.detach(), ref_rejected)
        return loss, {
            **ranking_sums(chosen_rewards, rejected_rewards),
            "loss": loss * pairs,
            "rejected": rejected_rewards.double().sum(),
        }

    def logprobs(self, policy: nn.Module, answers: Sequences) -> Tensor:
        """Log-probability of each whole answer, EOS included, (2N,)."""
        logprobs = response_logprobs(policy, answers, vocab_size=self.contract.vocab_size)
        return masked_row_sums(logprobs, answers.action_mask)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss; accuracy (a tie counts half), mean margin and means of the implicit rewards.

        A mean chosen reward below 0 means that the chosen answers, too, have become less likely.
        """
        pairs = sums["pairs"]
        return {
            "loss": sums["loss"] / pairs,
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_reward": sums["chosen"] / pairs,
            "rejected_reward": sums["rejected"] / pairs,
        }


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out loss."""
    config = job.block("dpo", DPOConfig)
    contract = common_contract(job.inputs)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    load = partial(load_policy, job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    frozen = [model.config for model in config.models() if isinstance(model, FrozenModel)]
    reference = frozen_model(load, frozen[0], world) if frozen else None
    task = DPOTask(contract, reference, config)
    return train(job, config, task, load_policy, world, start="sft_model", rows="comparisons")


if __name__ == "__main__":
    run_program(main)
