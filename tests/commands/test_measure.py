"""`kedro rlhf plan --measure`: the forecast of a stage is for the stage that then runs."""

import re

import pytest

from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.usage import forecast_of, usage_of


def forecasts(project, *stages):
    """Forecast and usage of the newest result of each stage."""
    workspace = project.root / "07_workspace"
    for stage in stages:
        newest = max(project.recipes(stage), key=lambda path: path.stat().st_mtime_ns)
        made = Manifest.read(newest / "export")
        yield forecast_of(workspace, made), usage_of(workspace, made)


@pytest.mark.slow
def test_a_short_run_forecasts_the_stage_that_then_runs(project):
    changed = "sft.optimizer.learning_rate=0.0007"
    printed = project.kedro("--pipeline=sft", "--measure", command="rlhf plan", params=changed)
    assert re.search(r"^sft +\d+ s +\d+ s +\d+ s +0\.\d\d", printed, re.MULTILINE)
    assert not (project.root / "measure").exists()
    project.kedro("--pipeline=sft", params=changed)
    ((forecast, usage),) = forecasts(project, "sft")
    least, expected, most = forecast.seconds
    assert least < expected < most and usage.seconds / 3 < expected < 3 * usage.seconds
    assert usage.peak == pytest.approx(forecast.peak, rel=0.08)
    printed = project.kedro("--pipeline=sft", "--measure", command="rlhf plan", params=changed)
    assert re.search(r"^sft: finished, took \d+ s", printed, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "stages"),
    [
        ("full", ["sft", "reward_model", "ppo", "evaluate"]),
        ("rejection", ["sample", "rejection", "evaluate_rejection"]),
    ],
)
def test_each_stage_of_a_pipeline_has_a_forecast(project, pipeline, stages):
    changed = "sft.optimizer.learning_rate=0.0008"
    options = f"--pipeline={pipeline}", "--measure"
    project.kedro(*options, command="rlhf plan", params=changed)
    project.kedro(f"--pipeline={pipeline}", params=changed)
    for forecast, usage in forecasts(project, *stages):
        assert forecast is not None
        assert usage.peak == pytest.approx(forecast.peak, rel=0.08)


@pytest.mark.long
def test_what_would_fail_at_the_end_fails_in_the_short_run(project, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, responses, **_):\n"
        "    if len(prompts) > 2:\n"
        "        raise RuntimeError('the judge is away')\n"
        "    return [0.0] * len(prompts)\n"
    )
    changed = f"evaluate.judges=[{tmp_path}/judge.py:judge]"
    options = "--pipeline=full", "--measure"
    printed = project.kedro(*options, command="rlhf plan", params=changed, check=False)
    assert "plan --measure failed" in printed and "the judge is away" in printed
