"""What a model's forward pass can be reduced to: real tokens only, and no logits.

Both depend on the code of the model's family, which may come from its authors. So a tiny forward
pass decides, once for each model, before its first use.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pipeline.models.logprob_head import LogprobHead, Question, asking
from rlhf_pipeline.models.packing import PACKED

FIRST, SECOND = (1, 2, 3), (4, 5, 6, 7, 8)
"""Token ids of two short rows."""


@dataclass(frozen=True)
class Form:
    """What a model's forward pass can do."""

    packed: bool
    """Process the rows of a batch one after another, without padding."""
    head: LogprobHead | None
    """The layer that answers with log-probabilities; None: they are computed from all logits."""


def form_of(policy: nn.Module) -> Form:
    """The form of a model, of an engine, or of a model with scalars. All ranks call it together."""
    model = next(part for part in policy.modules() if isinstance(part, PreTrainedModel))
    form: Form | None = vars(model).get("_form")
    if form is None:
        form = Form(_packs(policy, model), _logprob_head(policy, model))
        if not form.packed:
            logging.getLogger(__name__).warning(
                "%s: found a model that computes padding, too; batches contain rows of similar "
                "length", type(model).__name__
            )  # fmt: skip
        model._form = form
    return form


@torch.no_grad()
def _packs(policy: nn.Module, model: PreTrainedModel) -> bool:
    """Whether the second of two packed rows has the outputs that it has alone.

    Rounding is allowed, a tenth of what the first row would change as the beginning of the second.
    """
    if model.config._attn_implementation != PACKED:
        return False
    positions = [*range(len(FIRST)), *range(len(SECOND))]
    alone = _outputs(policy, SECOND)
    packed = _outputs(policy, FIRST + SECOND, positions, (len(FIRST), len(SECOND)))
    mixed = _outputs(policy, FIRST + SECOND)
    error, leak = ((x[len(FIRST) :] - alone).abs().amax().item() for x in (packed, mixed))
    return error <= 0.1 * leak


@torch.no_grad()
def _logprob_head(policy: nn.Module, model: PreTrainedModel) -> LogprobHead | None:
    """The model's output layer if the model returns its result unchanged.

    Some families scale or cap their logits afterwards.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, LogprobHead):
        return None
    ids = torch.tensor([FIRST], device=model.device)
    question = Question(ids, vocab_size=head.out_features, temperature=1.0, with_entropy=False)
    with asking(head, question):
        found: Tensor = policy(input_ids=ids, use_cache=False).logits
    return head if found.data_ptr() == head.answered else None


def _outputs(
    policy: nn.Module,
    ids: tuple[int, ...],
    positions: list[int] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Logits (T, V) or scalars (T, 1) of one row."""
    model = next(part for part in policy.modules() if isinstance(part, PreTrainedModel))
    device = model.device
    inputs = {
        "input_ids": torch.tensor([ids], device=device),
        "position_ids": torch.tensor([positions or range(len(ids))], device=device),
        **({} if lengths is None else {"row_lengths": lengths}),
    }
    if model.get_output_embeddings() is None:
        return policy(**inputs, scores_to_keep=len(ids))[0, :, None]
    return policy(**inputs, use_cache=False).logits[0].float()
