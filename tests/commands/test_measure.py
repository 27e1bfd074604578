"""`kedro rlhf plan --measure`: the forecast of a stage is for the stage that then runs."""

import re
from pathlib import Path

import pytest
from kedro.framework.startup import bootstrap_project
from rich.console import Console

from rlhf_pipeline.commands.command import opened
from rlhf_pipeline.commands.measure import real_config, short_run
from rlhf_pipeline.commands.miniature import Miniature
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.usage import forecast_of, usage_of

PROJECT = Path(__file__).parents[2]
ROWS = {"rows": 600, "tokens": {"prompt_ids": {"total": 9000}, "response_ids": {"total": 12000}}}
JUDGED = {"evaluate.judge_model": {"held_back": 0.5}, "evaluate.tasks": {"names": ["arc_easy"]}}

ROLLOUT = {
    "rollout_batch_size": 16, "minibatch_size": 16, "micro_batch_tokens": 256,
    "sampling": {"max_response_tokens": 12},
}  # fmt: skip
SAMPLE = {"n": 4, "sampling": {"max_response_tokens": 12}}


@pytest.fixture
def blocks_of(monkeypatch, tmp_path):
    """The blocks of a pipeline as JSON, by number of the short run, None for the project's own; and
    the miniature."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bootstrap_project(PROJECT)
    files = ("sft", "reward_model", "kto", "ppo")
    split = {f"{each}/train.arrow": ROWS for each in files} | {"evaluation/test.arrow": ROWS}
    monkeypatch.setattr(Miniature, "files", split)

    def blocks_of(pipeline, params):
        own = {"root": str(tmp_path)} | params
        configuration = {"env": "tiny", "conf_source": None, "runtime_params": {}}

        def load(further, names):
            with opened(PROJECT, configuration, own | further) as (_, ledger):
                return as_json({name: ledger.catalog.load(f"params:{name}") for name in names})

        with opened(PROJECT, configuration, own) as (_, ledger):
            status = Console().status("")
            given = ledger, configuration, PROJECT, pipeline, "measure", status
            miniature = Miniature(*given)
            runs = [short_run(miniature, number) for number in range(2)]
            names = [*miniature.blocks, "evaluate"]
            found = [load(further, names) for further in ({}, *runs)]
            return found, [real_config(each, miniature) for each in found]

    return blocks_of


@pytest.mark.parametrize(
    ("pipeline", "params"),
    [
        ("full", JUDGED | {"reward_model.gate": 0.6, "ppo.overlong_penalty": 1.0,
                           "ppo.overlong_buffer": 10}),
        ("grpo", {"sft": None, "grpo": ROLLOUT | {"responses_per_prompt": 4}}),
        ("iterative_dpo", {"iterative_dpo": {"batch_size": 16, "sample": SAMPLE}}),
        ("rejection", {"rejection": {"batch_size": 16, "sample": SAMPLE | {"prompts": 10_000}}}),
    ],
)  # fmt: skip
def test_short_runs_have_valid_parameters_and_stand_for_the_real_ones(blocks_of, pipeline, params):
    (own, *short), restored = blocks_of(pipeline, params)
    policy = "ppo" if pipeline == "full" else pipeline
    assert all(each[policy] != own[policy] for each in short)
    assert [each["evaluate"]["prompts"] for each in short] == sorted(
        each["evaluate"]["prompts"] for each in short
    )
    assert restored == [own] * 3


def forecasts(project, *stages):
    """Forecast and usage of the newest result of each stage."""
    workspace = project.root / "07_workspace"
    for stage in stages:
        newest = max(project.recipes(stage), key=lambda path: path.stat().st_mtime_ns)
        made = Manifest.read(newest / "export")
        yield forecast_of(workspace, made), usage_of(workspace, made)


@pytest.fixture
def own(new_project, tmp_path):
    """A project without results: other tests read those of `project`."""
    return new_project(tmp_path)


REJECTION = (
    "rejection.batch_size=16,rejection.micro_batch_tokens=256,rejection.sample.n=4,"
    "rejection.sample.sampling.max_response_tokens=12"
)


@pytest.mark.slow
@pytest.mark.cold  # a fork of the template has its memory, too
def test_a_short_run_forecasts_the_stage_that_then_runs(own):
    changed = "launch.processes=1"
    printed = own.kedro("--pipeline=sft", "--measure", command="rlhf plan", params=changed)
    assert re.search(r"^sft +\d+ s +\d+ s +\d+ s +0\.\d\d", printed, re.MULTILINE)
    assert not (own.root / ".measure").exists()
    own.kedro("--pipeline=sft", params=changed)
    ((forecast, usage),) = forecasts(own, "sft")
    least, expected, most = forecast.seconds
    assert 0 < least < expected < most and usage.seconds > 0
    assert usage.peak == pytest.approx(forecast.peak, rel=0.08)
    printed = own.kedro("--pipeline=sft", "--measure", command="rlhf plan", params=changed)
    assert re.search(r"^sft: finished, took \d+ s", printed, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "changed", "stages"),
    [
        ("full", "", ["sft", "reward_model", "ppo", "evaluate"]),
        ("rejection", REJECTION, ["sample", "rejection", "evaluate_rejection"]),
    ],
)
def test_each_stage_of_a_pipeline_has_a_forecast(own, pipeline, changed, stages):
    options = f"--pipeline={pipeline}", "--measure"
    own.kedro(*options, command="rlhf plan", params=changed)
    own.kedro(f"--pipeline={pipeline}", params=changed)
    for forecast, usage in forecasts(own, *stages):
        assert forecast is not None
        assert usage.peak == pytest.approx(forecast.peak, rel=0.08)


@pytest.mark.long
def test_what_would_fail_at_the_end_fails_in_the_short_run(own, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, responses, **_):\n"
        "    if len(prompts) > 2:\n"
        "        raise RuntimeError('the judge is away')\n"
        "    return [0.0] * len(prompts)\n"
    )
    changed = f"evaluate.judges=[{tmp_path}/judge.py:judge]"
    options = "--pipeline=full", "--measure"
    printed = own.kedro(*options, command="rlhf plan", params=changed, check=False)
    assert re.search(r"short run \d failed", printed) and "the judge is away" in printed
