"""The progress display on a terminal and in a log."""

import io
import logging
import pydoc
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyte
import pytest
import yaml
from rich.console import Console

from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.progress import ProgressDisplay, StageProgress

PROJECT = Path(__file__).parents[2]


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


def test_a_log_names_the_reward_that_scores(monkeypatch):
    scoring = Heartbeat(0, 1, phase="scoring", step=1, scorer="length_reward")
    lines = show(
        monkeypatch,
        lambda d: d.stage_phase(run(), scoring),
        lambda d: d.stage_metrics(run(), [record(1, 0, **{"sft/loss": 2.0})]),
        lambda d: d.stage_phase(run(), Heartbeat(0, 1, phase="update", step=1)),
        lambda d: d.stage_metrics(run(), []),
    )
    assert lines == [
        "sft: step 1/10  scoring: length_reward  sft/loss 2.000",
        "sft: step 1/10  sft/loss 2.000",
    ]


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


def line(width, progress):
    output = io.StringIO()
    Console(file=output, width=width).print(progress)
    (text,) = output.getvalue().splitlines()
    return text


def training(**fields):
    values = {
        "step": 174,
        "total": 263,
        "metrics": {"reward_model/loss": 0.404, "validation/accuracy": 0.723},
        "first": (1, 0.0),
        "last": (174, 130.0),
        "started": time.monotonic() - 75,
    }
    return StageProgress("reward_model", "update", **values | fields)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_stage_step_and_times_fit_every_terminal(width):
    text = line(width, training())
    assert len(text) <= width
    assert text.startswith("reward_model \N{BOX DRAWINGS HEAVY HORIZONTAL}")
    assert " 174/263 1:15 1:07 left" in text


def test_a_wider_terminal_shows_more():
    assert "update" not in line(50, training())
    assert "update" in line(60, training()) and "loss" not in line(60, training())
    assert "reward_model/loss 0.404" in line(80, training())
    assert "validation/accuracy 0.723" in line(140, training())
    assert line(40, training()) == "reward_model 174/263 1:15 1:07 left"


def test_before_the_first_step_the_line_says_what_the_program_does():
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, width=80, force_terminal=True))
    display.stage_started(run())
    assert "sft 0:00 importing libraries" in line(80, display._progress)
    display.stage_phase(run(), Heartbeat(0, 1))
    assert "sft 0:00 loading models and data" in line(80, display._progress)
    display.stage_phase(run(), Heartbeat(0, 1, phase="update", step=1))
    assert "sft 0:00 update" in line(80, display._progress)
    scoring = Heartbeat(0, 1, phase="scoring", step=1, scorer="length_reward")
    display.stage_phase(run(), scoring)
    assert "sft 0:00 scoring: length_reward" in line(80, display._progress)
    display.stage_ended(run(), "FAILED", {})


def test_after_a_resume_the_steps_of_the_earlier_attempt_do_not_count_as_speed(monkeypatch):
    """Steps 6 to 8 in 4 s is 2 s a step, so 2 steps take 4 s. Steps 1 to 5 were long ago."""
    resumed = replace(run(), resume_from=5)
    old = [record(step, step - 9000) for step in range(1, 6)]
    progress = StageProgress("sft", "update", step=5).after(old, resumed)
    assert (progress.step, progress.left_s) == (5, None)
    progress = progress.after([record(6, 0)], resumed).after([record(8, 4)], resumed)
    assert progress.left_s == 4.0
    assert progress.after([record(7, 5)], resumed).step == 8  # never backwards


def test_a_waiting_run_shows_the_progress_of_the_other_one(monkeypatch):
    lines = show(
        monkeypatch,
        lambda d: d.stage_waiting(run(), []),
        lambda d: d.stage_waiting(run(), [record(4, 6, **{"sft/loss": 1.5})]),
        lambda d: d.stage_started(run(cached=True)),
    )
    assert lines == [
        "sft: waiting for another run: step ?",
        "sft: waiting for another run: step 4/10  sft/loss 1.500",
        "sft: reused abcdef01, finished earlier",
    ]


def test_the_live_line_is_gone_after_an_interruption():
    """One line for the start and one for the end are left on a terminal of 80 columns."""
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True)
    display = ProgressDisplay(console)
    display.stage_started(run())
    display.stage_metrics(run(), [record(4, 6, **{"sft/loss": 1.5})])
    display._live.refresh()
    display.stage_ended(run(), "KILLED", {})
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(output.getvalue().replace("\n", "\r\n"))
    shown = [text.rstrip() for text in screen.display if text.strip()]
    assert shown == [
        "sft: running as abcdef01 in ws/sft/abc",
        "sft: interrupted after 0 s  sft/loss 1.500",
    ]


def test_a_warning_beside_the_live_line_has_a_line_of_its_own(monkeypatch):
    """By the handler of conf/logging.yml, made before the live line."""
    config = yaml.safe_load((PROJECT / "conf" / "logging.yml").read_text())
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", output)
    handler = pydoc.locate(config["handlers"]["console"]["class"])()
    display = ProgressDisplay(Console(file=output, width=80, force_terminal=True))
    display.stage_started(run())
    display._live.refresh()
    handler.handle(logging.makeLogRecord({"msg": "the ranks finish their step"}))
    display.stage_ended(run(), "KILLED", {})
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(output.getvalue().replace("\n", "\r\n"))
    shown = [text.rstrip() for text in screen.display if text.strip()]
    assert shown[:2] == ["sft: running as abcdef01 in ws/sft/abc", "the ranks finish their step"]
