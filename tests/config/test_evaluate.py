"""Judges among the parameters of the evaluation."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.evaluate import CandidateConfig, EvaluateConfig
from rlhf_pipeline.config.reward_files import reward_faults
from rlhf_pipeline.config.rewards import CallableReward


def test_a_judge_is_a_function_in_one_line_or_as_a_block():
    config = EvaluateConfig.model_validate(
        {"judges": ["my.py:f", {"callable": "package.module:g", "name": "short"}]}
    )
    assert config.judges == (
        CallableReward(callable="my.py:f"),
        CallableReward(callable="package.module:g", name="short"),
    )
    assert EvaluateConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("judges", "message"),
    [
        (["trained"], "expected FILE.py:FUNCTION"),
        ([{"path": "/models/other"}], "Extra inputs are not permitted"),
        ([{"callable": "my.py:f", "weight": 2.0}], "found weight 2.0 of judge f, expected none"),
        ([{"callable": "my.py:f", "name": "gold"}], "found two judges called 'gold'"),
        (["my.py:score"], "found two judges called 'score'"),
        (["a.py:f", "b.py:f"], "found two judges called 'f', expected unique names"),
        ([{"callable": "my.py:f", "name": "a b"}], "found judge 'a b', expected letters"),
        (["my.py:gold_lower"], "neither _lower nor _upper"),
    ],
)
def test_other_judges_are_refused(judges, message):
    with pytest.raises(ValidationError) as refusal:
        EvaluateConfig.model_validate({"judges": judges})
    assert any(message in fault["msg"] for fault in refusal.value.errors())


def test_a_missing_file_is_reported_under_the_parameter_of_the_judges():
    (fault,) = reward_faults([CallableReward(callable="missing.py:f")], "evaluate.judges")
    assert fault.startswith("evaluate.judges.0: missing.py:f")


def test_caveats_do_not_count_for_the_cache():
    assert CandidateConfig(name="ppo", caveats={"gold": "x"}).recipe() == {"name": "ppo"}
