"""Logits are logarithms of small integers: ln [1, 2, 5] gives p = [1, 2, 5] / 8."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_pipeline.rl.logprobs import (
    Teacher,
    divergence,
    logprobs_and_entropy,
    logprobs_of,
    position_ids,
    sampled,
)


class Float32Sizes(TorchDispatchMode):
    """Notes how many numbers each new float32 tensor has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.sizes.append(result.numel())
        return result


def logits_of(*weights: list[float]) -> Tensor:
    """One sequence a row, one position each: (B, 1, V)."""
    return torch.tensor(weights).log().unsqueeze(1)


def entropy_of(logits: Tensor, **settings: Any) -> Tensor:
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return logprobs_and_entropy(logits, ids, **settings)[1]


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ([1.0, 2.0, 5.0], {}),
        ([1.0, 4.0, 25.0], {"temperature": 2.0}),  # ln [1, 4, 25] / 2 = ln [1, 2, 5]
        ([1.0, 2.0, 5.0, 1000.0], {"vocab_size": 3}),  # a padded row has no probability
    ],
)
def test_logprobs_of_the_chosen_tokens(weights: list[float], settings: dict[str, Any]):
    logits = logits_of(weights).expand(1, 2, len(weights))
    found = logprobs_of(logits, torch.tensor([[2, 1]]), **settings)
    torch.testing.assert_close(found, torch.tensor([[-0.4700036, -1.3862944]]))  # ln 5/8, ln 2/8


@pytest.mark.parametrize("chunk", [1, 7, 20, 21, 40, 100, 1000])
def test_chunks_of_rows_and_of_positions_agree_bit_for_bit(chunk: int):
    torch.manual_seed(1)
    ids, weights = torch.randint(7, (4, 5)), torch.randn(2, 4, 5)
    results = []
    for size in (10**6, chunk):
        torch.manual_seed(2)
        logits = torch.randn(4, 6, 9, requires_grad=True)
        # A view, as of the logits of a batch without the last position.
        both = logprobs_and_entropy(logits[:, :-1], ids, vocab_size=7, chunk=size)
        (torch.stack(both) * weights).sum().backward()
        results.append((*both, logits.grad))
    assert all(torch.equal(whole, part) for whole, part in zip(*results, strict=True))


def test_no_tensor_is_larger_than_a_chunk():
    """Besides the logits, their gradient and the results."""
    logits = torch.zeros(2, 40, 1000, dtype=torch.bfloat16, requires_grad=True)
    with Float32Sizes() as mode:
        both = logprobs_and_entropy(logits, torch.zeros(2, 40, dtype=torch.long), chunk=5000)
        sum(both).sum().backward()
    assert max(mode.sizes) == 5000


def test_bfloat16_logits_give_float32_logprobs():
    # -ln(1 + e^-1); bfloat16 has no number nearer than -0.3125 or -0.3145.
    logprobs = logprobs_of(torch.tensor([[[0.0, 1.0]]], dtype=torch.bfloat16), torch.tensor([[1]]))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.tensor([[-0.3132617]]))


def test_gradient_of_a_logprob():
    logits = logits_of([1.0, 4.0, 25.0, 1000.0], [1.0, 4.0, 25.0, 1000.0]).requires_grad_()
    ids = torch.tensor([[2], [0]])
    logprobs_of(logits, ids, temperature=2.0, vocab_size=3, chunk=1).sum().backward()
    # (onehot - p) / temperature, p = [1, 2, 5] / 8; 0 for the padded vocabulary
    expected = torch.tensor([[[-0.0625, -0.125, 0.1875, 0.0]], [[0.4375, -0.125, -0.3125, 0.0]]])
    torch.testing.assert_close(logits.grad, expected)


def test_entropy():
    # Uniform over 4: ln 4. [2, 1, 1, 0] / 4: 1.5 ln 2.
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.3862944, 0.6931472, 0.6931472, -100.0]]])
    torch.testing.assert_close(entropy_of(logits), torch.tensor([[1.3862944, 1.0397208]]))


@pytest.mark.parametrize("chunk", [1, 8])
def test_entropy_belongs_to_the_sampled_distribution(chunk: int):
    # ln [4, 1, 1] / 2 = ln [2, 1, 1]: 1.5 ln 2. The other row is certain: 0.
    logits = logits_of([4.0, 1.0, 1.0, 1000.0], [1e30, 1.0, 1.0, 1.0])
    entropy = entropy_of(logits, temperature=2.0, vocab_size=3, chunk=chunk)
    torch.testing.assert_close(entropy, torch.tensor([[1.0397208], [0.0]]))


@pytest.mark.parametrize("chunk", [1, 8])
def test_gradient_of_the_entropy(chunk: int):
    logits = logits_of([4.0, 1.0, 1.0, 1000.0], [1.0, 1.0, 1.0, 1000.0]).requires_grad_()
    entropy = entropy_of(logits, temperature=2.0, vocab_size=3, chunk=chunk)
    (entropy * torch.tensor([[-2.0], [1.0]])).sum().backward()
    # p = [2, 1, 1] / 4, ln p = -0.6931472, -1.3862944, H = 1.0397208:
    # -p (ln p + H) = -0.1732868, 0.0866434, 0.0866434, divided by temperature 2, times -2.
    # A uniform distribution has the maximum entropy: 0.
    expected = torch.tensor([[[0.1732868, -0.0866434, -0.0866434, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)


def test_the_backward_pass_keeps_no_float32_logits():
    logits = torch.zeros(4, 3, 50, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        entropy_of(logits, chunk=100)
    assert [tensor.dtype for tensor in kept] == [torch.bfloat16, torch.int64]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_position_ids_count_real_tokens(dtype: torch.dtype):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).to(dtype)
    torch.testing.assert_close(
        position_ids(mask), torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
    )


def test_ids_must_match_the_logits():
    with pytest.raises(ValueError, match=r"ids is \(2, 4\), logits is \(2, 3, 5\)"):
        logprobs_of(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature: found 0\.0, expected a positive number"),
        ({"temperature": float("nan")}, "temperature: found nan, expected a positive number"),
        ({"vocab_size": 0}, "vocab_size: found 0, expected 1 to 5"),
        ({"vocab_size": 6}, "vocab_size: found 6, expected 1 to 5"),
    ],
)
def test_what_defines_no_distribution_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        entropy_of(torch.zeros(1, 1, 5), **changes)


@pytest.mark.parametrize("chunk", [1, 50, 10_000])
@pytest.mark.parametrize("biased", [True, False])
def test_a_head_gives_the_values_and_gradients_of_its_logits(chunk, biased):
    """Of hidden states, weight and bias, however the positions are cut; padded rows get none."""
    torch.manual_seed(2)
    hidden, weight, bias = torch.randn(2, 5, 4), torch.randn(9, 4), torch.randn(9)
    inputs = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    ids = torch.randint(7, (2, 5))
    log_p = ((inputs[0] @ inputs[1].T + (inputs[2] if biased else 0.0)) / 0.7)[..., :7]
    log_p = log_p.log_softmax(-1)
    logprobs = log_p.gather(-1, ids[..., None])[..., 0]
    expected = [logprobs, -(log_p.exp() * log_p).sum(-1)]
    weights = torch.randn(2, 2, 5).double()
    total = sum((w * x).sum() for w, x in zip(weights, expected, strict=True))
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)

    own = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    head = (own[1], own[2] if biased else None)
    found = logprobs_and_entropy(own[0], ids, temperature=0.7, vocab_size=7, chunk=chunk, head=head)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float())
    total = sum((w.float() * x).sum() for w, x in zip(weights, found, strict=True))
    for one, other in zip(
        torch.autograd.grad(total, own, allow_unused=True), gradients, strict=True
    ):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
    assert not gradients[1][7:].any()


def test_logits_of_a_head_in_bf16_are_not_rounded_to_bf16():
    """Near 30, neighbouring bf16 numbers differ by 1/8."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(1, 20, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    ids = torch.randint(100, (1, 20))
    exact = logprobs_of(hidden.double() @ weight.double().T, ids)
    rounded = logprobs_of(hidden @ weight.T, ids)
    torch.testing.assert_close(logprobs_of(hidden, ids, head=(weight, None)), exact)
    assert (rounded - exact).abs().max() > 0.01


# --- the divergence from a teacher ---

STUDENT, TEACHER = [1.0, 2.0, 5.0], [4.0, 2.0, 2.0]
BETAS = [0.0, 0.25, 0.5, 1.0]


def probabilities(*weights: list[float]) -> Tensor:
    found = torch.tensor(weights)
    return (found / found.sum(-1, keepdim=True)).log()


def compared(logits: Tensor, teacher: Tensor, beta: float, count=None, **how) -> Tensor:
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
def test_divergence_of_two_distributions(beta: float, expected: float):
    found = divergence(probabilities(STUDENT), probabilities(TEACHER), beta=beta)
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta: float):
    logits = torch.randn(2, 3, 7).requires_grad_()
    found = compared(logits, logits.detach() + 5, beta)
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(2, 3), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3, 7), atol=1e-6, rtol=0.0)


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
def test_chunks_change_no_comparison(chunk: int, count: int | None):
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
def test_no_tensor_of_a_comparison_is_larger_than_an_eighth_of_a_chunk(count: int | None):
    """At most eight tensors exist at a time, besides the logits and results."""
    logits = torch.zeros(2, 40, 1000, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.zeros(2, 40, 1000, dtype=torch.bfloat16)
    with Float32Sizes() as mode:
        compare = partial(compared, logits, teacher, 0.5, count)
        compare(chunk=40_000).sum().backward()
    assert max(mode.sizes) == 40_000 / 8


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


# --- sampling ---


def sampled_tokens(draws: list[float], logits: list[float], **how: Any) -> list[int]:
    arguments = {"temperature": 1.0, "vocab_size": len(logits)} | how
    numbers = torch.tensor(draws, dtype=torch.float64)
    tokens, found = sampled(torch.tensor([logits] * len(draws)), numbers, **arguments)
    own = torch.tensor(logits[: arguments["vocab_size"]]) / arguments["temperature"]
    torch.testing.assert_close(found, own.log_softmax(-1)[tokens])
    return tokens.tolist()


def test_a_draw_selects_a_token_by_the_distribution_function():
    """Probabilities 1/4, 1/2, 1/4; at temperature 1/2 they are 1/6, 4/6, 1/6."""
    logits = [0.0, 0.6931472, 0.0]
    draws = [0.0, 0.24, 0.26, 0.74, 0.76, 0.999999]
    assert sampled_tokens(draws, logits) == [0, 0, 1, 1, 2, 2]
    assert sampled_tokens([0.16, 0.17, 0.83, 0.84], logits, temperature=0.5) == [0, 1, 1, 2]


def test_padded_rows_and_tokens_of_probability_zero_are_never_sampled():
    assert sampled_tokens([0.999999], [0.0, 0.0, 50.0, 50.0], vocab_size=2) == [1]
    assert sampled_tokens([1.0 - 1e-16], [0.0, -1e9, -1e9]) == [0]
