"""Answers that are equal as mathematics, and answers that math-verify never finishes."""

import pytest

from rlhf_pipeline.rollout import mathematics
from rlhf_pipeline.rollout.true_answers import AGREES

pytest.importorskip("math_verify", reason="the extra `math` is not installed")


@pytest.mark.parametrize(
    ("true", "given", "agrees"),
    [
        ("1/2", r"It is \frac{1}{2}", True),
        (r"\frac12", r"Hence \boxed{0.5}.", True),
        ("1/3", "0.33", False),
        ("50%", "The answer is 0.5", True),
        ("0.5", r"The answer is 50\%.", True),
        ("so 60 + 12 = $72\n#### 1,072", "It costs $5, then $1,072 in all.", True),
        ("1234", r"\boxed{1{,}234}", True),
        (r"\{1, 2\}", r"The set is $\{2, 1\}$.", True),
        ("(1, 2]", r"So $x \in (1, 2]$.", True),
        ("(1, 2]", "$(1, 2)$", False),
        (r"(-\infty, 1) \cup [2, \infty)", r"$(-\infty, 1) \cup [2, \infty)$", True),
        ("x^2 - 1", "$(x - 1)(x + 1)$", True),
        (r"10 \text{ cm}", r"\boxed{10\text{ cm}}", True),
        ("-3", "3", False),
        ("5", "5 is wrong, it is 6", False),
        ("Paris", "It is Rome", False),
    ],
)
def test_equal_as_mathematics(true, given, agrees):
    assert AGREES["math"](true, given) is agrees


def test_an_answer_without_an_end_is_wrong_and_the_next_one_is_compared(monkeypatch, caplog):
    """The power tower keeps SymPy busy in code that no signal handler interrupts."""
    monkeypatch.setattr(mathematics, "_processes", [])
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    assert AGREES["math"]("5", "$9^{9^{9^{9}}}$") is False
    assert "the answer counts as wrong" in caplog.text
    assert AGREES["math"]("5", "$2 + 3$") is True
