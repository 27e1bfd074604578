"""Tasks of the harness in local files; one of two policies solves them by construction.

Two real ranks run this file as a program under DeepSpeed's launcher.
"""

import json
import re
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from local_tasks import DOCUMENTS, solutions, write_tasks
from strict_device import StrictDevice

from rlhf_pipeline.config.evaluate import EvaluateConfig, TasksConfig, task_inputs
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.answering import Setup, with_model
from rlhf_pipeline.models.loading import load_policy, load_tokenizer

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")

POLICIES = ("sft", "ppo")


def setup_of(policy: Path, world: World, zero_stage: int = 0) -> Setup:
    return Setup(
        seed=3,
        config=EvaluateConfig(zero_stage=zero_stage),
        contract=TokenContract.read(policy),
        tokenizer=load_tokenizer(policy),
        rows=np.arange(0),
        prompts={},
        trust=False,
        world=world,
    )


def measured(policies: dict[str, str], config: TasksConfig, setup: Setup) -> dict:
    from rlhf_pipeline.evaluation.tasks import Tasks

    tasks = Tasks(config, setup)
    for name in reversed(POLICIES):  # the order of an evaluation
        with_model(load_policy, Path(policies[name]), setup, partial(tasks.do, name=name))
    evaluation = {"candidate": "ppo", "policies": {name: {} for name in POLICIES}}
    if setup.world.rank == 0:
        tasks.add_to(evaluation)
    return evaluation


def main(argument: dict, folder: Path) -> None:
    from rlhf_pipeline.evaluation.tasks import SharedPolicy

    world, found, answer = join(0, timeout_s=600), {}, SharedPolicy.generate_until
    asked: list[int] = []

    def recorded(self, requests):
        asked.append(len({request.args[0] for request in requests}))
        return answer(self, requests)

    SharedPolicy.generate_until = recorded
    config = TasksConfig(names=argument["names"], batch_size_per_gpu=2)
    for stage in (0, 3):
        setup = setup_of(Path(argument["policies"]["sft"]), world, stage)
        found[str(stage)] = measured(argument["policies"], config, setup)
    counts = world.gather(asked)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
        (folder / "asked.json").write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def policies(make_model):
    """The candidate has unused rows in its vocabulary; one of them is often the most likely."""
    return {"sft": make_model("llama", seed=1), "ppo": make_model("qwen2", 2, vocabulary=360)}


@pytest.fixture(scope="module")
def files(policies, tmp_path_factory):
    """The tasks that the candidate solves."""
    return write_tasks(tmp_path_factory.mktemp("tasks"), policies["ppo"])


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*arguments):
        raise OSError("the test has no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def rights(policies):
    """By hand: whether SFT's letter and SFT's answer are the candidate's, for each question."""
    pairs = list(zip(*(solutions(policies[name]) for name in POLICIES), strict=True))
    return [[a[field] == b[field] for a, b in pairs] for field in ("letter", "words")]


@pytest.mark.usefixtures("_no_network")
def test_the_policy_that_solves_the_tasks_is_better(policies, files, world):
    config = TasksConfig(names=(files["letters"], files["words"]), batch_size_per_gpu=4)
    found = measured(policies, config, setup_of(policies["sft"], world))
    letters, words = (sum(right) / DOCUMENTS for right in rights(policies))
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


def test_policies_get_the_same_examples_and_a_limit_holds(policies, files, world, monkeypatch):
    from rlhf_pipeline.evaluation.tasks import SharedPolicy

    asked, answer = [], SharedPolicy.generate_until

    def recorded(self, requests):
        asked.append([request.args[0] for request in requests])
        return answer(self, requests)

    monkeypatch.setattr(SharedPolicy, "generate_until", recorded)
    config = TasksConfig(names=(files["words"],), limit=4, few_shot=2)
    found = measured(policies, config, setup_of(policies["sft"], world))
    assert found["tasks"]["words"]["n"] == 4
    first, second = asked
    assert first == second and len({*first}) == 4
    # The chat template of the tokenizer, with two solved examples as turns.
    assert all(text.count("Human:") == 3 and text.endswith("Assistant:") for text in first)


def test_a_metric_that_is_no_share_is_reported_and_not_compared(policies, files, world, tmp_path):
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
    found = measured(policies, TasksConfig(names=tuple(names)), setup_of(policies["sft"], world))
    metrics = found["policies"]["sft"]
    assert metrics.keys() == {"tasks/median/acc", "tasks/text/word_perplexity", "tasks/wrong/acc"}
    assert metrics["tasks/text/word_perplexity"] > 1
    assert found["tasks"] == {}


def test_a_group_with_metrics_replaces_its_tasks(policies, files, world, tmp_path, monkeypatch):
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
    config = TasksConfig(names=("both parts",))
    found = measured(policies, config, setup_of(policies["sft"], world))
    assert [*found["tasks"]] == ["both parts"]
    assert found["tasks"]["both parts"]["n"] == 2 * DOCUMENTS
    names = [name for name in found["policies"]["ppo"] if not name.endswith(("_lower", "_upper"))]
    assert names == ["tasks/both_parts/acc"]


def test_a_task_that_cannot_be_loaded_is_named(policies, files, world, tmp_path):
    from rlhf_pipeline.evaluation.tasks import Tasks

    broken = Path(files["letters"]).read_text().replace("rows.jsonl", "no_rows.jsonl")
    (tmp_path / "broken.yaml").write_text(broken)
    setup = setup_of(policies["sft"], world)
    with pytest.raises(StageError, match=r"the harness did not load .*broken\.yaml: .*no_rows"):
        Tasks(TasksConfig(names=(str(tmp_path / "broken.yaml"),)), setup)
    many = replace(setup, world=replace(world, size=3))
    message = "found 2 documents of letters, expected one for each of 3 ranks"
    with pytest.raises(StageError, match=message):
        Tasks(TasksConfig(names=(files["letters"],), limit=2), many)


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_no_tensor_is_in_the_wrong_memory(policies, files, world, zero_stage):
    """Otherwise the device refuses; results equal those on the CPU."""
    config = TasksConfig(names=tuple(files.values()))
    on_cpu = measured(policies, config, setup_of(policies["sft"], world, zero_stage))
    with StrictDevice():
        on_device = setup_of(policies["sft"], join(0, timeout_s=600), zero_stage)
        assert on_device.world.device != world.device
        assert measured(policies, config, on_device) == on_cpu


def test_the_documented_task(policies, world, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    files = re.findall(r"`(my_tasks/[\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["my_tasks/capitals.yaml", "my_tasks/capitals.jsonl"]
    monkeypatch.chdir(tmp_path)
    Path("my_tasks").mkdir()
    for name, text in files:
        Path(name).write_text(text)
    config = TasksConfig(names=("my_tasks/capitals.yaml",))
    assert list(task_inputs(config).values()) == [Path(name) for name, _ in files]
    found = measured(policies, config, setup_of(policies["sft"], world))
    assert found["tasks"]["capitals"]["n"] == 2
    assert found["policies"]["ppo"]["tasks/capitals/acc"] in (0, 0.5, 1)


@pytest.mark.long
def test_two_ranks_share_the_documents_of_whole_and_of_sharded_policies(
    policies, files, world, on_ranks, monkeypatch
):
    names = [files["letters"], files["words"], files["text"]]
    whole = measured(policies, TasksConfig(names=names), setup_of(policies["sft"], world))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = on_ranks(__file__, {"policies": policies, "names": names})
    for stage, evaluation in json.loads((folder / "found.json").read_text()).items():
        for policy in POLICIES:
            expected = pytest.approx(whole["policies"][policy], rel=1e-4)
            assert evaluation["policies"][policy] == expected, stage
        assert evaluation["tasks"]["words"] == pytest.approx(whole["tasks"]["words"])
    assert json.loads((folder / "asked.json").read_text()) == [[5] * 4, [4] * 4]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
