"""The pipeline `dpo` by its command line, after a full run: real launches on two CPU ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_dpo(project, tmp_path_factory):
    """A run of `dpo` with a copy of the full run's work directories and a separate store."""
    own = type(project)(tmp_path_factory.mktemp("by_dpo"))
    shutil.copytree(project.root / "07_workspace", own.root / "07_workspace")
    own.output = own.kedro("--pipeline=dpo")
    return own


def test_the_stages_shared_with_ppo_are_reused(by_dpo):
    for stage in ("base_model", "split", "sft", "reward_model"):
        assert re.search(rf"{stage}: reused \w{{8}}, finished earlier", by_dpo.output)
    for stage in ("dpo", "evaluate_dpo"):
        assert f"{stage}: running" in by_dpo.output
    unused = "the others are for stages of ppo that are not in it"
    assert by_dpo.output.count(unused) == 1
    assert "ppo" not in re.sub(rf".*{unused}.*", "", by_dpo.output).lower()


def test_report_registry_and_runs_are_about_dpo(by_dpo):
    folder = by_dpo.newest("08_reporting/dpo_evaluation")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["candidate"] == "dpo"
    assert sorted(evaluation["policies"]) == ["dpo", "sft"]
    assert evaluation["policies"]["dpo"]["kl"] != evaluation["policies"]["sft"]["kl"]
    page = by_dpo.newest("08_reporting/dpo_evaluation.html").read_text()
    assert "<h1>DPO is" in page and "Accuracy on comparisons" in page
    assert "prefers DPO's answer to SFT's on" in " ".join(by_dpo.output.split())

    client = by_dpo.client()
    candidate = client.get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert Path(candidate.source) == by_dpo.newest("06_models/dpo_model")
    assert candidate.tags["rlhf.stage"] == "dpo"
    assert "eval/win_rate_lower" in client.get_run(candidate.run_id).data.metrics
    baseline = client.get_model_version_by_alias("rlhf-policy-tiny", "sft-baseline")
    assert Path(baseline.source) == by_dpo.newest("06_models/sft_model")
    assert "candidate = version 2, sft-baseline = version 1" in by_dpo.output
    registration = json.loads(by_dpo.newest("08_reporting/dpo_registration.json").read_text())
    assert registration["versions"] == {"sft": "1", "dpo": "2"}

    runs = {run.info.run_name.partition(" ")[0]: run for run in by_dpo.runs()}
    assert {"dpo", "evaluate_dpo"} <= runs.keys()
    assert not any("ppo" in name for name in runs)
