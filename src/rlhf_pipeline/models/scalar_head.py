"""One scalar per token: a reward model reads the one at the last token, a critic reads all.

Shapes: B sequences, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

HEAD = "score"
"""Attribute of a sequence classifier: the layer from hidden states to scalars."""


class TokenScores(nn.Module):
    """A sequence classifier with one label, whose head is applied to every token.

    A checkpoint keeps the format of `AutoModelForSequenceClassification(num_labels=1)`.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier
        self.config = classifier.config

    @property
    def score_mean(self) -> float:
        """Mean score of held-out demonstrations; PPO subtracts it from every score."""
        return float(self.config.score_mean)

    @property
    def head(self) -> nn.Linear:
        """The layer from hidden states to scalars."""
        return self.classifier.score

    def forward(self, *, scores_to_keep: int, **inputs: Tensor) -> Tensor:
        """Return the scalars of the last `scores_to_keep` tokens, (B, scores_to_keep) float32."""
        hidden = self.classifier.base_model(**inputs, use_cache=False)[0]
        return self.head(hidden[:, -scores_to_keep:]).squeeze(-1).float()


def pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model: the policy itself, or the classifier in a `TokenScores`."""
    return model.classifier if isinstance(model, TokenScores) else cast(PreTrainedModel, model)


def store_score_mean(checkpoint: Path, mean: float) -> None:
    """Write the mean score of demonstrations into a reward model's config.json."""
    path = checkpoint / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"score_mean": mean}, indent=2, sort_keys=True)
        + "\n"
    )
