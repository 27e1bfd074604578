"""Generation: prompts in, prompts with responses out.

Every response is drawn from uniform numbers that belong to its row of the global batch, so it does not depend on how the
batch is cut into ranks or micro batches, and two policies can answer with the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf_pipeline.config.ppo import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.sequences import Sequences, collate, micro_batches, pad
from rlhf_pipeline.runtime import heartbeat


@torch.no_grad()
def generate(
    policy: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    draws: Tensor,
    sampling: SamplingConfig,
    contract: TokenContract,
    *,
    synced: bool = False,
) -> Sequences:
    """One sampled response to each prompt, in the order of the prompts.

    Args:
        policy: in eval mode, or a policy without dropout.
        prompts: token ids of each prompt.
        draws: (B, max_response_tokens) float64 in [0, 1): the randomness of each row; on the policy's device.
        sampling: temperature, length, and how many prompts are answered at a time.
        contract: the policy's tokens.
        synced: every rank computes as many tokens as the slowest, as ZeRO-3 demands of weights that are not gathered.
    """
    device = draws.device
    settings = GenerationConfig(
        max_new_tokens=sampling.max_response_tokens,
        do_sample=False,  # the sampler below leaves one token to choose from
        eos_token_id=contract.eos_id,
        pad_token_id=contract.pad_id,
    )
    responses: list[list[int]] = [[] for _ in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    for index in micro_batches(lengths, sampling.batch_size_per_gpu):
        ids, mask = (
            t.to(device) for t in pad([prompts[i] for i in index], contract.pad_id, left=True)
        )
        sampler = InverseCDFSampler(
            draws[index], ids.shape[1], sampling.temperature, contract.vocab_size
        )
        output = policy.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
            synced_gpus=synced,
        )
        for i, row in zip(index.tolist(), output[:, ids.shape[1] :].tolist(), strict=True):
            responses[i] = _until_eos(row, contract.eos_id)
    return collate(prompts, responses, contract.pad_id)


def uniform_draws(seed: int, step: int, rows: np.ndarray, width: int) -> Tensor:
    """Uniform numbers in [0, 1) for rows of a global batch, (B, width) float64: a function of seed, step and row alone."""
    return torch.from_numpy(
        np.stack([np.random.default_rng([seed, step, int(row)]).random(width) for row in rows])
    )


class InverseCDFSampler(LogitsProcessor):
    """Samples from softmax(logits / temperature) by its inverse distribution function at given uniform numbers.

    Leaves the sampled token as the only one with a finite logit. Padded vocabulary rows have no probability.
    """

    def __init__(
        self, draws: Tensor, prompt_width: int, temperature: float, vocab_size: int
    ) -> None:
        self._draws = draws
        self._prompt_width = prompt_width
        self._temperature = temperature
        self._vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits (B, V) with one finite entry a row."""
        heartbeat.tick()
        draws = self._draws[:, input_ids.shape[1] - self._prompt_width].unsqueeze(1)
        cdf = (scores[:, : self._vocab_size].double() / self._temperature).softmax(-1).cumsum(-1)
        tokens = torch.searchsorted(cdf, draws * cdf[:, -1:], right=True)
        # Logits that are not finite have no distribution, and the search ends behind the last token. The response's
        # log-probabilities show it, once and for all tokens; a look at each token would make the device wait.
        tokens = tokens.clamp(max=self._vocab_size - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


def _until_eos(row: list[int], eos_id: int) -> list[int]:
    """The response up to its EOS, which belongs to it; all of it where there is none."""
    return row[: row.index(eos_id) + 1] if eos_id in row else row
