"""What trainings on preferences share: pairs of answers, and the frozen start of the policy."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.preferences import ReferencedConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import frozen_model
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.rl.masking import masked_row_sums
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.supervised import Batch, Task


def pairs(rows: dict[str, list[Any]], pad_id: int) -> Batch:
    """Two answers to each prompt of the columns `prompt_ids`, `chosen_ids` and `rejected_ids`.

    Both are processed in one forward pass, the chosen one first. Columns `chosen_mask` and
    `rejected_mask` mark the tokens that the policy chose; without them, it chose all.
    """
    prompts = [ids for ids in rows["prompt_ids"] for _ in range(2)]
    numbers = [pair for pair in range(len(rows["prompt_ids"])) for _ in range(2)]
    answers = list(chain(*zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)))
    actions = None
    if "chosen_mask" in rows:
        actions = list(chain(*zip(rows["chosen_mask"], rows["rejected_mask"], strict=True)))
    sequences = collate(prompts, answers, pad_id, actions=actions, prompt_numbers=numbers)
    return Batch(sequences, size=2)


@dataclass(frozen=True)
class PairTask(Task):
    """What the supervised tasks on comparisons share.

    Lower held-out loss is better: unlike accuracy, it also punishes confident errors.
    """

    contract: TokenContract

    def collate(self, rows: dict[str, list[Any]]) -> Batch:
        return pairs(rows, self.contract.pad_id)


def chosen_and_rejected(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split one value per answer of `pairs`, (2N,), into chosen and rejected, (N,) each."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def ranking_sums(chosen: Tensor, rejected: Tensor) -> Sums:
    """Additive sums over pairs with two scores, (N,) each: the number of pairs, how many are ranked
    correctly, margins, and chosen scores.

    A tie counts half, so a model that cannot distinguish the answers has an accuracy of 0.5.
    """
    margin = (chosen - rejected).detach().double()
    return {
        "pairs": torch.full((), float(len(chosen)), device=chosen.device),
        "correct": (margin > 0).sum() + 0.5 * (margin == 0).sum(),
        "margin": margin.sum(),
        "chosen": chosen.detach().double().sum(),
    }


def load_reference(job: LaunchedJob, config: ReferencedConfig, world: World) -> nn.Module | None:
    """The input `reference`, or else the start of the policy, frozen; None if the stage needs no
    model of its own."""
    folder = job.inputs.get("reference", job.inputs["sft_model"])
    if "reference" not in job.inputs and not config.loads_reference:
        return None
    load = partial(load_policy, folder, trust_remote_code=job.trust_remote_code)
    return frozen_model(load, config.reference.beside(config.deepspeed), world)


def answer_logprobs(policy: nn.Module, answers: Sequences, contract: TokenContract) -> Tensor:
    """Log-probability of each whole answer, EOS included, (N,)."""
    logprobs = response_logprobs(policy, answers, vocab_size=contract.vocab_size)
    return masked_row_sums(logprobs, answers.action_mask)


@torch.no_grad()
def reference_logprobs(
    reference: nn.Module | None, policy: nn.Module, answers: Sequences, contract: TokenContract
) -> Tensor:
    """The same under the reference. None: the policy with its adapters off."""
    if reference is None:
        reference = WithoutAdapters(policy)
    return answer_logprobs(reference, answers, contract)
