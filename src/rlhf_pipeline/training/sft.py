"""Stage program: supervised fine-tuning of the base model on demonstrations.

deepspeed --module rlhf_pipeline.training.sft job.json
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.mlflow_format import write_mlmodel
from rlhf_pipeline.models.sequences import LabelledSequences, collate, pad
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.rl.sft_loss import sft_loss
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.supervised import train


@dataclass(frozen=True)
class Demonstrations(LabelledSequences):
    """Dialogues, and the tokens that the loss includes.

    A response begins with the first token of the loss and may contain later user turns.
    """

    loss_mask: Tensor
    """(B, R) bool, True for the tokens that the loss includes."""


@dataclass(frozen=True)
class SFTTask:
    """Next-token loss on the tokens that `split.sft_loss` selects."""

    contract: TokenContract
    name: str = "sft"

    def collate(self, rows: dict[str, list[Any]]) -> Demonstrations:
        learned, _ = pad(rows["loss_mask"], False, left=False)
        return Demonstrations(
            collate(rows["prompt_ids"], rows["response_ids"], self.contract.pad_id), learned.bool()
        )

    def weight(self, batch: Demonstrations) -> Tensor:
        """Number of tokens that the loss includes."""
        return batch.loss_mask.sum().double()

    def loss(
        self, model: nn.Module, batch: Demonstrations, normalizer: Tensor
    ) -> tuple[Tensor, Sums]:
        logprobs = response_logprobs(model, batch.sequences, vocab_size=self.contract.vocab_size)
        sums = {"nll": -masked_sum(logprobs, batch.loss_mask), "tokens": batch.loss_mask.sum()}
        return sft_loss(logprobs, batch.loss_mask, normalizer=normalizer), sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss in nats per token, perplexity, and number of tokens."""
        loss = sums["nll"] / sums["tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": sums["tokens"]}

    def selection_score(self, metrics: dict[str, float]) -> float:
        """Lower perplexity is better."""
        return -metrics["perplexity"]


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out perplexity."""
    config = job.block("sft", SFTConfig)
    task = SFTTask(common_contract(job.inputs))
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    metrics = train(
        job, config, task, load_policy, world, start="base_model", rows="demonstrations"
    )
    if world.rank == 0:
        write_mlmodel(job.export)
    return metrics


if __name__ == "__main__":
    run_program(main)
