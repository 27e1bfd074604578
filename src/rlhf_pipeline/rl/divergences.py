"""Divergences between the next-token distributions of a student and of its teacher.

Distributions are log-probabilities (..., V) in float32, whose last dimension sums to 1.
"""

import math

import torch
from torch import Tensor

LEAST = 1e-30
"""Probability of all other tokens together if each of them has rounded to 0."""


def divergence(student: Tensor, teacher: Tensor, beta: float, top_k: int | None = None) -> Tensor:
    """The divergence of the distributions s and t at each position, (...), in nats.

        beta = 0    KL(t || s) = sum_v t_v (log t_v - log s_v)     forward KL
        beta = 1    KL(s || t)                                     reverse KL
        otherwise   beta KL(t || m) + (1 - beta) KL(s || m)        m = beta t + (1 - beta) s

    With `top_k`, v are the k likeliest tokens of the teacher, and all others together as one more;
    this is at most the divergence of the whole vocabulary.

    Source: GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 2. That divergence
    goes to 0 with beta and with 1 - beta, where both KLs take its place, as in TRL 1.16.
    """
    if top_k is not None and top_k < teacher.shape[-1]:
        ids = teacher.topk(top_k, -1).indices
        student, teacher = _apart(student, ids), _apart(teacher, ids)
    if beta in (0, 1):
        first, second = (student, teacher) if beta else (teacher, student)
        return (first.exp() * (first - second)).sum(-1)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    both = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    return both.sum(-1)


def _apart(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The distribution of the tokens `ids` (..., K) and of all others together, (..., K + 1)."""
    rest = logprobs.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=LEAST)
    return torch.cat([logprobs.gather(-1, ids), rest.log()], -1)
