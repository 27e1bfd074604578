"""Forward passes over prompts and responses, reduced to one number per response token.

Shapes: B sequences, P prompt tokens, R response tokens, V vocabulary. Training, scoring and
evaluation use the same functions, so every log-probability has the same temperature, vocabulary
and positions.
"""

from typing import Any

from torch import Tensor, nn

from rlhf_pipeline.models.forms import form_of
from rlhf_pipeline.models.logprob_head import Question, asking
from rlhf_pipeline.models.sequences import Packed, Sequences


def response_logprobs(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each response token, (B, R) float32; undefined in padding."""
    return _answers(policy, batch, temperature=temperature, vocab_size=vocab_size)[0]


def response_logprobs_and_entropy(
    policy: nn.Module,
    batch: Sequences,
    *,
    vocab_size: int,
    temperature: float,
    entropy_trains: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each response token's log-probability and its distribution's entropy, (B, R) each.

    `entropy_trains`: whether the entropy has a gradient.
    """
    answers = _answers(
        policy,
        batch,
        temperature=temperature,
        vocab_size=vocab_size,
        with_entropy=True,
        entropy_trains=entropy_trains,
    )
    return answers[0], answers[1]


def response_values(critic: nn.Module, batch: Sequences) -> Tensor:
    """Return the value of the state before each response token, (B, R) float32."""
    values: Tensor
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


def _answers(
    policy: nn.Module, batch: Sequences, *, with_entropy: bool = False, **wanted: Any
) -> Tensor:
    """Log-probabilities, and entropies if asked for, (1 or 2, B, R)."""
    form = form_of(policy)
    rows = batch.packed() if form.packed else batch
    ids = rows.response_ids
    # Padded: the last prompt token and every response token; the last one predicts nothing.
    keep = rows.before_response if isinstance(rows, Packed) else ids.shape[1] + 1
    inputs = {**rows.model_inputs(), "use_cache": False, "logits_to_keep": keep}
    question = Question(ids, with_entropy=with_entropy, **wanted)
    if form.head is None:
        answers = question.answer(policy(**inputs).logits)
    else:
        with asking(form.head, question):
            answers = policy(**inputs).logits
    return _rectangular(answers, batch) if form.packed else answers


def _rectangular(values: Tensor, batch: Sequences) -> Tensor:
    """The values (..., 1, M) of all response tokens at their places, (..., B, R); 0 elsewhere."""
    mask = batch.response_mask.expand(*values.shape[:-2], *batch.response_mask.shape)
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
