"""One scalar per token: a reward model reads the one at the last token, a critic reads all.

Shapes: B sequences, P prompt tokens, R response tokens.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models import AutoModelForSequenceClassification, PreTrainedModel
from rlhf_pipeline.models.loading import HEAD, load_model, without_dropout
from rlhf_pipeline.models.packing import use_packed_attention


class ScalarHead(nn.Linear):
    """A linear layer that computes in fp32: neighbouring bf16 numbers around 4 differ by 1/32."""

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class TokenScores(nn.Module):
    """An `AutoModelForSequenceClassification(num_labels=1)`, whose head reads every token."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier
        self.config = classifier.config
        # The scalars are scale * head + offset. Only a critic that starts from a reward model
        # changes them. They are stored beside a checkpoint's weights, not in them.
        self.scale, self.offset = 1.0, 0.0

    @property
    def score_mean(self) -> float:
        """Mean score of the chosen answers of held-out comparisons; PPO subtracts it."""
        return float(self.config.score_mean)

    @property
    def head(self) -> nn.Linear:
        return self.classifier.score

    def forward(self, *, scores_to_keep: int | Tensor, **inputs: Any) -> Tensor:
        """The scalars of the last `scores_to_keep` tokens, or at S positions, (B, S) float32."""
        hidden = self.classifier.base_model(**inputs, use_cache=False)[0]
        is_count = isinstance(scores_to_keep, int)
        keep = slice(-scores_to_keep, None) if is_count else scores_to_keep
        scores: Tensor = self.head(hidden[:, keep]).squeeze(-1)
        return self.scale * scores + self.offset


def load_scores(
    checkpoint: Path,
    precision: Precision,
    *,
    new_head: bool = False,
    foreign: bool = False,
    **how: Any,
) -> TokenScores:
    """Load a model with one scalar per token: the reward model or the critic.

    Args:
        checkpoint: folder of a reward model, or of a language model if `new_head` is true.
        new_head: give the scalar head random weights if the checkpoint has none; otherwise that is
            an ArtifactError.
        foreign: the model has another tokenizer than the policy and needs no token contract.
        how: `quantize`, `trust_remote_code` and `device` of `load_model`.
    """
    kind = AutoModelForSequenceClassification
    how |= {"num_labels": 1, "output_loading_info": True}
    model, loading = load_model(kind, checkpoint, precision, **how)
    missing = [n for n in loading["missing_keys"] if not (new_head and n.startswith(f"{HEAD}."))]
    if missing:
        names = ", ".join(sorted(missing))
        raise ArtifactError(f"{checkpoint} is not a reward model: it has no weights for {names}")
    if not foreign:
        model.config.pad_token_id = TokenContract.read(checkpoint).pad_id
    if isinstance(head := getattr(model, HEAD, None), nn.Linear):
        head.__class__ = ScalarHead  # keeps its weights and names, sharded or not
    elif foreign:
        raise ArtifactError(
            f"{checkpoint}: found a {type(model).__name__} without a linear head `score`, expected "
            "a sequence classifier with one. Fix: use another reward model"
        )
    use_packed_attention(model)
    return TokenScores(without_dropout(model))


def store_score_mean(checkpoint: Path, mean: float) -> None:
    """Write the mean score of chosen answers into a reward model's config.json."""
    path = checkpoint / "config.json"
    fields = json.loads(path.read_text()) | {"score_mean": mean}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
