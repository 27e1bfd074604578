"""Stage program: Kahneman-Tversky optimization of the SFT model on good and bad answers.

    deepspeed --module rlhf_pipeline.training.kto job.json

Policy and reference are those of DPO. The KL that answers are judged against is estimated once for
a whole step, on all ranks: neither ranks nor micro batches change it.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from rlhf_pipeline.config.doors import call_with
from rlhf_pipeline.config.preferences import KTOConfig
from rlhf_pipeline.data.record_files import mapped
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.batches import Rows, even_share, micro_batches, own_share
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.rl.preference_losses import kto_loss, log_ratios
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.preferences import answer_logprobs, load_reference, reference_logprobs
from rlhf_pipeline.training.supervised import BLOCK, Batch, Setup, Task, train


@dataclass(frozen=True)
class KTOTask(Task):
    """KTO's loss on the log ratios of answers to the reference, against the KL of the step."""

    contract: TokenContract
    reference: nn.Module | None  # None: the policy with its adapters off
    config: KTOConfig
    kl: Tensor = field(default_factory=lambda: torch.zeros(()))
    """0-dim, from `at_step`; a negative one counts as 0."""
    name: str = "kto"

    def collate(self, rows: dict[str, list[Any]]) -> Batch:
        answers = collate(rows["prompt_ids"], rows["response_ids"], self.contract.pad_id)
        return Batch(answers, is_good=torch.tensor(rows["label"]))

    @torch.no_grad()
    def at_step(self, setup: Setup, table: Rows, rows: np.ndarray) -> "KTOTask":
        """The task with the KL of the rows, the mean log ratio of mismatched pairs, if `kto.kl`
        asks for it.

        A pair is the prompt of one row with the answer of the row before it in a fixed permutation:
        neighbours of a table may answer one prompt.
        """
        if self.config.kl == "none":
            return self
        engine, world, tokens = setup.engine, setup.world, setup.config.micro_batch_tokens
        order = np.random.default_rng(0).permutation(len(rows))
        others = np.empty_like(rows)
        others[order] = rows[np.roll(order, 1)]
        prompts, answers = even_share(rows, world), even_share(others, world)
        own = len(own_share(rows, world))  # without the row that fills a gap
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for start in range(0, len(prompts), BLOCK):
            block = slice(start, start + BLOCK)
            columns = table.columns(prompts[block])
            columns["response_ids"] = table.columns(answers[block])["response_ids"]
            pairs = self.collate(columns)
            (groups,) = micro_batches([pairs.lengths], tokens, engine, world)
            for index in groups:
                is_own = (index < own - start).to(world.device, non_blocking=True)
                ratios = self.log_ratios(engine, pairs.rows(index).to(world.device).answers)
                total += ratios.double().where(is_own, 0.0).sum()
                heartbeat.report_progress()
        return replace(self, kl=(world.sum(total) / len(rows)).float())

    def loss(self, model: nn.Module, batch: Batch, answers: Tensor) -> tuple[Tensor, Sums]:
        config, is_good = self.config, batch.is_good
        assert is_good is not None, "`collate` has made the batch"
        ratios, kl = self.log_ratios(model, batch.answers), self.kl.clamp(min=0)
        total, count = call_with(kto_loss, config, log_ratios=ratios, is_good=is_good, kl=kl)
        rewards = config.beta * ratios.detach().double()
        side = (rewards - config.beta * kl).sign()
        return total / answers, {
            "answers": count,
            "loss": total,
            "kl": self.kl * count,
            "agreement": (1 + side.where(is_good, -side)).sum() / 2,
            "good": is_good.sum(),
            "good_reward": rewards.where(is_good, 0.0).sum(),
            "bad_reward": rewards.where(~is_good, 0.0).sum(),
        }

    def log_ratios(self, model: nn.Module, answers: Sequences) -> Tensor:
        ref_logprobs = reference_logprobs(self.reference, model, answers, self.contract)
        return log_ratios(answer_logprobs(model, answers, self.contract), ref_logprobs)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss; mean log ratio of mismatched pairs, nats; agreement; mean implicit rewards of good
        and bad answers, if there are.

        Agreement is the share of answers on the side of the KL that their label says; one at the KL
        counts half.
        """
        count = {"good": sums["good"], "bad": sums["answers"] - sums["good"]}
        rewards = {
            f"{kind}_reward": sums[f"{kind}_reward"] / count[kind] for kind in count if count[kind]
        }
        names = ("loss", "agreement") if self.config.kl == "none" else ("loss", "kl", "agreement")
        return {name: sums[name] / sums["answers"] for name in names} | rewards


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out loss."""
    config = job.block("kto", KTOConfig)
    contract = common_contract(job.inputs)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    task = KTOTask(contract, load_reference(job, config, world), config)
    read = partial(read_answers, labelled=job.inputs["labelled"])
    return train(
        job, config, task, load_policy, world, start="sft_model", rows="comparisons", read=read
    )


def read_answers(comparisons: Path, labelled: Path) -> Rows:
    """The chosen answers of a file of comparisons, which are good, then the rejected ones, then the
    labelled answers of the file of the same name. Nothing is copied."""
    pairs, columns = mapped(comparisons), ["prompt_ids", "response_ids", "label"]
    sides = [
        pa.table([pairs["prompt_ids"], pairs[name], pa.repeat(label, len(pairs))], columns)
        for name, label in (("chosen_ids", True), ("rejected_ids", False))
    ]
    return Rows.of(pa.concat_tables([*sides, mapped(labelled / comparisons.name).select(columns)]))


if __name__ == "__main__":
    run_program(main)
