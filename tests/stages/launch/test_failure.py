"""The text after a failure: the cause and not its echo."""

import sys
import time
from dataclasses import replace

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.launch.failure import Attempt, stage_error
from rlhf_pipeline.stages.launch.ranks import Death, Ranks

NOW = time.time()
ECHO = "RuntimeError: [pair.cc:553] Connection closed by peer"


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "program.log").write_text("first\nexits with return code = -9\nlast")
    (tmp_path / "errors").mkdir()
    run = StageRun(
        "sft", "f", tmp_path, {"sft": {"micro_batch_size_per_gpu": 8}}, 1, {}, cached=False
    )
    return Attempt(
        run,
        LaunchConfig(),
        ["deepspeed", "a b"],
        Ranks(tmp_path, 2, None),
        2,
        1,
        False,
        31.4,
        None,
        None,
    )


def report(attempt, rank, text, seconds=0.0):
    path = attempt.run.directory / "errors" / f"{int((NOW + seconds) * 1e9)}-rank{rank}.txt"
    path.write_text(text)


def die(attempt, rank, status, seconds=0.0):
    heartbeat = Heartbeat(rank, 1, "update", 7, since=NOW)
    attempt.ranks.deaths[rank] = Death(heartbeat, NOW + seconds, status)


def text(attempt, **changes):
    return str(stage_error(replace(attempt, **changes)))


def test_the_first_report_is_the_cause(attempt):
    report(attempt, 1, "ValueError: the cause")
    report(attempt, 0, "ValueError: later", seconds=0.1)
    lines = text(attempt).splitlines()
    assert lines[0] == "stage sft failed after 31 s (exit code 1)"
    assert lines[1] == "rank1: ValueError: the cause"
    assert "later" not in text(attempt)


def test_a_report_outweighs_a_complaint_that_came_first(attempt):
    report(attempt, 0, ECHO)
    report(attempt, 1, "ValueError: the cause", seconds=0.1)
    assert "rank1: ValueError: the cause" in text(attempt)
    assert "pair.cc" not in text(attempt)


def test_a_death_outweighs_the_complaints_of_others(attempt):
    report(attempt, 0, ECHO, seconds=-0.1)  # the driver sees the death later than the peer does
    die(attempt, 1, -9)
    assert "rank 1 was ended by SIGKILL in update of step 7" in text(attempt)
    assert "pair.cc" not in text(attempt)
    assert "lower sft.micro_batch_size_per_gpu (8)" in text(attempt)


def test_a_death_outweighs_what_others_make_of_it_in_their_own_words(attempt):
    report(attempt, 0, "RuntimeError: gathering failed", seconds=-0.1)
    die(attempt, 1, -9)
    assert "rank 1 was ended by SIGKILL" in text(attempt)


@pytest.mark.parametrize(("status", "seconds"), [(-15, 0.0), (-6, 0.0), (-9, 5.0)])
def test_what_happens_to_a_rank_after_another_has_failed_is_no_cause(attempt, status, seconds):
    report(attempt, 1, "ValueError: the cause")
    die(attempt, 0, status, seconds)
    assert "rank1: ValueError: the cause" in text(attempt)


def test_a_death_whose_signal_was_missed_is_that_of_the_launcher_s_log(attempt):
    die(attempt, 1, None)
    assert "rank 1 was ended by SIGKILL in update of step 7" in text(attempt)


def test_a_death_that_nobody_saw_is_told_as_far_as_the_launcher_knows(attempt):
    report(attempt, 0, ECHO)
    assert "\na rank was ended by SIGKILL, the launcher reports\n" in text(attempt)


def test_a_complaint_is_better_than_nothing(attempt):
    report(attempt, 0, ECHO)
    (attempt.run.directory / "program.log").write_text("last words")
    assert f"\nrank0: {ECHO}; the log ends with\nlast words\n" in text(attempt)


def test_a_signal_without_a_name_is_told_by_its_number(attempt):
    die(attempt, 1, -40)
    assert "rank 1 was ended by signal 40 in" in text(attempt)


def test_a_crash_shows_the_end_of_the_log(attempt):
    die(attempt, 0, -11)
    assert "rank 0 was ended by SIGSEGV in update of step 7" in text(attempt)
    assert "the log ends with\nfirst" in text(attempt)


def test_a_hang_is_told_as_the_watchdog_saw_it(attempt):
    report(attempt, 0, ECHO)
    told = text(attempt, stuck="no rank has made progress for 5 s: rank 1 is behind", code=None)
    assert told.startswith(
        "stage sft failed after 31 s (ended by the watchdog)\nno rank has made progress for 5 s"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"), (247, "exit code 247, DeepSpeed's for SIGKILL"), (-9, "SIGKILL to the launcher"),
        (0, "exit code 0 but no manifest"), (None, "a rank failed, the others were ended"),
    ],
)  # fmt: skip
def test_exit_codes_are_told_in_words(attempt, code, words):
    assert f"31 s ({words})" in text(attempt, code=code)


def test_advice_is_left_out_where_there_is_none(attempt):
    report(attempt, 0, "EADDRINUSE")
    assert "cause    another program listens" in text(attempt)
    assert "  try" not in text(attempt)


def test_where_to_look_and_how_to_go_on(attempt, monkeypatch):
    report(attempt, 0, "OSError: [Errno 28] No space left on device")
    monkeypatch.setattr(sys, "argv", ["/x/kedro", "run", "--params=a=1 2"])
    assert "command  deepspeed 'a b'" in text(attempt)
    assert f"log      {attempt.run.directory}/program.log" in text(attempt)
    assert "again    kedro run '--params=a=1 2'  (this stage starts from its beginning)" in text(
        attempt
    )
    (attempt.run.directory / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert "(this stage goes on after step 12)" in text(attempt)
    assert stage_error(attempt).cause == "disk full"


def test_the_command_that_goes_on_is_shown_without_secrets(attempt, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["bin/kedro", "run", "--params=a=https://me:canary@host/x?sig=canary,b=c d"]
    )
    assert "  again    kedro run '--params=a=https://...@host/x?... d'" in text(attempt)
    assert "canary" not in text(attempt)
