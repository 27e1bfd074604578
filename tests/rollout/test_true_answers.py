"""Rewards by true answers."""

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.rollout.function_reward import FunctionSource
from rlhf_pipeline.rollout.records import Answered
from rlhf_pipeline.rollout.true_answers import accuracy, agreement


def test_a_right_response_gets_1_and_a_wrong_one_0():
    source = FunctionSource("last_number", agreement("last_number"))
    answered = Answered([[], []], ["1,000", "4"], ["It is 1000.", "3"])
    assert source(None, answered).tolist() == [1.0, 0.0]


def test_a_prompt_without_a_true_answer_is_refused():
    source = FunctionSource("exact", agreement("exact"))
    with pytest.raises(StageError, match="exact: found 1 of 2 prompts without a true answer"):
        source(None, Answered([[], []], [None, "4"], ["4", "4"]))


@pytest.mark.parametrize(
    ("true", "given", "strict", "lenient"),
    [
        ("72", "72", 1, 1),
        ("72", "6 * 12\n#### 72", 1, 1),
        ("so 60 + 12\n#### 1,072", r"Hence \boxed{1072}.", 1, 1),
        ("72", "The answer is **72**, as 6 * 12 says.", 0, 0),
        ("72", "It is 72", 0, 1),
        ("72", "It is 172", 0, 0),
        ("Paris", "I think.\nAnswer: paris.\nIt is a city.", 1, 1),
        ("Paris", "It is Paris, a city.", 0, 1),
        ("Paris", "Rome", 0, 0),
        ("42", "#### 42\nI hope this answer helps.", 1, 1),
        ("No answer", "Paris", 0, 0),
        ("unanswerable", "I am able to say Paris", 0, 0),
    ],
)
def test_strict_asks_for_the_final_answer_and_lenient_for_a_mention(true, given, strict, lenient):
    assert accuracy(true, given) == (strict, lenient)


def test_without_a_true_answer_there_is_no_accuracy():
    assert accuracy(None, "72") is None
