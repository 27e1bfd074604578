"""Judges by true answers, and which judges training has optimized."""

from types import SimpleNamespace

import pytest
from rank_fixtures import as_artifact

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.evaluation.judges import optimized_judges
from rlhf_pipeline.evaluation.texts import load_judges
from rlhf_pipeline.rollout.records import Answered
from rlhf_pipeline.rollout.true_answers import AGREES
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest


@pytest.mark.parametrize(
    ("kind", "true", "given", "agrees"),
    [
        ("exact", "Paris", " paris.", True),
        ("exact", "Paris", "It is Paris", False),
        ("contains", "New  York", "I think new york it is", True),
        ("contains", "Rome", "Paris", False),
        ("last_number", "#### 1,234", "First 7, so the answer is 1234.0.", True),
        ("last_number", "5", "5 is wrong, it is 6", False),
        ("last_number", "-3", "3", False),
        ("last_number", "none", "none", False),  # no number is no agreement
    ],
)
def test_what_agrees_with_the_true_answer(kind, true, given, agrees):
    assert AGREES[kind](true, given) is agrees


RUBRIC = {"rubric": "Short.", "openai": {"base_url": "http://here/v1", "model": "m"}}


def test_a_row_without_a_true_answer_has_no_score():
    config = EvaluateConfig(judges=[{"reference": "contains", "name": "facts"}])
    judges = load_judges(SimpleNamespace(inputs={}), config)
    texts = Answered([[], [], []], ["a", None, "b"], ["an a", "an a", "an a"])
    assert judges["facts"](SimpleNamespace(text=texts)) == [1.0, None, 0.0]


@pytest.mark.parametrize(
    ("rewards", "optimized", "names"),
    [
        ([{"weight": 1.0, "model": "trained"}], {"score", "same_as_trained"}, ["trained"]),
        (None, {"score", "same_as_trained"}, []),
        ([{"weight": 0.5, "model": "trained"}], {"score", "same_as_trained"}, ["0.5 * trained"]),
        ([{"weight": 1.0, "path": "x"}], {"other"}, ["x"]),
        ([{"weight": -2.0, "path": "x"}], {"other"}, ["-2 * x"]),
        ([{"weight": 0.0, "path": "x"}], set(), []),
        ([{"weight": 1.0, "callable": "my.py:f"}], {"f"}, ["f"]),
        ([{"weight": 1.0, "callable": "my.py:g"}], set(), ["g"]),
        ([{"weight": 1.0, "callable": "my.py:reads"}], {"exact"}, ["reads"]),
        ([{"weight": 1.0, "reference": "contains"}], {"exact"}, ["contains"]),
        ([{"openai": {"base_url": "http://there/v1", "model": "m"}}], {"m"}, ["m"]),
        ([RUBRIC], {"rubric"}, ["m"]),
        ([RUBRIC | {"rubric": "Long."}], set(), ["m"]),
        ([RUBRIC | {"rubric": "As {reference}."}], {"exact"}, ["m"]),
        ([{"regex": "^Yes"}], {"regex"}, ["regex"]),
        ([{"regex": "^No"}], set(), ["regex"]),
        ([{"weight": 1.0, "callable": "gone.py:f"}], {"f", "exact"}, ["f"]),  # nobody can know
    ],
)
def test_judges_that_training_has_optimized(tmp_path, monkeypatch, rewards, optimized, names):
    """Reward models count by their bytes, functions by file and name; DPO has no rewards.

    A judge by true answers counts if a reward function reads true answers.
    """
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my.py"
    source.write_text(
        "def f(prompts, responses): ...\n"
        "def g(prompts, responses): ...\n"
        "def reads(prompts, responses, references): ...\n"
    )
    policy = tmp_path / "policy"
    policy.mkdir()
    is_function = rewards is not None and "callable" in rewards[0]
    reward = file_digest(source) if is_function else "bytes of other"
    inputs = {"comparisons": "of dpo"} if rewards is None else {"rewards.0": reward}
    config = {"dpo": {}} if rewards is None else {"ppo": {"rewards": rewards}}
    manifest = Manifest("ppo", "f", 0, config, inputs, {}, {}, {})
    manifest.write(policy)
    config = EvaluateConfig(
        judges=[
            f"{source}:f",
            {"model": "./a", "name": "other"},
            {"model": "./b", "name": "same_as_trained"},
            {"reference": "exact"},
            {"openai": {"base_url": "http://here/v1", "model": "m"}},
            RUBRIC | {"name": "rubric"},
            {"regex": "^Yes"},
        ]
    )
    job = LaunchedJob(
        "evaluate", "f", 0, {}, {"ppo_model": policy, "judges.0": source},
        {
            "reward_model": "bytes of trained",
            "judges.1": "bytes of other",
            "judges.2": "bytes of trained",
        },
        tmp_path, 60.0,
    )  # fmt: skip
    assert optimized_judges(job, "ppo", config) == (optimized, names)


def test_a_function_that_was_edited_since_is_the_same_judge(tmp_path):
    """Its place counts as well as its content."""
    source = tmp_path / "my.py"
    source.write_text("def f(prompts, responses): ...")
    (tmp_path / "policy").mkdir()
    rewards = {"ppo": {"rewards": [{"weight": 1.0, "callable": f"{source}:f"}]}}
    inputs = {"rewards.0": "an earlier content"}
    Manifest("ppo", "f", 0, rewards, inputs, {}, {}, {}).write(tmp_path / "policy")
    given = {"ppo_model": tmp_path / "policy", "judges.0": source}
    job = LaunchedJob("evaluate", "f", 0, {}, given, {}, tmp_path, 60.0)
    config = EvaluateConfig(judges=[f"{source}:f"])
    assert optimized_judges(job, "ppo", config) == ({"f"}, ["f"])


def test_an_algorithm_that_reads_neither_comparisons_nor_reward_model_has_optimized_no_judge(
    tmp_path,
):
    (tmp_path / "own").mkdir()
    job = LaunchedJob(
        "evaluate", "f", 0, {}, {"own_model": as_artifact(tmp_path / "own")}, {}, tmp_path, 60.0
    )
    assert optimized_judges(job, "own", EvaluateConfig()) == (set(), [])
