"""The program in a response, its tests in the true answer, and what is counted."""

from dataclasses import replace

import pytest

from rlhf_pipeline.config.rewards import CodeReward
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.reward_sources import RewardSum
from rlhf_pipeline.scoring.sources import CodeSource, program_of

ADDS = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Say:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("First\n```bash\nls\n```\n  ```python\nx = 3\n  ```\n", "x = 3\n"),
        ("Use `x = 1`.", "Use `x = 1`."),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python\n```", ""),
    ],
)
def test_the_program_is_the_last_fenced_block(response, program):
    assert program_of(response) == program


@pytest.mark.usefixtures("bubblewrap")
def test_programs_that_pass_their_tests_score_1_and_others_are_counted_by_their_fault(
    load, scored, rows, monkeypatch
):
    """The counts are of one rollout each."""
    answers = [ADDS, f"```python\n{ADDS.replace('+', '-')}```", "import os; os.abort()"]
    text = Answered(rows["messages"], [TESTS] * 3, answers)
    monkeypatch.setattr(RewardSum, "_as_text", lambda *_: text)
    source = load({"code": "python", "name": "tests", "weight": 2.0, "processes": 3})
    for _ in range(2):
        found = source(scored, rows)
        assert found.scores.tolist() == [2.0, 0.0, 0.0]
        assert found.replies == {
            "tests/failed": 1, "tests/timed_out": 0, "tests/out_of_memory": 0, "tests/died": 1,
        }  # fmt: skip


@pytest.mark.usefixtures("bubblewrap")
def test_tests_that_are_missing_or_no_python_end_the_stage(scored, answered):
    source = CodeSource(CodeReward(code="python"), "ppo.rewards.0")
    with pytest.raises(StageError, match=r"^ppo\.rewards\.0: found 1 of 3 prompts without a true"):
        source(scored, replace(answered, references=[TESTS, None, TESTS]))
    with pytest.raises(
        StageError,
        match=r"^ppo\.rewards\.0: found the true answer 'add\(1, 2\) is 3 :' of the prompt "
        r"\[.*Question 1.*\], expected tests in Python: invalid syntax",
    ):
        source(scored, replace(answered, references=[TESTS, "add(1, 2) is 3 :", TESTS]))


@pytest.mark.usefixtures("bubblewrap")
def test_limits_below_an_empty_program_are_refused_when_the_reward_is_loaded(load):
    with pytest.raises(
        StageError, match=r"^sandbox: found that an empty program timed out, expected that "
        r"it passes\. Fix: raise timeout_s or memory_mib$",
    ):  # fmt: skip
        load({"code": "python", "timeout_s": 0.001})
