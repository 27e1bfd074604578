"""Whether a generator samples from the policy itself: tried on two short prompts, before training.

A backend that reads a model in its own way may ignore a property of its family, for example its
positions, and sample from another distribution without an error.
"""

import torch
from torch import nn

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.generation import Generator

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
SAMPLING = SamplingConfig(max_response_tokens=8)


@torch.no_grad()
def has_parity(generator: Generator, policy: nn.Module, contract: TokenContract) -> bool:
    """Whether the generator's log-probabilities are those of the policy.

    All ranks call this together. Rounding is allowed, a tenth of what another prompt would change.
    """
    rollout = generator.generate(PROMPTS, SAMPLING, [(0,), (1,)])
    rows, mask = rollout.sequences, rollout.sequences.response_mask
    responses = [ids[own].tolist() for ids, own in zip(rows.response_ids, mask, strict=True)]
    own, other = (
        response_logprobs(
            policy,
            collate(prompts, responses, contract.pad_id).to(next(policy.parameters()).device),
            vocab_size=contract.vocab_size,
        ).cpu()[mask]
        for prompts in (PROMPTS, PROMPTS[::-1])
    )
    error = (rollout.logprobs[mask] - own).abs().mean()
    return bool(error <= 0.1 * (other - own).abs().mean())
