"""Generation by a Hugging Face model, from one uniform random number per token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import for_generation, is_sharded
from rlhf_pipeline.models.forms import form_of
from rlhf_pipeline.models.lean_transformers import DynamicCache, PreTrainedModel
from rlhf_pipeline.models.sequences import Sequences, collate, pad
from rlhf_pipeline.rl.sampling import sampled
from rlhf_pipeline.rollout.generation import Rollout, Seed, uniform_draws
from rlhf_pipeline.rollout.key_value_cache import RoomyCache, unpacked
from rlhf_pipeline.rollout.repacked_weights import repacked
from rlhf_pipeline.runtime import heartbeat

FINISHED = 0.25
"""Finished rows leave a batch once they are this share of it: leaving copies the others' cache."""
LOOK_EVERY = 16
"""Tokens between two looks at which rows have finished, of all ranks or of the host at its GPU."""


@dataclass(frozen=True)
class TransformersGenerator:
    """Samples from a Hugging Face model, or from one in a DeepSpeed engine."""

    policy: PreTrainedModel | DeepSpeedEngine
    """A model without dropout; an engine may be in training mode."""
    contract: TokenContract
    """The tokens of the policy."""
    gather: bool = True
    """Whether to gather the weights of an engine at ZeRO stage 3 once for each call. This needs
    memory for the whole model; False gathers each layer at each token."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[Seed]
    ) -> Rollout:
        packed = form_of(self.policy).packed
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        responses: list[list[int]] = [[] for _ in prompts]
        logprobs = torch.zeros(draws.shape, dtype=torch.float64)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        size = sampling.batch_size_per_gpu
        with (
            for_generation(self.policy, gather=self.gather) as model,
            repacked(model, min(size, len(prompts))),
        ):
            for index in lengths.argsort(stable=True).split(size):
                batch = Decoding(
                    model=model,
                    contract=self.contract,
                    temperature=sampling.temperature,
                    draws=draws[index].to(self.policy.device, non_blocking=True),
                    synced=is_sharded(model) and not self.gather,
                )
                ids, mask = pad([prompts[i] for i in index], self.contract.pad_id, left=True)
                batch.run(ids, mask, packed=packed)
                # One copy, so the host waits for the device once.
                tokens, logprobs[index] = torch.stack([batch.tokens.double(), batch.logprobs]).cpu()
                for i, row in zip(index.tolist(), tokens.long().tolist(), strict=True):
                    responses[i] = _until_eos(row, self.contract.eos_ids)
        sequences = collate(prompts, responses, self.contract.pad_id)
        return Rollout(sequences, logprobs[:, : sequences.response_ids.shape[1]].float())


@dataclass
class Decoding:
    """Responses to one batch of prompts, token by token.

    Rows that have finished leave the batch. Shapes: B rows of the batch, A rows that are left, R
    tokens of a response, V tokens of the vocabulary.
    """

    model: Any
    contract: TokenContract
    temperature: float
    draws: Tensor
    """(B, R) uniform numbers in [0, 1)."""
    synced: bool
    """Every rank must take part in every forward pass."""
    tokens: Tensor = field(init=False)
    """(B, R) long."""
    logprobs: Tensor = field(init=False)
    """(B, R) float32."""

    def __post_init__(self) -> None:
        self.tokens = torch.full_like(self.draws, self.contract.pad_id, dtype=torch.long)
        self.logprobs = torch.zeros_like(self.draws, dtype=torch.float32)

    def run(self, ids: Tensor, mask: Tensor, *, packed: bool) -> None:
        """Fill `tokens` and `logprobs`. The prompts are (B, P) and left-padded, in main memory."""
        device, (_, width) = self.draws.device, ids.shape
        steps = self.draws.shape[1]
        lengths = mask.sum(1).to(device, non_blocking=True)
        logits, cache = self._read(ids, mask, width + steps, packed=packed)
        attended = torch.nn.functional.pad(mask, (0, steps), value=True).to(
            device, non_blocking=True
        )
        rows = torch.arange(len(ids), device=device)
        finished = torch.zeros_like(rows, dtype=torch.bool)
        eos = torch.tensor(self.contract.eos_ids).to(device, non_blocking=True)
        for step in range(steps):
            heartbeat.tick()
            tokens, logprobs = sampled(
                logits, self.draws[rows, step], self.temperature, self.contract.vocab_size
            )
            self.tokens[rows, step] = tokens
            self.logprobs[rows, step] = logprobs
            finished = finished | torch.isin(tokens, eos)
            if step + 1 == steps:
                return
            if self.synced:
                if self._all_ranks_finished(finished, step):
                    return
            elif (
                known := self._known(finished, step)
            ) is not None and known.sum() >= FINISHED * len(known):
                left = (~known).nonzero().squeeze(1).to(rows.device)
                if not len(left):
                    return
                cache.keep_rows(left)
                rows, finished, attended = rows[left], finished[left], attended[left]
                lengths, tokens = lengths[left], tokens[left]
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=attended[:, : width + step + 1],
                position_ids=lengths[:, None] + step,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]

    def _read(
        self, ids: Tensor, mask: Tensor, room: int, *, packed: bool
    ) -> tuple[Tensor, RoomyCache]:
        """The logits (B, V) after the prompts, and the cache. Equal prompts are read once."""
        device = self.draws.device
        copies = torch.arange(len(ids))
        if packed:
            ids, copies = torch.unique(ids.masked_fill(~mask, -1), dim=0, return_inverse=True)
            mask = ids >= 0
        nothing = torch.empty(len(ids), 0, dtype=torch.long)
        prompts = Sequences(ids.clamp(min=0), mask, nothing, nothing.bool()).to(device)
        if packed:
            copies = copies.to(device, non_blocking=True)
            rows = prompts.packed()
            states = DynamicCache()
            logits = self.model(
                **rows.model_inputs(),
                past_key_values=states,
                use_cache=True,
                logits_to_keep=rows.ends,
            ).logits[0]
            return logits[copies], unpacked(states, prompts.prompt_mask, copies, room)
        cache = RoomyCache(room)
        logits = self.model(
            **prompts.model_inputs(), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        return logits, cache

    def _all_ranks_finished(self, finished: Tensor, step: int) -> bool:
        if (step + 1) % LOOK_EVERY:
            return False
        unfinished = (~finished).any().float()
        torch.distributed.all_reduce(unfinished)
        return not bool(unfinished)

    def _known(self, finished: Tensor, step: int) -> Tensor | None:
        """What the host looks at: the host of a GPU would wait for each token otherwise.

        It looks at fixed tokens. Rounding depends on the number of rows, so if the time decided,
        a rollout could not be repeated, and ranks that sample the same tokens would part.
        """
        is_due = finished.device.type == "cpu" or (step + 1) % LOOK_EVERY == 0
        return finished.cpu() if is_due else None


def _until_eos(row: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The response up to and including its first EOS; all of it if there is none."""
    end = next((count for count, token in enumerate(row, 1) if token in eos_ids), len(row))
    return row[:end]
