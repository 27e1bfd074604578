"""What a model's forward pass can be reduced to: real tokens only, and no logits.

Both depend on the code of the model's family, which may come from its authors. So a tiny forward
pass decides, once for each model, before its first use.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.models.logprob_head import LogprobHead, Question, asking
from rlhf_pipeline.models.packing import PACKED
from rlhf_pipeline.models.sequences import collate

FIRST, SECOND, THIRD = [1, 2, 3], [4, 5, 6, 7, 8], [4, 5, 6, 9, 10, 11]
"""Token ids of three short rows; the last two begin with a prompt of three tokens."""


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
    """Whether packed rows have the outputs that they have alone, also if they share a prompt.

    Rounding is allowed, a tenth of what the first row would change as the beginning of the second.
    """
    if model.config._attn_implementation != PACKED:
        return False
    rows = [row[:3] for row in (FIRST, SECOND, THIRD)], [row[3:] for row in (FIRST, SECOND, THIRD)]
    batch = collate(*rows, pad_id=0).to(model.device).packed()
    packed = _outputs(policy, model, **batch.model_inputs())
    second, third, mixed = (
        _outputs(policy, model, input_ids=torch.tensor([ids], device=model.device))
        for ids in (SECOND, THIRD, FIRST + SECOND)
    )
    alone = torch.cat([second, third[3:]])
    error = (packed[len(FIRST) :] - alone).abs().amax()
    leak = (mixed[len(FIRST) :] - second).abs().amax()
    return bool(error <= 0.1 * leak)


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


def _outputs(policy: nn.Module, model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Logits (T, V) or scalars (T, 1) of one row."""
    if model.get_output_embeddings() is None:
        count = inputs["input_ids"].shape[1]
        return policy(**inputs, scores_to_keep=count)[0, :, None]
    return policy(**inputs, use_cache=False).logits[0].float()
