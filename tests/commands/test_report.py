"""The page of an evaluation by the command, on artifacts made by hand."""

import io
import json
import shutil

import pytest
from kedro.io import DataCatalog, MemoryDataset
from made_by_hand import REGISTRATION, answer, artifact
from rich.console import Console

from rlhf_pipeline.commands import report as command
from rlhf_pipeline.commands.report import report
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.evaluation.comparison import compare, write_answers
from rlhf_pipeline.runtime.manifest import content_digest

NAMES = ("evaluation", "ppo_model")


class Outputs:
    """A pipeline by its outputs."""

    def all_outputs(self):
        return set(NAMES)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Publishes evaluations by version; `report` prints and opens one of them."""
    monkeypatch.setattr("rlhf_pipeline.commands.artifacts.pipelines", {"all": Outputs()})

    links = []

    class Project:
        opened = links

        def publish(self, version):
            policy = artifact(
                tmp_path / "ppo_model" / version / "ppo_model", "ppo",
                [{"objective/score": float(step)} for step in range(3)],
            )  # fmt: skip
            folder = tmp_path / "evaluation" / version / "evaluation"
            folder.mkdir(parents=True)
            answers = {name: [answer(row, name) for row in range(9)] for name in ("sft", "ppo")}
            compared = compare(answers, EvaluateConfig(), {"score"})
            (folder / "evaluation.json").write_text(json.dumps(compared))
            write_answers(answers, folder)
            inputs = {"ppo_model": content_digest(policy)}
            return artifact(folder, "evaluate", inputs=inputs, candidate={"name": "ppo"})

        def report(self, name=None, show=True):
            datasets = {each: ArtifactDataset(filepath=str(tmp_path / each)) for each in NAMES}
            page = PageDataset(filepath=str(tmp_path / "evaluation.html"))
            registration = PageDataset(filepath=str(tmp_path / "registration.json"))
            workspace = MemoryDataset(str(tmp_path / "workspace"))
            others = {"evaluation_page": page, "registration": registration}
            catalog = DataCatalog(datasets | others | {"workspace": workspace})
            console = Console(file=io.StringIO(), width=80)
            report(name, catalog, console, tmp_path, show=show)
            return console.file.getvalue()

    monkeypatch.setattr(command.webbrowser, "open", links.append)
    return Project()


def test_the_newest_page_is_made_and_opened(project, tmp_path):
    for version in ("2026-01-01", "2026-01-02"):
        project.publish(version)
    page = tmp_path / "evaluation.html" / "2026-01-02" / "evaluation.html"
    assert project.report() == f"page: {page.as_uri()}\n"
    assert project.opened == [page.as_uri()]
    text = page.read_text()
    assert "No registration of this evaluation is here" in text
    assert "Score of the reward model" in text  # of the policy's training, found by its content


def test_a_page_that_is_there_is_not_made_again(project, tmp_path):
    project.publish("2026-01-01")
    page = tmp_path / "evaluation.html" / "2026-01-01" / "evaluation.html"
    page.parent.mkdir(parents=True)
    page.write_text("published")
    project.report("2026-01-01", show=False)
    assert page.read_text() == "published"
    assert project.opened == []


def test_the_registration_of_the_same_run_gives_the_verdict(project, tmp_path):
    folder = project.publish("2026-01-01")
    file = tmp_path / "registration.json" / "2026-01-01" / "registration.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(REGISTRATION))
    project.report(str(folder))
    page = tmp_path / "evaluation.html" / "2026-01-01" / "evaluation.html"
    assert "<h1>PPO is not promoted.</h1>" in page.read_text()


def test_the_page_of_a_copied_folder_is_beside_it(project, tmp_path):
    copied = project.publish("2026-01-01").rename(tmp_path / "copied")
    printed = project.report(str(copied))
    assert printed == f"page: {(tmp_path / 'copied.html').as_uri()}\n"


def test_a_policy_stands_for_its_newest_published_evaluation(project, tmp_path):
    """Not for the newer copy of it in the workspace, which has no registration."""
    evaluation = project.publish("2026-01-01")
    shutil.copytree(evaluation, tmp_path / "workspace" / "evaluate" / "0123" / "export")
    folder = tmp_path / "ppo_model" / "2026-01-01" / "ppo_model"
    assert "/evaluation.html/2026-01-01/evaluation.html" in project.report(str(folder))


def test_without_an_evaluation_the_message_names_the_fix(project, tmp_path):
    with pytest.raises(ArtifactError, match=r"found no published evaluation\. Fix: `kedro run"):
        project.report()
    folder = artifact(tmp_path / "model", "ppo", [{"objective/score": 1.0}])
    with pytest.raises(ArtifactError, match="found no evaluation of it here"):
        project.report(str(folder))
