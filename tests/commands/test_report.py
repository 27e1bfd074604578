"""The pages of evaluations and their list, on artifacts made by hand."""

import io
import json
import shutil
from types import SimpleNamespace

import pytest
from kedro.io import DataCatalog, MemoryDataset
from made_by_hand import REGISTRATION, answer, artifact, sealed
from rich.console import Console

from rlhf_pipeline.commands.report import report, runs
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries, json_digest
from rlhf_pipeline.verdict.answers import write_answers
from rlhf_pipeline.verdict.comparison import Standing, compare

NAMES = ("evaluation", "dpo_evaluation", "ppo_model")
STANDINGS = {"gold": Standing("independent"), "score": Standing("optimized", {"ppo": "rewards"})}
GREEDY = 0.7
"""The win rate of the evaluation at temperature 0, which has no KL."""


@pytest.fixture
def ledger(monkeypatch, tmp_path):
    """Makes the ledger of what pipelines have published."""
    pipeline = SimpleNamespace(all_outputs=lambda: {*NAMES})
    monkeypatch.setattr("rlhf_pipeline.kedro_run.artifacts.pipelines", {"all": pipeline})

    def ledger():
        data = {name: ArtifactDataset(filepath=str(tmp_path / name)) for name in NAMES}
        data["evaluation_page"] = PageDataset(filepath=str(tmp_path / "evaluation.html"))
        data["registration"] = PageDataset(filepath=str(tmp_path / "registration.json"))
        data["workspace"] = MemoryDataset(str(tmp_path / "workspace"))
        return Ledger(DataCatalog(data), tmp_path)

    return ledger


@pytest.fixture
def project(ledger, tmp_path, monkeypatch):
    """Publishes evaluations by version; `report` prints and opens one of them."""
    links = []

    class Project:
        opened = links

        def page(self, version="2026-01-01"):
            return tmp_path / "evaluation.html" / version / "evaluation.html"

        def publish(self, version):
            policy = artifact(
                tmp_path / "ppo_model" / version / "ppo_model", "ppo",
                [{"objective/score": float(step)} for step in range(3)],
            )  # fmt: skip
            folder = tmp_path / "evaluation" / version / "evaluation"
            folder.mkdir(parents=True)
            answers = {name: [answer(row, name) for row in range(9)] for name in ("sft", "ppo")}
            compared = compare(answers, EvaluateConfig(), STANDINGS)
            (folder / "evaluation.json").write_text(json.dumps(compared))
            write_answers(answers, folder)
            inputs = {"ppo_model": content_digest(policy)}
            return artifact(folder, "evaluate", inputs=inputs, candidate={"name": "ppo"})

        def report(self, name=None, show=True):
            console = Console(file=io.StringIO(), width=80)
            report.callback(ledger(), console, name, show, traces=False)
            return console.file.getvalue()

    monkeypatch.setattr("webbrowser.open", links.append)
    return Project()


def test_the_newest_page_is_made_and_opened(project):
    for version in ("2026-01-01", "2026-01-02"):
        project.publish(version)
    page = project.page("2026-01-02")
    assert project.report() == f"page: {page.as_uri()}\n"
    assert project.opened == [page.as_uri()]
    text = page.read_text()
    assert "No registration of this evaluation is here" in text
    assert "Score of the reward model" in text  # of the policy's training, found by its content


def test_a_page_is_made_again_only_if_it_or_its_evaluation_was_changed(project):
    evaluation, page = project.publish("2026-01-01"), project.page()
    project.report("2026-01-01", show=False)
    before, published = page.stat(), page.read_text()
    project.report("2026-01-01", show=False)
    assert (page.stat().st_ino, page.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    page.write_text(published.replace("%", "0%"))
    project.report("2026-01-01", show=False)
    assert page.read_text() == published
    (evaluation / "weights").write_text("other numbers")
    sealed(evaluation)
    project.report("2026-01-01", show=False)
    assert page.read_text() != published and project.opened == []


def test_the_page_of_a_changed_evaluation_is_not_shown(project):
    evaluation = project.publish("2026-01-01")
    project.report("2026-01-01", show=False)
    for name in ("answers.jsonl", "evaluation.json"):
        file = evaluation / name
        before = file.read_text()
        file.write_text(before.replace("sft", "ppo"))
        with pytest.raises(ArtifactError, match=f"{name} was changed after stage evaluate"):
            project.report("2026-01-01")
        file.write_text(before)
    assert project.opened == []


def test_the_registration_of_the_same_run_gives_the_verdict(project, tmp_path):
    folder = project.publish("2026-01-01")
    file = tmp_path / "registration.json" / "2026-01-01" / "registration.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(REGISTRATION | {"digest": json_digest(REGISTRATION)}))
    project.report(str(folder))
    assert "<h1>PPO is not promoted.</h1>" in project.page().read_text()


def of_an_earlier_version(evaluation):
    """Turn an evaluation into one without the standing of its judges, as by version 1.1."""
    compared = json.loads((evaluation / "evaluation.json").read_text())
    del compared["judges"]
    (evaluation / "evaluation.json").write_text(json.dumps(compared))
    return sealed(evaluation)


def test_an_evaluation_of_an_earlier_version_is_named_as_that(project):
    folder = of_an_earlier_version(project.publish("2026-01-01"))
    fix = "Fix: compare its policies again by `kedro rlhf evaluate BASELINE CANDIDATE"
    with pytest.raises(ArtifactError, match=f"{folder}: found an evaluation by an earlier.*{fix}`"):
        project.report()


def test_a_policy_stands_for_its_newest_published_evaluation(project, tmp_path):
    """Not for one of an earlier version, nor for the newer copy in the workspace, which has no
    registration."""
    of_an_earlier_version(project.publish("2026-01-01"))
    evaluation = project.publish("2026-01-02")
    shutil.copytree(evaluation, tmp_path / "workspace" / "evaluate" / "0123" / "export")
    policy = tmp_path / "ppo_model" / "2026-01-01" / "ppo_model"
    assert "/evaluation.html/2026-01-02/evaluation.html" in project.report(str(policy))


def test_without_an_evaluation_the_message_names_the_fix(project, shown, tmp_path):
    (line,) = shown()
    assert " ".join(line) == "No evaluation is published here. Fix: `kedro run --pipeline=full`"
    with pytest.raises(ArtifactError, match=r"found no published evaluation\. Fix: `kedro run"):
        project.report()
    folder = artifact(tmp_path / "model", "ppo", [{"objective/score": 1.0}])
    with pytest.raises(ArtifactError, match="found no evaluation of it here"):
        project.report(str(folder))


@pytest.fixture
def shown(ledger, tmp_path):
    """Publishes evaluations by (data set, version, fingerprint, win rate); returns the list."""

    def shown(*evaluations):
        for name, version, fingerprint, rate in evaluations:
            folder = tmp_path / name / version / name
            folder.mkdir(parents=True)
            candidate = "dpo" if name.startswith("dpo") else "ppo"
            compared = {
                "candidate": candidate,
                "judge": "gold",
                "judges": {"gold": {"state": "independent", "by": {}}},
                "win_rates": {"gold": {"rate": rate, "lower": rate - 0.1, "upper": rate + 0.1}},
                "policies": {candidate: {} if rate == GREEDY else {"kl": 1.5}},
            }
            (folder / "evaluation.json").write_text(json.dumps(compared))
            Manifest("evaluate", fingerprint, 7, {}, {}, {}, {}, file_entries(folder)).write(folder)
        console = Console(file=io.StringIO(), width=140)
        shown.printed = console.file
        runs.callback(ledger(), console)
        return [line.split() for line in console.file.getvalue().splitlines()]

    return shown


def test_each_evaluation_is_listed_once_by_its_newest_version(shown):
    header, *lines = shown(
        ("evaluation", "2026-01-01", "aaaa1111", 0.6),
        ("dpo_evaluation", "2026-01-02", "bbbb2222", GREEDY),
        ("evaluation", "2026-01-03", "aaaa1111", 0.6),  # reused by another run
    )
    assert header[0] == "version"
    assert [" ".join(line) for line in lines] == [
        "2026-01-02 dpo 7 70.0% [60.0%, 80.0%] gold -",
        "2026-01-03 ppo 7 60.0% [50.0%, 70.0%] gold 1.50",
    ]


def test_a_changed_evaluation_is_named_and_the_others_are_listed(shown, tmp_path):
    shown(("evaluation", "2026-01-01", "aaaa1111", 0.6), ("dpo_evaluation", "2026-01-02", "b", 0.5))
    changed = tmp_path / "evaluation" / "2026-01-01" / "evaluation" / "evaluation.json"
    changed.write_text(changed.read_text().replace("0.6", "0.9"))
    with pytest.raises(ArtifactError, match=f"{changed} was changed after stage evaluate") as error:
        shown()
    assert str(error.value).count("\n") == 0
    _, *lines = shown.printed.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["2026-01-02", "dpo"]]
    of_an_earlier_version(changed.parent)  # which is listed
    _, *lines = shown()
    assert [line[:2] for line in lines] == [["2026-01-01", "ppo"], ["2026-01-02", "dpo"]]
