"""Divergences between the next-token distributions of a student and of its teacher.

Shapes: B sequences, R response tokens, V vocabulary, K likeliest tokens of the teacher, d width of
the teacher. Distributions are log-probabilities in float32, whose last dimension sums to 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pipeline.rl.softmax import Head, Part, Softmax

LEAST = 1e-30
"""Probability of all other tokens together if each of them has rounded to 0."""


@dataclass(frozen=True)
class Teacher:
    """A teacher's distributions at the positions of a batch, and the divergence from them."""

    beta: float
    """0: forward KL; 1: reverse KL; between them: generalized Jensen-Shannon divergence."""
    inputs: Tensor
    """(B, R, d) hidden states or, without a head, (B, R, V) logits; with `ids`, what `apart` makes
    of the distributions, (B, R, K + 1)."""
    head: Head = None
    ids: Tensor | None = None  # (B, R, K) long, the likeliest tokens; None: all tokens are apart
    of_chosen: Tensor | None = None  # (B, R) log-probabilities of the response's tokens, with `ids`

    def likeliest(self, count: int, ids: Tensor, softmax: Softmax) -> "Teacher":
        """The same with `count` tokens apart, which needs less memory; `ids` are the response's."""
        places = ids.new_empty(*ids.shape, min(count, softmax.vocab_size))
        of_chosen = torch.empty_like(ids, dtype=torch.float32)
        inputs = of_chosen.new_empty(*ids.shape, places.shape[-1] + 1)
        for part in softmax.parts(ids):
            log_t = softmax.log_softmax(self.inputs[part], self.head)
            of_chosen[part] = chosen(log_t, ids[part])
            places[part] = log_t.topk(places.shape[-1], -1).indices
            inputs[part] = apart(log_t, places[part])
            del log_t  # before the next chunk
        return Teacher(self.beta, inputs, ids=places, of_chosen=of_chosen)

    def compare(
        self, student: Tensor, ids: Tensor, softmax: Softmax, part: Part
    ) -> tuple[Tensor, Tensor]:
        """The divergence from a part of the positions, and the log-probabilities of its `ids`."""
        if self.ids is not None and self.of_chosen is not None:
            student = apart(student, self.ids[part])
            return divergence(student, self.inputs[part], self.beta), self.of_chosen[part]
        log_t = softmax.log_softmax(self.inputs[part], self.head)
        return divergence(student, log_t, self.beta), chosen(log_t, ids)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of two distributions s and t at each position, (..., V) to (...), in nats.

        beta = 0    KL(t || s) = sum_v t_v (log t_v - log s_v)
        beta = 1    KL(s || t)
        otherwise   beta KL(t || m) + (1 - beta) KL(s || m)     m = beta t + (1 - beta) s

    Source: GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 2. That divergence
    goes to 0 with beta and with 1 - beta, where both KLs take its place, as in TRL 1.16.
    """
    if beta in (0, 1):
        first, second = (student, teacher) if beta else (teacher, student)
        return (first.exp() * (first - second)).sum(-1)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    both = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    return both.sum(-1)


def apart(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The distribution of the tokens `ids` (..., K) and of all others together, (..., K + 1).

    A divergence between two of these is at most that of the whole vocabulary.
    """
    rest = logprobs.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=LEAST)
    return torch.cat([logprobs.gather(-1, ids), rest.log()], -1)


def chosen(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities (B, R) of the tokens `ids` among those of all (B, R, V)."""
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
