"""Forward passes over prompts and responses, reduced to one number per response token.

Shapes: B sequences, P prompt tokens, R response tokens, V vocabulary. Training, scoring and
evaluation use the same functions, so every log-probability has the same temperature, vocabulary
and positions.
"""

from __future__ import annotations

from torch import Tensor, nn

from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.logprobs import logprobs_and_entropy, logprobs_of


def response_logits(policy: nn.Module, batch: Sequences) -> Tensor:
    """Return the logits that predict the response tokens, (B, R, V).

    They are at the last prompt token and at every response token but the last. No other logits of
    the prompt are computed.
    """
    keep = batch.response_ids.shape[1] + 1
    logits: Tensor = policy(**batch.model_inputs(), use_cache=False, logits_to_keep=keep).logits
    return logits[:, :-1]


def response_logprobs(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each response token, (B, R) float32; undefined in padding."""
    logits = response_logits(policy, batch)
    return logprobs_of(logits, batch.response_ids, temperature=temperature, vocab_size=vocab_size)


def response_logprobs_and_entropy(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return each response token's log-probability and its distribution's entropy, (B, R) each."""
    logits = response_logits(policy, batch)
    return logprobs_and_entropy(
        logits, batch.response_ids, temperature=temperature, vocab_size=vocab_size
    )


def response_values(critic: nn.Module, batch: Sequences) -> Tensor:
    """Return the value of the state before each response token, (B, R) float32."""
    values: Tensor = critic(**batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1] + 1)
    return values[:, :-1]


def sequence_scores(reward_model: nn.Module, batch: Sequences) -> Tensor:
    """Return each response's score, (B,) float32: the scalar at its last real token."""
    scores: Tensor = reward_model(
        **batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1]
    )
    last = batch.response_mask.sum(1, keepdim=True) - 1
    return scores.gather(1, last).squeeze(1)
