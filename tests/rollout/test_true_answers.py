"""Rewards by true answers."""

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.rollout.function_reward import FunctionSource
from rlhf_pipeline.rollout.records import Answered
from rlhf_pipeline.rollout.true_answers import agreement


def test_a_right_response_gets_1_and_a_wrong_one_0():
    source = FunctionSource("last_number", agreement("last_number"))
    answered = Answered([[], []], ["1,000", "4"], ["It is 1000.", "3"])
    assert source(None, answered).tolist() == [1.0, 0.0]


def test_a_prompt_without_a_true_answer_is_refused():
    source = FunctionSource("exact", agreement("exact"))
    with pytest.raises(StageError, match="exact: found 1 of 2 prompts without a true answer"):
        source(None, Answered([[], []], [None, "4"], ["4", "4"]))
