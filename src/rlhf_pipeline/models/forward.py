"""Forward passes over prompts and responses, reduced to one number per response token.

Shapes: B sequences, P prompt tokens, R response tokens, V vocabulary. Training, scoring and
evaluation use the same functions, so every log-probability has the same temperature, vocabulary
and positions.
"""

from __future__ import annotations

from torch import Tensor, nn

from rlhf_pipeline.models.forms import Form, form_of
from rlhf_pipeline.models.logprob_head import Question, asking
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.logprobs import logprobs_and_entropy, logprobs_of


def response_logprobs(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each response token, (B, R) float32; undefined in padding."""
    return _logprobs(policy, batch, vocab_size, temperature, with_entropy=False)[0]


def response_logprobs_and_entropy(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return each response token's log-probability and its distribution's entropy, (B, R) each."""
    logprobs, entropy = _logprobs(policy, batch, vocab_size, temperature, with_entropy=True)
    return logprobs, entropy


def response_values(critic: nn.Module, batch: Sequences) -> Tensor:
    """Return the value of the state before each response token, (B, R) float32."""
    if form_of(critic).packed:
        packed = batch.packed()
        values = critic(**packed.model_inputs(), scores_to_keep=packed.before_response)
        return _rectangular(values, batch)
    values = critic(**batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1] + 1)
    return values[:, :-1]


def sequence_scores(reward_model: nn.Module, batch: Sequences) -> Tensor:
    """Return each response's score, (B,) float32: the scalar at its last real token."""
    if form_of(reward_model).packed:
        packed = batch.packed()
        scores: Tensor = reward_model(**packed.model_inputs(), scores_to_keep=packed.ends)
        return scores[0]
    scores = reward_model(**batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1])
    last = batch.response_mask.sum(1, keepdim=True) - 1
    return scores.gather(1, last).squeeze(1)


def _logprobs(
    policy: nn.Module, batch: Sequences, vocab_size: int, temperature: float, *, with_entropy: bool
) -> Tensor | tuple[Tensor, ...]:
    """Log-probabilities, and entropies if asked for, (B, R) each."""
    form = form_of(policy)
    if form.packed:
        packed = batch.packed()
        ids, inputs = packed.response_ids, packed.model_inputs()
        keep: Tensor | int = packed.before_response
    else:
        ids, inputs = batch.response_ids, batch.model_inputs()
        # At the last prompt token and at every response token; the last one predicts nothing.
        keep = ids.shape[1] + 1
    found = _answer(
        policy, form, Question(ids, vocab_size, temperature, with_entropy), inputs, keep
    )
    return [_rectangular(x, batch) for x in found] if form.packed else found


def _answer(policy, form: Form, question: Question, inputs, keep) -> Tensor | tuple[Tensor, ...]:
    if form.head is not None:
        with asking(form.head, question):
            return policy(**inputs, use_cache=False, logits_to_keep=keep).logits
    logits = policy(**inputs, use_cache=False, logits_to_keep=keep).logits
    function = logprobs_and_entropy if question.with_entropy else logprobs_of
    found = function(
        logits[:, : question.ids.shape[1]],
        question.ids,
        temperature=question.temperature,
        vocab_size=question.vocab_size,
    )
    return found if question.with_entropy else found[None]


def _rectangular(values: Tensor, batch: Sequences) -> Tensor:
    """The values (1, M) of all response tokens at their places in the batch, (B, R); 0 elsewhere."""
    empty = values.new_zeros(batch.response_mask.shape)
    return empty.masked_scatter(batch.response_mask, values)
