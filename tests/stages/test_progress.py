"""The progress display on a terminal and in a log."""

import io
from pathlib import Path

from rich.console import Console

from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.progress import ProgressDisplay


def run(cached=False):
    directory = Path("ws/sft/abc")
    job = ("sft", "abcdef0123456789", 1, {}, {}, {}, directory, 60.0)
    return StageRun(*job, cached=cached, headline_metrics=("sft/loss",))


def record(step, seconds, **metrics):
    return {"step": step, "total_steps": 10, "time": 1000.0 + seconds, "metrics": metrics}


def show(monkeypatch, *calls):
    monkeypatch.setattr("rlhf_pipeline.stages.progress.LINE_EVERY_S", 0.0)
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, width=200))
    for call in calls:
        call(display)
    return output.getvalue().splitlines()


def test_lines_show_headline_metrics_and_the_time_left(monkeypatch):
    """Step 1 to 4 in 6 s is 2 s a step, so 6 steps take 12 s. The start-up does not count."""
    lines = show(
        monkeypatch,
        lambda d: d.stage_started(run()),
        lambda d: d.stage_metrics(run(), [record(1, 0, **{"sft/loss": 2.0, "sft/tokens": 5.0})]),
        lambda d: d.stage_metrics(run(), [record(4, 6, **{"sft/loss": 1.5})]),
        lambda d: d.stage_ended(run(), "FINISHED", {}),
    )
    assert lines[0] == "sft: running as abcdef01 in ws/sft/abc"
    assert lines[1] == "sft: step 1/10  sft/loss 2.000"
    assert lines[2] == "sft: step 4/10  sft/loss 1.500  12 s left"
    assert lines[3].startswith("sft: finished in 0 s  sft/loss 1.500")


def test_a_reused_stage_prints_one_line(monkeypatch):
    lines = show(
        monkeypatch,
        lambda d: d.stage_started(run(cached=True)),
        lambda d: d.stage_ended(run(cached=True), "FINISHED", {}),
    )
    assert lines == ["sft: reused abcdef01, finished earlier"]


def test_a_source_shows_its_name_and_an_unknown_number_of_rows(monkeypatch):
    config = {"source": {"name": "files"}}
    directory = Path("ws/source/abc")
    reading = StageRun("source", "abcdef0123456789", 0, config, {}, {}, directory, 60.0)
    rows = [
        {"step": step, "total_steps": None, "time": 1000.0 + step, "metrics": {}}
        for step in (100, 300)
    ]
    lines = show(
        monkeypatch, *(lambda d, row=row: d.stage_metrics(reading, [row]) for row in rows),
        lambda d: d.stage_started(reading),
    )  # fmt: skip
    assert lines == [
        "source files: step 100/?",
        "source files: step 300/?",
        "source files: running as abcdef01 in ws/source/abc",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, width=120, force_terminal=True))
    display.stage_started(run())
    display.stage_metrics(run(), [record(4, 6, **{"sft/loss": 1.5})])
    display._progress.refresh()
    display.stage_ended(run(), "FAILED", {})
    assert (
        "4/10" in output.getvalue()
        and "sft/loss 1.500" in output.getvalue()
        and "failed in" in output.getvalue()
    )
