"""What the evaluation of every policy needs; models are loaded one at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows, by_micro_batches, even_share, sampled_rows
from rlhf_pipeline.distributed.engine import free_memory, frozen_model
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import saved_precision
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.runtime.manifest import NAME, Manifest

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


@dataclass(frozen=True)
class Setup:
    """What the evaluation of every policy needs."""

    seed: int
    config: EvaluateConfig
    contract: TokenContract
    tokenizer: PreTrainedTokenizerBase
    rows: np.ndarray
    """Numbers of this rank's prompts in the table; the last one may repeat the first of all."""
    prompts: dict[str, list[Any]]  # columns of these rows
    trust: bool  # whether code that ships with a model may run
    world: World
    place: str = "evaluate"  # the parameters of `config`, for messages


def with_model(
    load: Callable[..., M], folder: Path, setup: Setup, work: Callable[[M | DeepSpeedEngine], R]
) -> R:
    """Load a frozen model, let `work` use it, and free its memory: one model at a time.

    The model has the precision that it was saved in and is sharded as it was trained, unless the
    configuration says otherwise.
    """
    stage = setup.config.zero_stage
    if stage is None:
        artifact = folder if (folder / NAME).is_file() else folder.parent  # the average is inside
        engines = Manifest.read(artifact).deepspeed.values()
        stage = 3 if 3 in [engine["zero_optimization"]["stage"] for engine in engines] else 0
    precision = setup.config.precision or saved_precision(folder)
    settings = FrozenDeepSpeedConfig(zero_stage=stage, precision=precision)
    model = frozen_model(
        partial(load, folder, trust_remote_code=setup.trust), settings, setup.world
    )
    try:
        return work(model)
    finally:
        if isinstance(model, DeepSpeedEngine):
            model.destroy()
        del model
        free_memory()


@torch.no_grad()
def logprobs(
    policy: nn.Module, sequences: Sequences, setup: Setup, *, temperature: float
) -> Tensor:
    """Log-probability of each token of the responses, (B, R)."""
    function = partial(
        response_logprobs, vocab_size=setup.contract.vocab_size, temperature=temperature
    )
    tokens = setup.config.micro_batch_tokens
    return by_micro_batches(function, policy, sequences, tokens, setup.world)


@dataclass(frozen=True)
class HeldOut:
    """Held-out answers of SFT's data, which no policy was trained on: the rows of this rank."""

    rows: np.ndarray  # their numbers in the table; the last one may repeat the first of all
    sequences: Sequences  # the action mask selects the tokens that the loss of SFT includes


def held_out_answers(folder: Path, setup: Setup) -> HeldOut | None:
    """At most `evaluate.prompts` validation rows of SFT; None if there are fewer than ranks."""
    table = Rows.read(folder / "validation.arrow")
    if table.num_rows < setup.world.size:
        return None
    rows = even_share(sampled_rows(table.num_rows, setup.config.prompts, setup.seed), setup.world)
    columns = table.columns(rows)
    sequences = collate(
        columns["prompt_ids"],
        columns["response_ids"],
        setup.contract.pad_id,
        actions=columns["loss_mask"],
    )
    return HeldOut(rows, sequences)


def perplexity(policy: nn.Module, held_out: HeldOut, setup: Setup) -> float:
    """exp of the mean negative log-likelihood per token, as `validation/perplexity` of SFT.

    It shows what training for the judge costs.
    """
    mask = held_out.sequences.action_mask
    found = logprobs(policy, held_out.sequences, setup, temperature=1.0)
    losses = -found.where(mask, 0.0).double().sum(1)
    own = zip(held_out.rows.tolist(), losses.tolist(), mask.sum(1).tolist(), strict=True)
    rows = {row: (loss, n) for part in setup.world.gather([*own]) for row, loss, n in part}
    total, tokens = (sum(values) for values in zip(*rows.values(), strict=True))
    return math.exp(min(total / tokens, 700.0))
