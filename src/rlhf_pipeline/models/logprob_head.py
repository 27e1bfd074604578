"""A language model's output layer that returns log-probabilities of chosen tokens, not logits.

The model itself calls the layer, so DeepSpeed gathers a sharded weight for it, forward and
backward, tied to the embeddings or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pipeline.rl.logprobs import logprobs_and_entropy, logprobs_of


@dataclass(frozen=True)
class Question:
    """What the next forward pass should return in place of logits."""

    ids: Tensor
    """(B, R) the chosen tokens; token t is predicted by the t-th hidden state that is kept."""
    vocab_size: int
    temperature: float
    with_entropy: bool


class LogprobHead(nn.Linear):
    """A linear layer from hidden states to logits, or to log-probabilities while it has a question."""

    question: Question | None = None
    answered: int | None = None
    """Address of the newest answer."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (B, S, V); with a question, log-probabilities and entropies, (1 or 2, B, R)."""
        if self.question is None:
            return super().forward(hidden)
        question = self.question
        ids = question.ids
        function = logprobs_and_entropy if question.with_entropy else logprobs_of
        found = function(
            hidden[:, : ids.shape[1]],
            ids,
            temperature=question.temperature,
            vocab_size=question.vocab_size,
            head=(self.weight, self.bias),
        )
        answer = torch.stack(found) if question.with_entropy else found[None]
        self.answered = answer.data_ptr()
        return answer


def install(model: PreTrainedModel) -> None:
    """Give the model such a layer if its output layer is linear; weights and names stay."""
    head = model.get_output_embeddings()
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
