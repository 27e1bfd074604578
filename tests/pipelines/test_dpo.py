"""The pipeline `dpo` by its command line, after a full run: real launches on two CPU ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.pipelines.supervised import DPO as SPEC
from rlhf_pipeline.runtime.manifest import verify
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_dpo(project, tmp_path_factory):
    """A run of `dpo` with a copy of the full run's work directories and a separate store."""
    own = type(project)(tmp_path_factory.mktemp("by_dpo"))
    shutil.copytree(project.root / "07_workspace", own.root / "07_workspace")
    own.output = own.kedro("--pipeline=dpo")
    return own


def metrics_of(stage: Path) -> list[dict[str, float]]:
    return [
        json.loads(line)["metrics"] for line in (stage / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_stages_shared_with_ppo_are_reused(by_dpo):
    for stage in ("base_model", "split", "sft", "reward_model"):
        assert re.search(rf"{stage}: reused \w{{8}}, finished earlier", by_dpo.output)
    for stage in ("dpo", "evaluate_dpo"):
        assert f"{stage}: running" in by_dpo.output
    unused = "the others are for stages of ppo that are not in it"
    assert by_dpo.output.count(unused) == 1
    assert "ppo" not in re.sub(rf".*{unused}.*", "", by_dpo.output).lower()


def test_the_policy_is_published_and_loads_in_transformers(by_dpo):
    from transformers import AutoModelForCausalLM

    folder = by_dpo.newest("06_models/dpo_model")
    verify(folder)
    assert (folder / "MLmodel").is_file()
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_the_first_loss_is_log_2_at_chance_accuracy(by_dpo):
    """The policy equals the reference: every margin is 0, every pair a tie."""
    first = metrics_of(by_dpo.recipes("dpo")[0])[0]
    assert first["dpo/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert first["dpo/accuracy"] == 0.5
    assert (first["dpo/margin"], first["dpo/chosen_reward"], first["dpo/rejected_reward"]) == (
        0.0,
        0.0,
        0.0,
    )


def test_the_exported_model_has_the_lowest_held_out_loss(by_dpo):
    stage = by_dpo.recipes("dpo")[0]
    held_out = [line["validation/loss"] for line in metrics_of(stage) if "validation/loss" in line]
    assert len(held_out) == 2
    exported = json.loads((stage / "export" / "manifest.json").read_text())["metrics"]
    assert exported["validation/loss"] == min(held_out)
    assert 0 <= exported["validation/accuracy"] <= 1


def test_the_report_is_about_dpo(by_dpo):
    folder = by_dpo.newest("08_reporting/dpo_evaluation")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["candidate"] == "dpo"
    assert sorted(evaluation["policies"]) == ["dpo", "sft"]
    assert evaluation["policies"]["dpo"]["kl"] != evaluation["policies"]["sft"]["kl"]
    page = by_dpo.newest("08_reporting/dpo_evaluation.html").read_text()
    assert "<h1>DPO is" in page and "Accuracy on comparisons" in page
    assert "prefers DPO's answer to SFT's on" in " ".join(by_dpo.output.split())


def test_the_registry_has_dpo_as_the_candidate(by_dpo):
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


def test_mlflow_calls_the_runs_by_their_stages(by_dpo):
    runs = {run.info.run_name.partition(" ")[0]: run for run in by_dpo.runs()}
    assert {"dpo", "evaluate_dpo"} <= runs.keys()
    assert not any("ppo" in name for name in runs)


@pytest.mark.long
def test_one_rank_and_two_ranks_start_alike(by_dpo, tmp_path):
    """The losses of the first steps agree to 1e-5 on the same global batches."""
    done = json.loads((by_dpo.recipes("dpo")[0] / "job.json").read_text())
    inputs = {name: Path(path) for name, path in done["inputs"].items()}
    job = Job(SPEC, {"dpo": DPOConfig.model_validate(done["config"]["dpo"])}, inputs, done["seed"])
    StageRunner(RunContext(tmp_path, LaunchConfig(processes=1))).run(job)
    one, two = metrics_of(next((tmp_path / "dpo").iterdir())), metrics_of(by_dpo.recipes("dpo")[0])
    for step in (0, 1, 2):
        assert one[step]["dpo/loss"] == pytest.approx(two[step]["dpo/loss"], rel=1e-5)
    assert one[2]["dpo/margin"] != 0.0
    assert one[2]["dpo/margin"] == pytest.approx(
        two[2]["dpo/margin"], rel=1e-3
    )  # a small difference of large sums
