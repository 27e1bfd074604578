"""Stage program: supervised fine-tuning of the base model on demonstrations.

deepspeed --module rlhf_pipeline.training.sft job.json
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.mlflow_format import write_mlmodel
from rlhf_pipeline.models.sequences import Sequences, collate, pad
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.rl.sft_loss import sft_loss
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.supervised import Sums, train


@dataclass(frozen=True)
class Demonstrations:
    """Dialogues with the tokens that are learned."""

    sequences: Sequences
    """The response begins with the first learned token; later turns of the user may follow in it."""
    loss_mask: Tensor
    """(B, R) bool; True: learned."""

    @property
    def lengths(self) -> Tensor:
        """(B,) real tokens of each row."""
        return self.sequences.lengths

    def rows(self, index: Tensor) -> Demonstrations:
        """The chosen rows, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        return Demonstrations(
            sequences, self.loss_mask[index][:, : sequences.response_ids.shape[1]]
        )

    def to(self, device: torch.device) -> Demonstrations:
        """The same rows on another device."""
        return Demonstrations(self.sequences.to(device), self.loss_mask.to(device))


@dataclass(frozen=True)
class SFTTask:
    """Next-token loss on the learned tokens: the response's, EOS included, unless `split.sft_loss` names more."""

    contract: TokenContract
    name: str = "sft"

    def collate(self, rows: dict[str, list[Any]]) -> Demonstrations:
        """Demonstrations as a batch."""
        learned, _ = pad(rows["loss_mask"], False, left=False)
        return Demonstrations(
            collate(rows["prompt_ids"], rows["response_ids"], self.contract.pad_id), learned.bool()
        )

    def weight(self, batch: Demonstrations) -> Tensor:
        """Learned tokens."""
        return batch.loss_mask.sum().double()

    def loss(
        self, model: nn.Module, batch: Demonstrations, normalizer: Tensor
    ) -> tuple[Tensor, Sums]:
        """Mean negative log-likelihood of a learned token, over the global batch."""
        logprobs = response_logprobs(model, batch.sequences, vocab_size=self.contract.vocab_size)
        sums = {"nll": -masked_sum(logprobs, batch.loss_mask), "tokens": batch.loss_mask.sum()}
        return sft_loss(logprobs, batch.loss_mask, normalizer=normalizer), sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss in nats a token, and perplexity."""
        loss = sums["nll"] / sums["tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": sums["tokens"]}

    def merit(self, metrics: dict[str, float]) -> float:
        """Lower perplexity is better."""
        return -metrics["perplexity"]


def main(job: LaunchedJob) -> dict[str, float]:
    """Train, and export the checkpoint with the lowest held-out perplexity."""
    config = job.block("sft", SFTConfig)
    task = SFTTask(common_contract(job.inputs))
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    base_model = job.inputs["base_model"]
    metrics = train(
        job, config, task, partial(load_policy, base_model, trust_remote_code=job.trust_remote_code), world,
        rows=job.inputs["demonstrations"], tokenizer=load_tokenizer(base_model, trust_remote_code=job.trust_remote_code),
    )  # fmt: skip
    if world.rank == 0:
        write_mlmodel(job.export)
    return metrics


if __name__ == "__main__":
    run_program(main)
