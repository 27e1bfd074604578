"""Pipelines of `dpo`, `kto` and `iterative_dpo`, whose launches are real."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import PROJECT

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.sample import IterativeDPOConfig
from rlhf_pipeline.pipelines.supervised import iterative_dpo
from rlhf_pipeline.runtime.manifest import Manifest, file_digest, verify
from rlhf_pipeline.stages.job import RunContext, StageListener
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.slow


def evaluation_of(own, policy):
    folder = own.newest(f"08_reporting/{policy}_evaluation")
    return json.loads((folder / "evaluation.json").read_text())


def test_dpo_reuses_the_shared_stages_and_all_that_is_made_is_about_dpo(project, tmp_path):
    """In a copy of the full run's work directories, with a separate store."""
    own = type(project)(tmp_path)
    shutil.copytree(project.root / "07_workspace", own.root / "07_workspace")
    output = own.kedro("--pipeline=dpo")
    for stage in ("base_model", "split", "sft", "reward_model"):
        assert re.search(rf"{stage}: reused \w{{8}}, finished earlier", output)
    for stage in ("dpo", "evaluate_dpo"):
        assert f"{stage}: running" in output
    unused = "the others are for stages of ppo that are not in it"
    assert output.count(unused) == 1
    assert "ppo" not in re.sub(rf".*{unused}.*", "", output).lower()

    evaluation = evaluation_of(own, "dpo")
    assert evaluation["candidate"] == "dpo"
    assert sorted(evaluation["policies"]) == ["dpo", "sft"]
    assert evaluation["policies"]["dpo"]["kl"] != evaluation["policies"]["sft"]["kl"]
    page = own.newest("08_reporting/dpo_evaluation.html").read_text()
    assert "<h1>DPO is" in page and "Accuracy on comparisons" in page
    assert "prefers DPO's answer to SFT's on" in " ".join(output.split())

    client = own.client()
    candidate = client.get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert Path(candidate.source) == own.newest("06_models/dpo_model")
    assert candidate.tags["rlhf.stage"] == "dpo"
    assert "eval/win_rate_lower" in client.get_run(candidate.run_id).data.metrics
    baseline = client.get_model_version_by_alias("rlhf-policy-tiny", "sft-baseline")
    assert Path(baseline.source) == own.newest("06_models/sft_model")
    assert "candidate = version 2, sft-baseline = version 1" in output
    registration = json.loads(own.newest("08_reporting/dpo_registration.json").read_text())
    assert registration["versions"] == {"sft": "1", "dpo": "2"}

    runs = {run.info.run_name.partition(" ")[0]: run for run in own.runs()}
    assert {"dpo", "evaluate_dpo"} <= runs.keys()
    assert not any("ppo" in name for name in runs)


def test_kto_learns_from_thumbs_beside_comparisons(new_project, tmp_path):
    """The thumbs are a file of TRL's unpaired preferences."""
    own = new_project(tmp_path / "data")
    thumbs = tmp_path / "thumbs.jsonl"
    rows = (
        {"prompt": f"Thing {n}?", "completion": f"It is {n}.", "label": n % 2 == 0}
        for n in range(40)
    )
    thumbs.write_text("\n".join(map(json.dumps, rows)))
    sources = [{"name": "synthetic", "samples": 600}, {"name": "files", "path": str(thumbs)}]
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    parameters = tmp_path / "conf" / "local" / "parameters.yml"
    parameters.write_text(json.dumps({"split": {"sources": sources}}))  # JSON is YAML
    conf = f"--conf-source={tmp_path / 'conf'}"
    output = own.kedro("--pipeline=kto", conf, params="launch.processes=1")
    assert "evaluate_kto: running" in output and "dpo: running" not in output
    with pa.ipc.open_stream(own.newest("03_split/split") / "kto" / "train.arrow") as stream:
        rows = stream.read_all().to_pylist()
    assert all(row["id"].startswith("thumbs.jsonl") for row in rows)
    assert {row["label"] for row in rows} == {True, False}
    verify(own.newest("06_models/kto_model"))
    (stage,) = own.recipes("kto")
    lines = [json.loads(line)["metrics"] for line in (stage / "metrics.jsonl").open()]
    # The policy starts as its reference: no KL, and every value is a half.
    first = lines[0]
    assert (first["kto/kl"], first["kto/loss"], first["kto/agreement"]) == (0.0, 0.5, 0.5)
    held_out = [line["validation/loss"] for line in lines if "validation/loss" in line]
    exported = json.loads((stage / "export" / "manifest.json").read_text())["metrics"]
    assert exported["validation/loss"] == min(held_out)
    assert sorted(evaluation_of(own, "kto")["policies"]) == ["kto", "sft"]
    candidate = own.client().get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert candidate.tags["rlhf.stage"] == "kto"
    page = own.newest("08_reporting/kto_evaluation.html").read_text()
    assert "<h1>KTO is" in page and "KL on mismatched pairs" in page


class Killed(BaseException):
    pass


class Launches(StageListener):
    """Notes what is launched; ends the driver when the program of the stage `kill` reports."""

    def __init__(self, kill=None):
        super().__init__()
        self.titles, self.kill = [], kill

    def stage_started(self, run):
        self.titles += [] if run.cached else [run.title]

    def stage_phase(self, run, heartbeat):
        if run.title == self.kill:
            raise Killed


@pytest.fixture
def run(prompts_and_policy, tmp_path):
    """Runs two rounds on 32 prompts with a random policy, which learns to be short."""
    source = tmp_path / "my.py"
    source.write_text("def short(prompts, responses): return [-len(one) for one in responses]\n")
    sample = {
        "n": 4, "rewards": [f"{source}:short"], "sampling": {"max_response_tokens": 8},
        "cut_answers": "keep",  # a random model hardly ever ends
    }  # fmt: skip
    config = {
        "rounds": 2, "sample": sample, "batch_size": 8, "epochs": 2, "evaluations": 1,
        "optimizer": {"learning_rate": 1e-2},
    }  # fmt: skip

    def run(workspace, kill=None, **changes):
        listener = Launches(kill)
        context = RunContext(tmp_path / workspace, LaunchConfig(processes=1), listener=listener)
        block = IterativeDPOConfig.model_validate(config | changes)
        arguments = *prompts_and_policy, None, None, block, 1
        return iterative_dpo(*arguments, StageRunner(context)), listener.titles

    return run


def first_step(export):
    with (export.parent / "metrics.jsonl").open() as file:
        return json.loads(file.readline())["metrics"]


def test_rounds_are_cached_jobs_and_a_killed_run_resumes_exactly(run, tmp_path):
    whole, launched = run("whole")
    rounds = [f"{stage} round {n}" for n in (1, 2) for stage in ("sample", "iterative_dpo")]
    assert launched == rounds
    assert run("whole") == (whole, [])
    samples = sorted((tmp_path / "whole" / "sample").iterdir(), key=os.path.getmtime)
    scores = [Manifest.read(each / "export").metrics for each in samples]
    assert scores[1]["sample/score"] > scores[0]["sample/score"]
    assert all(one["sample/chosen_score"] > one["sample/score"] for one in scores)
    lines = [json.loads(line) for line in (samples[1] / "export" / "samples.jsonl").open()]
    for line in [line for line in lines if line["chosen"] is not None]:
        best, worst = line["chosen"]
        assert line["scores"][best] == max(line["scores"]) > min(line["scores"])
        assert line["scores"][worst] == min(line["scores"])
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "iterative_dpo" / whole.parent.name)
    with pytest.raises(Killed):
        run("killed", kill="iterative_dpo round 2")
    resumed, launched = run("killed")
    assert launched == ["iterative_dpo round 2"]
    assert file_digest(resumed / "model.safetensors") == file_digest(whole / "model.safetensors")
    first, launched = run("whole", rounds=1)  # round 1 is the same for any number of rounds
    assert launched == [] and first != whole
    other, launched = run("whole", fixed_reference=True)
    assert launched == ["iterative_dpo round 2"]
    started = [first_step(folder)["iterative_dpo/loss"] for folder in (first, whole, other)]
    assert started[:2] == pytest.approx([math.log(2)] * 2)  # the policy is its own reference
    assert started[2] != pytest.approx(math.log(2), abs=1e-3)
