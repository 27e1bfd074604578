"""Stage program: supervised fine-tuning of a model on demonstrations.

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
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl.losses import sft_loss
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.supervised import Batch, Task, train


@dataclass(frozen=True)
class SFTTask(Task):
    """Next-token loss on the tokens that `split.sft_loss` selects.

    A response begins with the first of them and may contain later user turns.
    """

    contract: TokenContract
    name: str = "sft"

    def collate(self, rows: dict[str, list[Any]]) -> Batch:
        prompts, responses, pad_id = rows["prompt_ids"], rows["response_ids"], self.contract.pad_id
        return Batch(collate(prompts, responses, pad_id, actions=rows["loss_mask"]))

    def weight(self, batch: Batch) -> Tensor:
        return batch.answers.action_mask.sum().double()

    def loss(self, model: nn.Module, batch: Batch, tokens: Tensor) -> tuple[Tensor, Sums]:
        logprobs = response_logprobs(model, batch.answers, vocab_size=self.contract.vocab_size)
        total, count = sft_loss(logprobs, batch.answers.action_mask)
        return total / tokens, {"nll": total, "tokens": count}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss in nats per token, perplexity, and number of tokens."""
        loss = sums["nll"] / sums["tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": sums["tokens"]}


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out perplexity."""
    config = job.block(job.stage, SFTConfig)
    inputs = ("base_model", "demonstrations")
    contract = common_contract({name: job.inputs[name] for name in inputs})
    task = SFTTask(contract, job.stage)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    return train(job, config, task, load_policy, world, start="base_model", rows="demonstrations")


if __name__ == "__main__":
    run_program(main)
