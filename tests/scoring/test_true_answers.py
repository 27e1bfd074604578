"""Rewards by true answers, also those that are equal as mathematics."""

import importlib.util

import pytest

from rlhf_pipeline.scoring import true_answers
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.sources import FunctionSource
from rlhf_pipeline.scoring.true_answers import AGREES, accuracy, agreement


def test_a_right_response_gets_1_and_a_wrong_one_0():
    source = FunctionSource("last_number", agreement("last_number"))
    answered = Answered([[], []], ["1,000", "4"], ["It is 1000.", "3"])
    assert source(None, answered) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("true", "given", "strict", "lenient"),
    [
        ("72", "6 * 12\n#### 72", 1, 1),
        ("so 60 + 12\n#### 1,072", r"Hence \boxed{1072}.", 1, 1),
        ("72", "The answer is **72**, as 6 * 12 says.", 0, 0),
        ("72", "It is 72", 0, 1),
        ("72", "It is 172", 0, 0),
        ("Paris", "I think.\nAnswer: paris.\nIt is a city.", 1, 1),
        ("Paris", "It is Paris, a city.", 0, 1),
        ("42", "#### 42\nI hope this answer helps.", 1, 1),
        ("No answer", "Paris", 0, 0),
        ("unanswerable", "I am able to say Paris", 0, 0),
    ],
)
def test_strict_asks_for_the_final_answer_and_lenient_for_a_mention(true, given, strict, lenient):
    assert accuracy(true, given) == (strict, lenient)


def test_without_a_true_answer_there_is_no_accuracy():
    assert accuracy(None, "72") is None


needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the extra `math` is not installed"
)


@needs_math_verify
@pytest.mark.parametrize(
    ("true", "given", "agrees"),
    [
        ("1/2", r"It is \frac{1}{2}", True),
        (r"\frac12", r"Hence \boxed{0.5}.", True),
        ("50%", "The answer is 0.5", True),
        ("so 60 + 12 = $72\n#### 1,072", "It costs $5, then $1,072 in all.", True),
        ("1234", r"\boxed{1{,}234}", True),
        (r"\{1, 2\}", r"The set is $\{2, 1\}$.", True),
        ("(1, 2]", r"So $x \in (1, 2]$.", True),
        ("(1, 2]", "$(1, 2)$", False),
        ("x^2 - 1", "$(x - 1)(x + 1)$", True),
        (r"10 \text{ cm}", r"\boxed{10\text{ cm}}", True),
        ("-3", "3", False),
        ("5", "5 is wrong, it is 6", False),
        ("Paris", "It is Rome", False),
    ],
)
def test_equal_as_mathematics(true, given, agrees):
    assert AGREES["math"](true, given) is agrees


@needs_math_verify
def test_an_answer_without_an_end_is_wrong_and_the_next_one_is_compared(monkeypatch, caplog):
    """The power tower keeps SymPy busy in code that no signal handler interrupts."""
    monkeypatch.setattr(true_answers, "_processes", [])
    monkeypatch.setattr(true_answers, "LIMIT_S", 3)
    assert AGREES["math"]("5", "$9^{9^{9^{9}}}$") is False
    assert "the answer counts as wrong" in caplog.text
    assert AGREES["math"]("5", "$2 + 3$") is True
