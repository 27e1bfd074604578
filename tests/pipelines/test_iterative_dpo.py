"""The node `iterative_dpo`: real launches on one CPU rank."""

import json
import math
import shutil

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.sample import IterativeDPOConfig
from rlhf_pipeline.pipelines.supervised import iterative_dpo
from rlhf_pipeline.runtime.manifest import Manifest, file_digest
from rlhf_pipeline.stages.job import RunContext, StageListener
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.slow


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
    config = {
        "rounds": 2,
        "sample": {
            "n": 4,
            "rewards": [f"{source}:short"],
            "cut_answers": "keep",  # a random model hardly ever ends
            "sampling": {"max_response_tokens": 8},
        },
        "batch_size": 8,
        "epochs": 2,
        "evaluations": 1,
        "optimizer": {"learning_rate": 1e-2},
    }

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
    samples = sorted(
        (tmp_path / "whole" / "sample").iterdir(), key=lambda path: path.stat().st_mtime
    )
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
