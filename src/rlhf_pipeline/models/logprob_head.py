"""A language model's output layer that returns log-probabilities of chosen tokens, not logits.

The model itself calls the layer, so DeepSpeed gathers a sharded weight for it, forward and
backward, tied to the embeddings or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.rl.logprobs import logprobs_and_entropy, logprobs_of


@dataclass(frozen=True)
class Question:
    """What a forward pass should return in place of logits."""

    ids: Tensor
    """(B, R) the chosen tokens; token t is predicted by the t-th hidden state that is kept."""
    vocab_size: int
    temperature: float
    with_entropy: bool
    entropy_trains: bool = False
    """Whether the entropies have a gradient, which costs as much as that of log-probabilities."""

    def answer(self, inputs: Tensor, head: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """Log-probabilities, and entropies if asked for, (1 or 2, B, R) float32.

        `inputs` are logits, or with `head` hidden states; they may have more columns than `ids`.
        """
        arguments: dict[str, Any] = {
            "temperature": self.temperature,
            "vocab_size": self.vocab_size,
            "head": head,
        }
        inputs = inputs[:, : self.ids.shape[1]]
        if self.with_entropy:
            logprobs, entropy = logprobs_and_entropy(inputs, self.ids, **arguments)
            return torch.stack([logprobs, entropy if self.entropy_trains else entropy.detach()])
        return logprobs_of(inputs, self.ids, **arguments)[None]


class LogprobHead(nn.Linear):
    """A linear layer from hidden states to logits; with a question, to log-probabilities."""

    question: Question | None = None
    answered: int | None = None
    """Address of the newest answer."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (B, S, V), or the answer (1 or 2, B, R)."""
        if self.question is None:
            return super().forward(hidden)
        answer = self.question.answer(hidden, (self.weight, self.bias))
        self.answered = answer.data_ptr()
        return answer


def install(model: PreTrainedModel) -> None:
    """Give the model such a layer if its output layer is linear; weights and names stay."""
    head = cast(nn.Module | None, model.get_output_embeddings())
    if type(head) is nn.Linear:
        head.__class__ = LogprobHead


@contextmanager
def asking(head: LogprobHead, question: Question) -> Iterator[None]:
    """Let the forward passes inside the block answer the question."""
    head.question = question
    try:
        yield
    finally:
        head.question = None
