"""The list of evaluations."""

import io
import json

import pytest
from kedro.io import DataCatalog
from rich.console import Console

from rlhf_pipeline.commands.runs import runs
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.runtime.manifest import Manifest, file_entries

NAMES = ("evaluation", "dpo_evaluation", "simpo_evaluation")


@pytest.fixture
def shown(tmp_path):
    """Publishes evaluations by (data set, version, fingerprint, win rate); returns the list."""

    def shown(*evaluations):
        for name, version, fingerprint, rate in evaluations:
            folder = tmp_path / name / version / name
            folder.mkdir(parents=True)
            candidate = "dpo" if name.startswith("dpo") else "ppo"
            compared = {
                "candidate": candidate,
                "judge": "gold",
                "win_rates": {"gold": {"rate": rate, "lower": rate - 0.1, "upper": rate + 0.1}},
                "policies": {candidate: {"kl": 1.5}},
            }
            (folder / "evaluation.json").write_text(json.dumps(compared))
            Manifest("evaluate", fingerprint, 7, {}, {}, {}, {}, file_entries(folder)).write(folder)
        catalog = DataCatalog(
            {name: ArtifactDataset(filepath=str(tmp_path / name)) for name in NAMES}
        )
        console = Console(file=io.StringIO(), width=140)
        runs(catalog, console)
        return [line.split() for line in console.file.getvalue().splitlines()]

    return shown


def test_each_evaluation_is_listed_once_by_its_newest_version(shown, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.commands.artifacts.pipelines", {"all": Outputs()})
    header, *lines = shown(
        ("evaluation", "2026-01-01", "aaaa1111", 0.6),
        ("dpo_evaluation", "2026-01-02", "bbbb2222", 0.5),
        ("evaluation", "2026-01-03", "aaaa1111", 0.6),  # reused by another run
    )
    assert header[0] == "version"
    assert [" ".join(line) for line in lines] == [
        "2026-01-02 dpo 7 50.0% [40.0%, 60.0%] gold 1.50",
        "2026-01-03 ppo 7 60.0% [50.0%, 70.0%] gold 1.50",
    ]


def test_without_an_evaluation_the_list_says_how_to_get_one(shown, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.commands.artifacts.pipelines", {"all": Outputs()})
    assert " ".join(shown()[0]) == (
        "No evaluation is published here. Fix: `kedro run --pipeline=full`"
    )


class Outputs:
    """A pipeline by its outputs."""

    def all_outputs(self):
        return {*NAMES, "ppo_model"}
