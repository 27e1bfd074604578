"""Logits are logarithms of small integers: ln [1, 2, 5] gives p = [1, 2, 5] / 8."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.logprobs import Teacher, divergence, logprobs_and_entropy

STUDENT, TEACHER = [1.0, 2.0, 5.0], [4.0, 2.0, 2.0]
BETAS = [0.0, 0.25, 0.5, 1.0]


def probabilities(*weights: list[float]) -> Tensor:
    found = torch.tensor(weights)
    return (found / found.sum(-1, keepdim=True)).log()


def compared(
    logits: Tensor, teacher: Tensor, beta: float, count: int | None = None, **how
) -> Tensor:
    """The divergences (B, R) from a teacher with these logits, by the code of training."""
    ids = torch.zeros(logits.shape[:2], dtype=torch.long)
    known = Teacher(teacher, None, beta, count)
    return logprobs_and_entropy(logits, ids, teacher=known, **how)[2][0]


def plain(logits: Tensor, teacher: Tensor, beta: float, count: int | None, temperature: float):
    """The same by the textbook, whose gradients autograd knows."""
    s, t = ((x / temperature).softmax(-1) for x in (logits, teacher))
    if count is not None:
        ids = t.topk(count, -1).indices
        s, t = (torch.cat([p.gather(-1, ids), 1 - p.gather(-1, ids).sum(-1, True)], -1)
                for p in (s, t))  # fmt: skip
    m = beta * t + (1 - beta) * s
    kl = lambda p, q: (p * (p / q).log()).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(s, t) if beta else kl(t, s)
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # s = [1, 2, 5] / 8, t = [4, 2, 2] / 8
        (0.0, 0.4640745),  # 4/8 ln 4 + 2/8 ln 1 + 2/8 ln 2/5
        (1.0, 0.3993949),  # 1/8 ln 1/4 + 2/8 ln 1 + 5/8 ln 5/2
        # m = (s + t) / 2 = [2.5, 2, 3.5] / 8:
        # (4/8 ln 4/2.5 + 2/8 ln 2/3.5 + 1/8 ln 1/2.5 + 5/8 ln 5/3.5) / 2
        (0.5, 0.1017417),
        # m = (t + 3 s) / 4 = [1.75, 2, 4.25] / 8:
        # (4/8 ln 4/1.75 + 2/8 ln 2/4.25) / 4 + 3 (1/8 ln 1/1.75 + 5/8 ln 5/4.25) / 4
        (0.25, 0.0799409),
    ],
)
def test_divergences(beta: float, expected: float):
    found = divergence(probabilities(STUDENT), probabilities(TEACHER), beta=beta)
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta: float):
    logits = torch.randn(2, 3, 7).requires_grad_()
    found = compared(logits, logits.detach() + 5, beta)
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(2, 3), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3, 7), atol=1e-6, rtol=0.0)


def test_the_tokens_apart_are_those_that_the_teacher_likes():
    # t = [1, 4, 3] / 8, s = [2, 1, 5] / 8; apart is the second: t = [4, 4] / 8, s = [1, 7] / 8.
    logits, teacher = torch.tensor([[[2.0, 1.0, 5.0]]]).log(), torch.tensor([[[1.0, 4.0, 3.0]]])
    found = compared(logits, teacher.log(), 0.0, count=1)
    torch.testing.assert_close(found, torch.tensor([[0.4133393]]))  # 1/2 ln 4 + 1/2 ln 4/7


@pytest.mark.parametrize("count", [None, 1, 4])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_the_plain_form(beta: float, count: int | None):
    torch.manual_seed(3)
    logits, teacher = 3 * torch.randn(2, 2, 5, 9)
    weights = torch.randn(2, 5)
    exact = logits.double().requires_grad_()
    expected = plain(exact, teacher.double(), beta, count, temperature=0.7)
    (expected * weights).sum().backward()
    logits.requires_grad_()
    found = compared(logits, teacher, beta, count, temperature=0.7)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad, exact.grad.float(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize("beta", BETAS)
def test_fewer_tokens_apart_give_at_most_the_divergence_of_all(beta: float, count: int):
    torch.manual_seed(4)
    logits, teacher = 3 * torch.randn(2, 4, 5, 9)
    whole, part = compared(logits, teacher, beta), compared(logits, teacher, beta, count)
    assert (part <= whole + 1e-6).all()
    if count >= 8:  # the others together are one token, or none
        torch.testing.assert_close(part, whole)


def test_neither_padded_columns_nor_other_rows_change_a_position():
    torch.manual_seed(5)
    logits, teacher = torch.randn(2, 2, 5, 9)
    alone = compared(logits[:1, :2, :7].contiguous(), teacher[:1, :2, :7].contiguous(), 1.0)
    logits[..., 7:] = teacher[..., 7:] = 1000.0
    logits[1:], logits[:, 2:] = 77.0, -77.0
    torch.testing.assert_close(compared(logits, teacher, 1.0, vocab_size=7)[:1, :2], alone)


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("chunk", [1, 60, 150, 1000])
def test_chunks_change_nothing(chunk: int, count: int | None):
    """Hidden states of two widths, each with the layer of its own model."""

    def run(size: int) -> list[Tensor]:
        torch.manual_seed(6)
        hidden, weight, bias = torch.randn(3, 5, 4), torch.randn(11, 4), torch.randn(11)
        states, of_teacher = torch.randn(3, 5, 6), torch.randn(11, 6)
        ids = torch.randint(9, (3, 5))
        own = [each.requires_grad_() for each in (hidden, weight, bias)]
        teacher = Teacher(states, (of_teacher, None), 0.3, count)
        logprobs, entropy, (away, known) = logprobs_and_entropy(
            hidden, ids, temperature=0.9, vocab_size=9, head=(weight, bias), teacher=teacher,
            chunk=size,
        )  # fmt: skip
        expected = logprobs_and_entropy(states, ids, temperature=0.9, vocab_size=9,
                                        head=(of_teacher, None))  # fmt: skip
        torch.testing.assert_close(known, expected[0])
        (away * torch.randn(3, 5)).sum().backward()
        return [logprobs.detach(), entropy.detach(), away.detach(), *(each.grad for each in own)]

    for whole, part in zip(run(10**6), run(chunk), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)


def test_one_divergence_beside_the_entropy_and_the_log_probability():
    """Their gradients add up."""
    torch.manual_seed(7)
    values, teacher = torch.randn(2, 2, 3, 5)
    ids = torch.randint(5, (2, 3))

    def gradient(*wanted: int) -> Tensor:
        logits = values.clone().requires_grad_()
        logprobs, entropy, both = logprobs_and_entropy(
            logits, ids, teacher=Teacher(teacher, None, 1.0)
        )
        results = logprobs, entropy, both[0]
        sum(results[each].sum() for each in wanted).backward()
        return logits.grad

    apart_ = sum(map(gradient, range(3)))
    torch.testing.assert_close(gradient(0, 1, 2), apart_, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [None, 10])
def test_no_tensor_is_larger_than_a_chunk(float32_sizes, count: int | None):
    """At most eight tensors exist at a time, besides the logits and results."""
    logits = torch.zeros(2, 40, 1000, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.zeros(2, 40, 1000, dtype=torch.bfloat16)
    with float32_sizes() as sizes:
        compare = partial(compared, logits, teacher, 0.5, count)
        compare(chunk=40_000).sum().backward()
    assert max(sizes) == 40_000 / 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_values_and_gradients_are_those_of_trl(beta: float, temperature: float):
    """Of the function in its DistillationTrainer, from hidden states of two widths."""
    theirs = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    torch.manual_seed(8)
    hidden, weight, bias = torch.randn(40, 32), torch.randn(300, 32) / 2, torch.randn(300) / 3
    states, of_teacher, weights = torch.randn(40, 48), torch.randn(300, 48) / 3, torch.rand(40)
    own, other = ([x.clone().requires_grad_() for x in (hidden, weight, bias)] for _ in range(2))
    teacher, ids = Teacher(states[None], (of_teacher, None), beta), torch.zeros(1, 40).long()
    _, _, (found, _) = logprobs_and_entropy(
        own[0][None], ids, temperature=temperature, head=(own[1], own[2]), teacher=teacher
    )
    plain_logits = (1.0, None)  # neither scaled nor capped
    expected, _ = theirs.apply(
        *other, states, of_teacher, None, beta, temperature, *plain_logits, *plain_logits
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    for result in (found[0], expected):
        (result * weights).sum().backward()
    for mine, its in zip(own, other, strict=True):
        gap = (mine.grad - its.grad).norm() / its.grad.norm()
        assert gap < 2e-5
