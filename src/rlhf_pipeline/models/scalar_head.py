"""One scalar per token: a reward model reads the one at the last token, a critic reads all.

Shapes: B sequences, P prompt tokens, R response tokens.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.block import Precision, Quantization
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.lean_transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from rlhf_pipeline.models.loading import (
    DTYPES,
    HEAD,
    explain_loading_errors,
    loading_arguments,
    quantization,
    without_dropout,
)
from rlhf_pipeline.models.packing import use_packed_attention


class ScalarHead(nn.Linear):
    """A linear layer that computes in fp32: neighbouring bf16 numbers around 4 differ by 1/32."""

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class TokenScores(nn.Module):
    """A sequence classifier with one label, whose head is applied to every token.

    A checkpoint keeps the format of `AutoModelForSequenceClassification(num_labels=1)`.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier
        self.config = classifier.config
        self.scale, self.offset = 1.0, 0.0
        """The scalars are scale * head + offset. Only a critic that starts from a reward model
        changes them. They are stored beside a checkpoint's weights, not in them."""

    @property
    def score_mean(self) -> float:
        """Mean score of the chosen answers of held-out comparisons; PPO subtracts it."""
        return float(self.config.score_mean)

    @property
    def head(self) -> nn.Linear:
        """The layer from hidden states to scalars."""
        return self.classifier.score

    def forward(self, *, scores_to_keep: int | Tensor, **inputs: Any) -> Tensor:
        """Return the scalars of the last `scores_to_keep` tokens, (B, scores_to_keep) float32.

        A tensor contains the positions of the tokens, (S,) long.
        """
        hidden = self.classifier.base_model(**inputs, use_cache=False)[0]
        keep = (
            scores_to_keep if isinstance(scores_to_keep, Tensor) else slice(-scores_to_keep, None)
        )
        scores: Tensor = self.head(hidden[:, keep]).squeeze(-1)
        return self.scale * scores + self.offset


def load_scores(
    checkpoint: Path,
    precision: Precision,
    *,
    new_head: bool = False,
    foreign: bool = False,
    quantize: Quantization | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> TokenScores:
    """Load a model with one scalar per token: the reward model or the critic.

    Args:
        checkpoint: folder of a reward model, or of a language model if `new_head` is true.
        new_head: give the scalar head random weights if the checkpoint has none.
        foreign: the model has another tokenizer than the policy and needs no token contract.
        quantize: storage of the weight matrices; None = `precision`.
        trust_remote_code: whether Python code that ships with the model may run.
        device: where the weights go, each as it is read, so that main memory never holds a copy for
            each rank. None: main memory.

    Raises:
        ArtifactError: the checkpoint has no trained scalar head and `new_head` is false, or a
            foreign model has no head `score`.
    """
    with explain_loading_errors(checkpoint):
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            checkpoint,
            num_labels=1,
            dtype=DTYPES[precision],
            output_loading_info=True,
            **loading_arguments(checkpoint, trust_remote_code=trust_remote_code, device=device),
            **quantization(quantize, precision),
        )
    if missing := [
        name for name in loading["missing_keys"] if not (new_head and name.startswith(f"{HEAD}."))
    ]:
        raise ArtifactError(
            f"{checkpoint} is not a reward model: it has no weights for "
            f"{', '.join(sorted(missing))}"
        )
    if not foreign:
        model.config.pad_token_id = TokenContract.read(checkpoint).pad_id
    if foreign and not isinstance(getattr(model, "score", None), nn.Linear):
        raise ArtifactError(
            f"{checkpoint}: found a {type(model).__name__} without a linear head `score`, expected "
            "a sequence classifier with one. Fix: use another reward model"
        )
    if isinstance(head := getattr(model, HEAD, None), nn.Linear):
        head.__class__ = ScalarHead  # keeps its weights and names, sharded or not
    use_packed_attention(model)
    return TokenScores(without_dropout(model))


def pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model: the policy itself, or the classifier in a `TokenScores`."""
    return model.classifier if isinstance(model, TokenScores) else cast(PreTrainedModel, model)


def store_score_mean(checkpoint: Path, mean: float) -> None:
    """Write the mean score of chosen answers into a reward model's config.json."""
    path = checkpoint / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"score_mean": mean}, indent=2, sort_keys=True)
        + "\n"
    )
