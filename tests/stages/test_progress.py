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
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.stages.progress import ProgressDisplay

PROJECT = Path(__file__).parents[2]
SCORING = Heartbeat(0, 1, phase="scoring", step=1, scorer="length_reward", progressed=988)
UPDATE = Heartbeat(0, 1, phase="update", step=1)


def run(**fields):
    directory = Path("ws/sft/abc")
    job = ("sft", "abcdef0123456789", 1, {}, {}, {}, directory, 60.0)
    return replace(StageRun(*job, headline_metrics=("sft/loss",)), **fields)


def record(step, total=10, **metrics):
    return {"step": step, "total_steps": total, "time": 1000.0, "metrics": metrics}


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when it is set."""
    now = [1000.0]
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


def console(clock, **options):
    return Console(get_time=lambda: clock[0], **options)


LOSS = {"sft/loss": 1.5}
SOURCE = run(stage="source", config={"source": {"name": "files"}})
RESUMED = run(resume_from=5)
OLD = [record(step) for step in range(1, 6)]


@pytest.mark.parametrize(
    ("run", "events", "lines"),
    [
        # Steps 1 to 4 in 6 s are 2 s a step, so 6 steps take 12 s. The start-up does not count.
        (
            run(),
            [(9, [record(1, **{"sft/loss": 2.0, "sft/tokens": 5.0})]), (6, [record(4, **LOSS)])],
            [
                "sft: running as abcdef01 in ws/sft/abc",
                "sft: step 1/10  sft/loss 2.000",
                "sft: step 4/10  sft/loss 1.500  12 s left",
                "sft: finished in 15 s  step 4/10  sft/loss 1.500",
            ],
        ),
        # Steps 6 to 8 in 4 s are 2 s a step, so 2 steps take 4 s. Steps 1 to 5 were long ago.
        (
            RESUMED,
            [(0, OLD), (1, [record(6)]), (4, [record(8)]), (0, [record(7)])],
            [
                "sft: running as abcdef01 in ws/sft/abc, resuming from step 5",
                "sft: step 5/10",
                "sft: step 6/10",
                "sft: step 8/10  4 s left",
                "sft: step 8/10  4 s left",  # never backwards
                "sft: finished in 5 s",
            ],
        ),
        (
            run(),
            [(0, SCORING), (0, [record(1, **LOSS)]), (0, UPDATE), (0, [])],
            [
                "sft: running as abcdef01 in ws/sft/abc",
                "sft: step 1/10  scoring: length_reward, 12 s  sft/loss 1.500",
                "sft: step 1/10  sft/loss 1.500",
                "sft: finished in 0 s  step 1/10  sft/loss 1.500",
            ],
        ),
        (
            SOURCE,
            [(0, [record(100, total=None)]), (0, [record(300, total=None)])],
            [
                "source files: running as abcdef01 in ws/sft/abc",
                "source files: step 100/?",
                "source files: step 300/?",
                "source files: finished in 0 s",  # its last rows have no line of their own
            ],
        ),
    ],
    ids=["metrics", "resumed", "scorer", "source"],
)
def test_the_lines_of_a_log(monkeypatch, clock, run, events, lines):
    monkeypatch.setattr("rlhf_pipeline.stages.progress.LINE_EVERY_S", -1.0)
    output = io.StringIO()
    display = ProgressDisplay(console(clock, file=output, width=200))
    display.stage_started(run)
    for seconds, event in events:
        clock[0] += seconds
        if isinstance(event, Heartbeat):
            display.stage_phase(run, event)
        else:
            display.stage_metrics(run, event)
    display.stage_ended(run, "FINISHED", {})
    assert output.getvalue().splitlines() == lines


ANSWERS = [
    {"step": 4, "prompt": "User: Hello!\n\nAssistant: Hi!\n\nUser: Fill in :smile:\nWhich day?",
     "answer": "\x1b[31mMonday\u202e\u200e. See http://me:key@host \N{SNOWMAN} " + 99 * "word ",
     "score": 1.25, "reward/length": -2.0, "kl": 0.5},
    {"step": 4, "prompt": "[bold]Why?", "answer": "", "score": 0.0, "reward/length": 0, "kl": -0.0},
]  # fmt: skip
SHOWN = """\
sft: answers to held-out prompts after step 4
  prompt  Fill in :smile: Which day?
CUT
  scores  score 1.25, reward/length -2.00, kl 0.50
  prompt  [bold]Why?
  answer  (empty)
  scores  score 0.00, kl 0.00
sft: stopped after step 4
"""


def test_answers_have_a_line_each_which_no_text_can_leave(monkeypatch):
    """A terminal obeys no text of a model, and one of ASCII can show it. A resumed run has shown
    the answers of an earlier attempt."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = ProgressDisplay(Console(file=output, width=60))
    resumed = run(resume_from=3)
    display.stage_started(resumed)
    earlier = record(3) | {"answers": ANSWERS, "note": "earlier"}
    now = record(4) | {"answers": ANSWERS, "note": "stopped after step 4"}
    display.stage_metrics(resumed, [earlier, now])
    output.flush()
    lines = output.buffer.getvalue().decode()
    answer = "\\x1b[31mMonday\\u202e\\u200e. See http://...@host \N{SNOWMAN} " + 99 * "word "
    cut = f"  answer  {answer}"[:499].encode("ascii", "backslashreplace").decode() + "\\u2026"
    assert lines[lines.index("sft: answers") :].startswith(SHOWN.replace("CUT", cut))


def terminal(monkeypatch, clock):
    """A running stage on a terminal of 60 columns, what the screen shows, and the log's handler."""
    config = yaml.safe_load((PROJECT / "conf" / "logging.yml").read_text())
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", output)
    handler = pydoc.locate(config["handlers"]["console"]["class"])()
    display = ProgressDisplay(console(clock, file=output, width=60, force_terminal=True))
    display.stage_started(run())

    def shown():
        display._progress.refresh()
        screen = pyte.Screen(60, 24)
        pyte.Stream(screen).feed(output.getvalue().replace("\n", "\r\n"))
        return [text.rstrip() for text in screen.display if text.strip()]

    return display, shown, handler


def test_the_live_line_is_cut_by_a_narrow_terminal_and_gone_at_the_end(monkeypatch, clock):
    display, shown, _ = terminal(monkeypatch, clock)
    started = "sft: running as abcdef01 in ws/sft/abc"
    assert shown() == [started, "sft: 0:00:00  importing libraries"]
    display.stage_phase(run(), Heartbeat(0, 1))
    assert shown() == [started, "sft: 0:00:00  loading models and data"]
    display.stage_phase(run(), SCORING)
    display.stage_metrics(run(), [record(1, **LOSS)])
    clock[0] += 6
    display.stage_metrics(run(), [record(4, **LOSS)])
    line = "sft: step 4/10  0:00:06  0:00:12 left  scoring: length_rewa\N{HORIZONTAL ELLIPSIS}"
    assert shown() == [started, line]
    display.stage_ended(run(), "KILLED", {})
    assert shown() == [started, "sft: interrupted after 6 s  step 4/10  sft/loss 1.500"]


def test_a_warning_beside_the_live_line_has_a_line_of_its_own(monkeypatch, clock):
    """By the handler of conf/logging.yml, made before the live line."""
    display, shown, handler = terminal(monkeypatch, clock)
    handler.handle(logging.makeLogRecord({"msg": "the ranks finish their step"}))
    assert shown()[:2] == ["sft: running as abcdef01 in ws/sft/abc", "the ranks finish their step"]
    display.stage_ended(run(), "KILLED", {})
