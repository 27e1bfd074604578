"""Tasks of the harness in local files; one of two policies solves them by construction."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch
import yaml
from local_tasks import DOCUMENTS, solutions, write_tasks
from rank_fixtures import as_artifact

from rlhf_pipeline.config.evaluate import EvaluateConfig, TasksConfig, task_inputs
from rlhf_pipeline.evaluation.evaluate import add_tasks
from rlhf_pipeline.pipelines.evaluate import TASKS
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")

POLICIES = ("sft", "ppo")


def measured(policies: dict[str, Path], folder: Path, **tasks) -> dict:
    from rlhf_pipeline.evaluation.tasks import main

    blocks = as_json({"tasks": TasksConfig(**tasks), "evaluate": EvaluateConfig()})
    inputs = {}
    for place, name in zip(("baseline", "candidate"), POLICIES, strict=True):
        own = folder / place
        own.mkdir()
        main(LaunchedJob("tasks", "f", 3, blocks, {"policy": policies[name]}, {}, own, 60.0))
        inputs[f"tasks.{place}"] = own / "export"
    evaluation = {"candidate": "ppo", "policies": {name: {} for name in POLICIES}}
    add_tasks(evaluation, inputs)
    return evaluation


@pytest.fixture(scope="module")
def policies(make_model):
    """The candidate has unused rows in its vocabulary; one of them is often the most likely."""
    return {"sft": make_model("llama", seed=1), "ppo": make_model("qwen2", 2, vocabulary=360)}


@pytest.fixture(scope="module")
def files(policies, tmp_path_factory):
    """The tasks that the candidate solves."""
    return write_tasks(tmp_path_factory.mktemp("tasks"), policies["ppo"])


def test_the_policy_that_solves_the_tasks_is_better(policies, files, tmp_path, monkeypatch):
    """Without a network."""

    def refuse(*arguments):
        raise OSError("the test has no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    names = (files["letters"], files["words"])
    found = measured(policies, tmp_path, names=names, batch_size_per_gpu=4)
    # By hand: how often SFT's letter and SFT's answer are the candidate's.
    pairs = list(zip(*(solutions(policies[name]) for name in POLICIES), strict=True))
    letters, words = (
        sum(a[field] == b[field] for a, b in pairs) / DOCUMENTS for field in ("letter", "words")
    )
    sft, ppo = (found["policies"][name] for name in POLICIES)
    assert ppo["tasks/letters/acc"] == ppo["tasks/words/exact_match"] == 1
    assert sft["tasks/letters/acc"] == pytest.approx(letters) and 0 < letters < 1
    assert sft["tasks/words/exact_match"] == pytest.approx(words) and words < 1
    names = [f"tasks/letters/acc{end}" for end in ("", "_lower", "_upper")]
    assert [*sft][:3] == names and sft[names[1]] < letters < sft[names[2]]
    change = found["tasks"]["letters"]
    assert (change["metric"], change["value"], change["n"]) == ("acc", 1, DOCUMENTS)
    assert change["change"] == pytest.approx(1 - letters)
    # Student's t by hand: quantile 2.306 at 8 degrees of freedom.
    spread = (letters * (1 - letters) * DOCUMENTS / (DOCUMENTS - 1)) ** 0.5
    half = 2.306 * spread / DOCUMENTS**0.5
    assert change["upper"] - change["change"] == pytest.approx(half, rel=1e-3)
    assert change["change"] - change["lower"] == pytest.approx(half, rel=1e-3)


def test_policies_get_the_same_examples_and_a_limit_holds(policies, files, tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    asked, answer = [], HFLM.generate_until

    def recorded(self, requests):
        asked.append([request.args[0] for request in requests])
        return answer(self, requests)

    monkeypatch.setattr(HFLM, "generate_until", recorded)
    found = measured(policies, tmp_path, names=(files["words"],), limit=4, few_shot=2)
    assert found["tasks"]["words"]["n"] == 4
    first, second = asked
    assert first == second and len({*first}) == 4
    # The chat template of the tokenizer, with two solved examples as turns.
    assert all(text.count("Human:") == 3 and text.endswith("Assistant:") for text in first)


def test_a_metric_that_is_no_share_is_reported_and_not_compared(policies, files, tmp_path):
    """A perplexity, a share of wrong answers, and a median."""
    letters, names = Path(files["letters"]).read_text(), [files["text"]]
    given = "aggregation: mean, higher_is_better: true"
    for name, instead in (
        ("wrong", given.replace("true", "false")),
        ("median", given.replace("mean", "median")),
    ):
        names.append(f"{tmp_path}/{name}.yaml")
        text = letters.replace("task: letters", f"task: {name}").replace(given, instead)
        Path(names[-1]).write_text(text)
    found = measured(policies, tmp_path, names=names)
    metrics = found["policies"]["sft"]
    assert metrics.keys() == {"tasks/median/acc", "tasks/text/word_perplexity", "tasks/wrong/acc"}
    assert metrics["tasks/text/word_perplexity"] > 1
    assert found["tasks"] == {}


def test_a_group_with_metrics_replaces_its_tasks(policies, files, tmp_path, monkeypatch):
    from rlhf_pipeline.evaluation import tasks

    letters = yaml.safe_load(Path(files["letters"]).read_text())
    group = {
        "group": "both parts",
        "task": [letters | {"task": f"part {n}"} for n in (1, 2)],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (tmp_path / "group.yaml").write_text(yaml.safe_dump(group))
    with_group = tasks.TaskManager(include_defaults=False, include_path=tmp_path)
    monkeypatch.setattr(tasks, "TaskManager", lambda include_defaults: with_group)
    found = measured(policies, tmp_path, names=["both parts"])
    assert [*found["tasks"]] == ["both parts"]
    assert found["tasks"]["both parts"]["n"] == 2 * DOCUMENTS
    names = [name for name in found["policies"]["ppo"] if not name.endswith(("_lower", "_upper"))]
    assert names == ["tasks/both_parts/acc"]


def test_the_documented_task(policies, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    files = re.findall(r"`(my_tasks/[\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["my_tasks/capitals.yaml", "my_tasks/capitals.jsonl"]
    monkeypatch.chdir(tmp_path)
    Path("my_tasks").mkdir()
    for name, text in files:
        Path(name).write_text(text)
    config = TasksConfig(names=("my_tasks/capitals.yaml",))
    assert list(task_inputs(config).values()) == [Path(name) for name, _ in files]
    found = measured(policies, tmp_path, names=config.names)
    assert found["tasks"]["capitals"]["n"] == 2
    assert found["policies"]["ppo"]["tasks/capitals/acc"] in (0, 0.5, 1)


def test_a_gpu_that_the_user_hides_is_not_used(policies, files, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = measured(policies, tmp_path, names=(files["letters"],), limit=2)
    assert found["policies"]["ppo"]["tasks/letters/acc"] == 1


@pytest.mark.slow
def test_the_stage_is_one_process_without_ranks(policies, files, tmp_path):
    """Launched as by `kedro run`, it achieves the same; its files are in the recipe."""
    config = TasksConfig(names=(files["letters"],))
    blocks = {"tasks": config, "evaluate": EvaluateConfig()}
    inputs = {"policy": as_artifact(Path(policies["ppo"])), **task_inputs(config)}
    export = StageRunner(RunContext(tmp_path / "work")).run(Job(TASKS, blocks, inputs, 3))
    ((task, metric, value, shares),) = json.loads((export / "tasks.json").read_text())[""]
    assert (task, metric, value, shares) == ("letters", "acc", 1.0, [1.0] * DOCUMENTS)
    manifest = Manifest.read(export)
    assert {"policy", "tasks.0", "tasks.1"} == manifest.inputs.keys() and manifest.ranks == 1
