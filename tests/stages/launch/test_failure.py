"""The message of a failed stage: the first cause, not its consequences."""

import shutil
import sys
import time
from dataclasses import replace

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.launch.failure import Attempt, stage_error
from rlhf_pipeline.stages.launch.ranks import Death, Ranks

NOW = time.time()
LOST_PEER = "RuntimeError: [pair.cc:553] Connection closed by peer"


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "program.log").write_text("first\nexits with return code = -9\nlast")
    (tmp_path / "errors").mkdir()
    config = {"sft": {"micro_batch_tokens": 8}}
    run = StageRun("sft", "f", 1, config, {}, {}, tmp_path, 60.0)
    return Attempt(
        run=run,
        config=LaunchConfig(),
        command=["deepspeed", "a b"],
        ranks=Ranks(tmp_path, 2, None),
        code=1,
        seconds=31.4,
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


def test_a_cause_precedes_an_earlier_report_of_a_lost_peer(attempt):
    report(attempt, 0, LOST_PEER)
    report(attempt, 1, "ValueError: the cause", seconds=0.1)
    assert "rank1: ValueError: the cause" in text(attempt)
    assert "pair.cc" not in text(attempt)


def test_a_death_precedes_the_reports_of_its_peers(attempt):
    report(
        attempt, 0, LOST_PEER, seconds=-0.1
    )  # the driver sees the death later than the peer does
    die(attempt, 1, -9)
    assert "rank 1 was ended by SIGKILL in update of step 7" in text(attempt)
    assert "pair.cc" not in text(attempt)
    assert "  fix      Lower sft.micro_batch_tokens (8)." in text(attempt)


def test_a_death_precedes_any_later_report(attempt):
    report(attempt, 0, "RuntimeError: gathering failed", seconds=-0.1)
    die(attempt, 1, -9)
    assert "rank 1 was ended by SIGKILL" in text(attempt)


@pytest.mark.parametrize(("status", "seconds"), [(-15, 0.0), (-6, 0.0), (-9, 5.0)])
def test_a_consequence_of_another_failure_is_not_the_cause(attempt, status, seconds):
    report(attempt, 1, "ValueError: the cause")
    die(attempt, 0, status, seconds)
    assert "rank1: ValueError: the cause" in text(attempt)


def test_an_unknown_signal_is_read_from_the_launcher_s_log(attempt):
    die(attempt, 1, None)
    assert "rank 1 was ended by SIGKILL in update of step 7" in text(attempt)


def test_the_exit_code_of_another_rank_is_not_that_of_a_dead_one(attempt):
    """The launcher logs the code of one failed rank, which may be the one that reports the loss."""
    (attempt.run.directory / "program.log").write_text("exits with return code = 1")
    die(attempt, 1, None)
    assert "rank 1 ended with exit code 1" in text(attempt)
    report(attempt, 0, LOST_PEER, seconds=0.1)
    assert "rank 1 ended without a report" in text(attempt)


def test_an_unseen_death_is_reported_from_the_launcher_s_log(attempt):
    report(attempt, 0, LOST_PEER)
    assert "\na rank was ended by SIGKILL, according to the launcher\n" in text(attempt)


def test_a_lost_peer_is_reported_if_nothing_else_is_known(attempt):
    report(attempt, 0, LOST_PEER)
    (attempt.run.directory / "program.log").write_text("last words")
    assert f"\nrank0: {LOST_PEER}; the log ends with\nlast words\n" in text(attempt)


def test_a_signal_without_a_name_is_shown_by_its_number(attempt):
    die(attempt, 1, -40)
    assert "rank 1 was ended by signal 40 in" in text(attempt)


@pytest.mark.parametrize("seen", [True, False])
def test_a_full_disk_explains_a_rank_without_a_reason(attempt, monkeypatch, seen):
    """The rank could not write its reason."""
    (attempt.run.directory / "program.log").write_text("")
    monkeypatch.setattr("rlhf_pipeline.stages.launch.failure.is_full", lambda directory: True)
    if seen:
        die(attempt, 0, 1)
    assert ": No space left on device" in text(attempt)
    assert "  space    " in text(attempt)
    assert stage_error(attempt).cause == "disk full"


def test_a_full_disk_does_not_explain_a_signal(attempt, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.stages.launch.failure.is_full", lambda directory: True)
    die(attempt, 0, -9)
    assert stage_error(attempt).cause == "killed for lack of memory"


def test_a_crash_shows_the_end_of_the_log(attempt):
    die(attempt, 0, -11)
    assert "rank 0 was ended by SIGSEGV in update of step 7" in text(attempt)
    assert "the log ends with\nfirst" in text(attempt)


def test_a_hang_is_reported_by_the_watchdog(attempt):
    report(attempt, 0, LOST_PEER)
    message = text(attempt, stuck="no rank has made progress for 5 s: rank 1 is behind", code=None)
    assert message.startswith(
        "stage sft failed after 31 s (ended by the watchdog)\nno rank has made progress for 5 s"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (247, "exit code 247, DeepSpeed's for SIGKILL"),
        (-9, "SIGKILL to the launcher"),
        (0, "exit code 0 but no manifest"),
        (None, "a rank failed, the others were ended"),
    ],
)
def test_exit_codes_are_explained(attempt, code, words):
    assert f"31 s ({words})" in text(attempt, code=code)


def test_a_hint_without_advice_has_no_fix(attempt):
    report(attempt, 0, "EADDRINUSE")
    assert "cause    another program uses the port" in text(attempt)
    assert "  fix" not in text(attempt)


def test_the_message_shows_command_log_and_how_to_resume(attempt, monkeypatch):
    report(attempt, 0, "OSError: [Errno 28] No space left on device")
    monkeypatch.setattr(sys, "argv", ["/x/kedro", "run", "--params=a=1 2"])
    assert "command  deepspeed 'a b'" in text(attempt)
    assert f"log      {attempt.run.directory}/program.log" in text(attempt)
    assert "again    kedro run '--params=a=1 2'  (this stage starts from its first step)" in text(
        attempt
    )
    (attempt.run.directory / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert "(this stage resumes after step 12)" in text(attempt)
    assert stage_error(attempt).cause == "disk full"


def test_the_command_to_resume_is_shown_without_secrets(attempt, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["bin/kedro", "run", "--params=a=https://me:canary@host/x?sig=canary,b=c d"]
    )
    assert "  again    kedro run '--params=a=https://...@host/x?... d'" in text(attempt)
    assert "canary" not in text(attempt)


def test_a_known_cause_and_its_fix_come_before_a_long_report(attempt):
    report(attempt, 0, "  File ...\n" * 30 + "HeaderTooLarge")
    lines = text(attempt).splitlines()
    assert lines[1].startswith("  cause    a file of weights is truncated")
    assert lines[2].startswith("  fix      ")
    assert lines[3] == "rank0: File ..."


def test_a_removed_work_directory_is_the_cause(attempt):
    shutil.rmtree(attempt.run.directory)
    assert text(attempt) == (
        f"stage sft: {attempt.run.directory} was removed while the stage was running. Fix: repeat "
        "the command; the stage starts from its first step"
    )


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("pdsh@a: b: ssh exited with exit code 1\npdsh@a: c: ssh exited with exit code 255",
         "node c is lost: its ssh connection failed or was cut"),
        ("b: [INFO] exits with return code = 1\nc: [x] [y] exits with return code = -9",
         "a rank on c was ended by SIGKILL"),
        ("b: cannot start: c does not see the driver's files", "c does not see the driver's files"),
        ("pdsh@a: b: ssh exited with exit code 1", "node b: DeepSpeed's launcher ended with exit "
         "code 1; the log ends with\npdsh@a: b: ssh exited with exit code 1"),
    ],
)  # fmt: skip
def test_the_launchers_of_several_machines_say_which_one_failed(attempt, tmp_path, log, reason):
    (tmp_path / "program.log").write_text(log)
    ranks = Ranks(tmp_path, 2, None, Pulse(tmp_path, 30.0, {}))
    assert text(attempt, ranks=ranks).partition("\n")[2].startswith(reason)
    report(attempt, 0, "ValueError: the cause")
    assert "rank0: ValueError: the cause" in text(attempt, ranks=ranks)


def test_a_rank_that_lost_its_peer_is_not_the_cause_if_its_launcher_ends(attempt, tmp_path):
    (tmp_path / "program.log").write_text("pdsh@a: b: ssh exited with exit code 1")
    report(attempt, 0, LOST_PEER)
    ranks = Ranks(tmp_path, 2, None, Pulse(tmp_path, 30.0, {}))
    assert LOST_PEER in text(attempt, ranks=ranks)
    with (tmp_path / "program.log").open("a") as file:
        file.write("\npdsh@a: c: ssh exited with exit code 255")
    assert "node c is lost" in text(attempt, ranks=ranks)
