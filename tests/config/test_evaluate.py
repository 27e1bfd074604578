"""Judges and tasks among the parameters of the evaluation."""

from pathlib import Path

import pytest
from ppo_runs import ppo_config
from pydantic import ValidationError

from rlhf_pipeline.config.evaluate import EvaluateConfig, TasksConfig, task_faults, task_inputs
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import ModelReward, as_judges

CHAT = {"base_url": "http://localhost:1/v1", "model": "org/judge"}


def test_other_kinds_of_judges_and_their_names():
    judges = [
        {"model": "org/reward-model", "retokenize": True}, {"reference": "last_number"},
        "my.py:f", {"openai": CHAT}, {"openai": CHAT, "name": "chat"},
    ]  # fmt: skip
    config = EvaluateConfig.model_validate({"judges": judges})
    names = ["reward-model", "last_number", "f", "judge", "chat"]
    assert [judge.label for judge in config.judges] == names
    assert EvaluateConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_name_with_one_slash_is_on_the_hub_unless_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ModelReward(path="org/model").on_hub
    (tmp_path / "org/model").mkdir(parents=True)
    for name in ("org/model", "./org/model", "model", "a/b/c", str(tmp_path)):
        assert not ModelReward(path=name).on_hub


def test_best_of_n_is_a_power_of_two():
    assert [EvaluateConfig(best_of_n=number).best_of_n for number in (0, 8)] == [0, 8]
    for number in (1, 6):
        with pytest.raises(ValidationError, match=f"found {number}, expected 0, 2, 4, 8"):
            EvaluateConfig(best_of_n=number)


@pytest.mark.parametrize(
    ("judges", "message"),
    [
        (["trained"], "expected FILE.py:FUNCTION"),
        ([{"paths": "/models/other"}], "a block with one of callable, path, reference, regex, rub"),
        ([{"model": "a/b", "weight": 2.0}], "found weight 2.0 of judge b, expected none"),
        ([{"openai": {"base_url": "ftp://x", "model": "m"}}], "String should match pattern"),
        ([{"openai": CHAT | {"template": "{first}"}}], "expected text with {prompt}, {first}, {se"),
        ([{"callable": "my.py:f", "name": "gold"}], "found label 'gold', expected another: sc"),
        (["a/my.py:f", "b/my.py:f"], "found two called 'my.f', expected unique names. Fix: set t"),
        (["my.py:gold_lower"], "neither _lower nor _upper"),
    ],
)
def test_other_judges_are_refused(judges, message):
    with pytest.raises(ValidationError) as refusal:
        EvaluateConfig.model_validate({"judges": judges})
    assert any(message in fault["msg"] for fault in refusal.value.errors())


@pytest.mark.parametrize(
    ("functions", "labels"),
    [
        (["my.py:gold", "my.py:short"], ["my.gold", "short"]),
        (["./a.py:f", "folder/b.py:f", "package.module:f"], ["a.f", "b.f", "module.f"]),
        ([{"callable": "my.py:score", "name": "mine"}, "my.py:score"], ["mine", "my.score"]),
    ],
)
def test_a_function_whose_name_is_taken_gets_that_of_its_file_as_well(functions, labels):
    """`score` and `gold` are judges of ours, and rewards become judges."""
    config = EvaluateConfig.model_validate({"judges": functions})
    assert EvaluateConfig.model_validate(config.model_dump(mode="json")) == config
    rewards = ppo_config(rewards=functions).rewards
    for sources in (config.judges, rewards, as_judges(rewards)):
        assert [source.label for source in sources] == labels


def test_only_what_a_policy_maximizes_judges_in_its_place():
    given = [{"reference": "exact", "weight": weight} for weight in (2, 0, -1)]
    names = ("good", "idle", "bad")
    rewards = [one | {"name": name} for one, name in zip(given, names, strict=True)]
    (judge,) = as_judges(ppo_config(rewards=["trained", *rewards]).rewards)
    assert (judge.label, judge.weight) == ("good", 1.0)


GREEDY = {"sampling": {"temperature": 0}}


def test_evaluation_may_be_greedy_and_training_may_not():
    with pytest.raises(ValidationError, match="greater than 0"):
        PPOConfig(sampling={"temperature": 0})
    for given, draws in (({}, 2), ({"answers_per_prompt": 4}, 4), (GREEDY, 1)):
        assert EvaluateConfig(**given).baseline_draws == draws
    for several in ({"answers_per_prompt": 2}, {"best_of_n": 2}):
        with pytest.raises(ValidationError, match="the same answer every time"):
            EvaluateConfig(**GREEDY, **several)


def test_what_a_task_names_is_an_input(tmp_path, monkeypatch):
    """Relative to its file or to the current folder, through includes and by patterns."""
    monkeypatch.chdir(tmp_path)
    template = "tasks/_template_yaml"  # as in the harness, without a suffix
    texts = {
        "tasks/own.yaml": "include: _template_yaml\n"
        "dataset_kwargs: {data_files: {test: 'data/part-*.jsonl', train: /no/such.jsonl}}\n"
        f"description: '{'A long text. ' * 30}'\n",
        template: "doc_to_text: !function code.prompts.question\ninclude: more.yml",
        "data/part-0.jsonl": "", "data/part-1.jsonl": "", "data/other.jsonl": "",
        "tasks/code/prompts.py": "def question(document): ...",
        "tasks/more.yml": "fewshot_config: {samples: shots.json}",
        "tasks/shots.json": "[]",
    }  # fmt: skip
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    files = task_inputs(TasksConfig(names=("arc_easy", "tasks/own.yaml")))
    assert [*files] == [f"tasks.{number}" for number in range(7)]
    read = {path.as_posix() for path in files.values()}
    assert read == texts.keys() - {"data/other.jsonl"}
    assert task_inputs(TasksConfig(names=("arc_easy",))) == {}


def test_a_file_of_tasks_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [")
    (broken,) = task_faults(TasksConfig(names=("arc_easy", str(tmp_path / "broken.yaml"))))
    assert broken.startswith("evaluate.tasks.names: found while parsing ")
    assert "broken.yaml" in broken and "expected files of YAML" in broken
