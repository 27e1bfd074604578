"""Python functions of the user, patterns, and programs with tests as sources of scores."""

from dataclasses import replace

import pytest

from rlhf_pipeline.config.rewards import CodeReward
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError
from rlhf_pipeline.runtime.manifest import file_digest
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.reward_sources import RewardSum
from rlhf_pipeline.scoring.sources import CodeSource, FunctionSource, matches, program_of


def function(source: str) -> FunctionSource:
    scope: dict = {}
    exec(source, scope)
    return FunctionSource("my.py:f", scope["f"])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(prompts, responses, references):\n"
         "    return [a == b for a, b in zip(responses, references)]", [1.0, 0.0, 1.0]),
        ("import torch\ndef f(prompts, responses):\n"
         "    return torch.tensor([float(p[-1]['content'][9]) for p in prompts])", [0.0, 1.0, 2.0]),
    ],
    ids=["references", "prompts"],
)  # fmt: skip
def test_a_function_gets_prompts_responses_and_references(source, expected, scored, answered):
    assert function(source)(scored, answered) == expected


def test_a_function_that_reads_true_answers_needs_one_for_each_prompt(scored, answered):
    """Also one that the check of a split does not know, as it is not defined by a `def`."""
    reads = function("f = lambda prompts, responses, references=(): [1.0] * len(responses)")
    assert reads(scored, answered) == [1.0] * 3
    with pytest.raises(
        StageError,
        match=r"^my\.py:f: found 1 of 3 prompts without a true answer, expected one for each\. "
        r"Fix: set split\.without_reference to drop$",
    ):
        reads(scored, replace(answered, references=["4", None, "6"]))
    blind = function("def f(prompts, responses): return [2.0] * len(responses)")
    assert blind(scored, replace(answered, references=[None] * 3)) == [2.0] * 3


def test_a_pattern_is_searched_and_its_search_has_an_end(scored, answered):
    assert matches(r"^\d$")(scored, answered) == [1.0, 0.0, 1.0]
    slow = replace(answered, responses=["a", "a" * 60 + "b", ""])
    message = r"^regex '\(a\|aa\)\+\$' failed at the response 'aaa.*Timeout"
    with pytest.raises(StageError, match=message):
        matches("(a|aa)+$", 0.05)(scored, slow)


FIRST = "prompt [{'role': 'user', 'content': 'Question 0?'}]"
SECOND = "prompt [{'role': 'user', 'content': 'Question 1?'}]"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "my.py:f: found 1 results, expected a list of 3 numbers, one for each "
         "response. Fix: return one finite number for each response"),
        ("return 1.0", "my.py:f: found 1.0, expected a list of 3 numbers, one for each response"),
        ("import torch; return torch.tensor(0.5)", "my.py:f: found tensor(0.5000), expected a list "
         "of 3 numbers"),
        ("return [1.0, '3', 2.0]", "my.py:f: found '3', expected a finite number, for the "
         f"response 'five' to the {SECOND}"),
        ("return [1.0, 2.0, None]", "found None, expected a finite number, for the response '6'"),
        ("return [1.0, float('-inf'), 2.0]", "found -inf, expected a finite number"),
        ("return [int(r) for r in responses]", f"my.py:f failed at the response 'five' to the "
         f"{SECOND}: ValueError: invalid literal"),
        ("prompts.clear(); responses.clear(); return []", "found 0 results, expected a list of 3"),
        ("raise SystemExit(0)",
         f"my.py:f failed at the response '4' to the {FIRST}: SystemExit: 0"),
        ("\n    if len(responses) > 1: raise MemoryError('all')\n    return [1.0]",
         f"my.py:f failed at 3 responses together, the first to the {FIRST}: MemoryError: all"),
    ],
)  # fmt: skip
def test_a_wrong_result_fails_with_its_prompt_and_response(body, message, scored, answered):
    with pytest.raises(StageError) as failure:
        function(f"def f(prompts, responses): {body}")(scored, answered)
    assert message in str(failure.value)


def test_a_function_with_other_parameters_fails_when_it_is_loaded():
    message = r"my\.py:f cannot be called with \(prompts, responses\): .* Fix: define it as"
    with pytest.raises(ConfigError, match=message):
        function("def f(responses): ...")


def test_a_function_gets_the_columns_and_the_tokens_that_it_names(scored, answered):
    rated = replace(answered, columns={"difficulty": [1, 2, 3], "topic": ["a", "b", None]})
    source = function("def f(prompts, responses, difficulty, scored, weight=2): return "
                      "[weight * one + len(scored.sequences) for one in difficulty]")  # fmt: skip
    assert source(scored, rated) == [5.0, 7.0, 9.0]
    message = r"my\.py:f asks for difficulty, which the split does not"
    with pytest.raises(ConfigError, match=message):
        source(scored, answered)


def test_a_function_of_a_module_is_imported_by_name(
    load_one, scored, answered, tmp_path, monkeypatch
):
    module = tmp_path / "own_rewards.py"
    module.write_text("def f(prompts, responses): return [2.0] * 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = load_one("own_rewards:f", files={"rewards.0": module})
    assert source(scored, answered) == [2.0] * 3


def test_a_function_that_has_changed_since_the_plan_is_refused(load, tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def f(prompts, responses): return [0.0] * len(responses)")
    planned = {"rewards.0": file_digest(file)}
    load(f"{file}:f", files={"rewards.0": file}, digests=planned)
    file.write_text("def f(prompts, responses): return [1.0] * len(responses)")
    with pytest.raises(ArtifactError, match=r"my\.py: found other bytes than when the stage was"):
        load(f"{file}:f", files={"rewards.0": file}, digests=planned)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failure_names_the_line_of_the_users_file(
    load_one, tmp_path, scored, answered, processes
):
    (tmp_path / "my.py").write_text(
        "import json\n\ndef parsed(text):\n    return json.loads(text)['score']\n\n"
        "def f(prompts, responses):\n    return [parsed('{') for _ in responses]\n"
    )
    reward = {"callable": f"{tmp_path}/my.py:f", "processes": processes}
    source = load_one(reward, files={"rewards.0": tmp_path / "my.py"})
    with pytest.raises(StageError) as failure:
        source(scored, answered)
    assert failure.value.message.endswith(f"({tmp_path}/my.py, line 4)")


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
