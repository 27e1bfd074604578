"""The message of a failed stage: the first cause, and the fix in the user's parameters."""

import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.stages.launch.failure import HINTS, Attempt, advice, find_hint, stage_error
from rlhf_pipeline.stages.launch.ranks import Death, Ranks

PPO = {
    "ppo": {
        "micro_batch_tokens": 8,
        "sampling": {"batch_size_per_gpu": 1},
        "actor": {"gradient_checkpointing": True,
                  "deepspeed": {"zero_stage": 2, "offload_optimizer": False}},
        "critic": {"gradient_checkpointing": False,
                   "deepspeed": {"zero_stage": 3, "offload_optimizer": True}},
    },
    "launch": {"processes": 2},
}  # fmt: skip
MESSAGES = """
GPU memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
main memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried
port in use: DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE
collective timeout: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv
collective timeout: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpTyp
disk full: OSError: [Errno 28] No space left on device
disk full: the model for best needs 12 MiB, /data has 8.0 MiB free
no compiler: op_builder.builder.MissingCUDAException: CUDA_HOME does not exist
no compiler: RuntimeError: Failed to find C compiler. Please specify via CC environm
no compiler: main.c:5:10: fatal error: Python.h: No such file or directory
no compiler: InvalidCxxCompiler: No working C++ compiler found in torch._inductor
driver: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU dr
driver: CUDA error: no kernel image is available for execution on the device
NCCL: DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG
damaged weights: SafetensorError: Error while deserializing header: HeaderTooLarge
damaged tokenizer: data did not match any variant of untagged enum ModelWrapper at line 9
hub unavailable: OSError: We couldn't connect to 'https://huggingface.co' to load the files
task not loaded: lm_eval/tasks/manager.py", line 231, in load FileNotFoundError: Unable to find '/r'
stuck: no rank has made progress for 1500 s: rank 1 is behind
not repeatable: cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.
"""


def test_messages_of_libraries_and_signals_are_recognised():
    for line in MESSAGES.strip().splitlines():
        name, _, reason = line.partition(": ")
        assert (reason, find_hint(reason).name) == (reason, name)
    assert find_hint("rank 0 was ended", -signal.SIGKILL).name == "killed for lack of memory"
    assert find_hint("rank 0 was ended", -signal.SIGBUS).name == "shared memory"
    assert find_hint("rank 0 was ended", -signal.SIGSEGV).name == "crash"
    assert find_hint("ValueError: the cause", 1) is None
    assert find_hint("rank 1 was ended by SIGTERM", -15) is None


def test_advice_shows_values_and_omits_exhausted_parameters():
    assert advice(find_hint("CUDA out of memory"), PPO) == (
        "Lower ppo.micro_batch_tokens (8). "
        "Set ppo.critic.gradient_checkpointing (false) to true. "
        "Raise ppo.actor.deepspeed.zero_stage (2). "
        "Set ppo.actor.deepspeed.offload_optimizer (false) to true."
    )
    text = advice(find_hint("MemoryError"), PPO)
    assert "Set ppo.critic.deepspeed.offload_optimizer (true) to false." in text
    assert "actor.deepspeed.offload_optimizer" not in text


def test_every_failure_has_either_a_pattern_or_a_signal_and_advice_in_sentences():
    assert all(bool(hint.patterns) != bool(hint.signal) for hint in HINTS)
    texts = [text for hint in HINTS for text in (*hint.remedies, hint.advice) if text]
    assert [text for text in texts if not (text[0].isupper() and text.endswith("."))] == []


def as_markdown() -> str:
    """The known failures as a Markdown table, those with equal remedies in one row.

    The message of a stage has the cause as well.
    """
    rows: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}  # symptoms and fixes, by remedies
    for hint in HINTS:
        fields: dict[tuple[str, str], list[str]] = {}  # by the words around them
        for remedy in hint.remedies:
            before, field, after = re.split("[{}]", remedy)
            fields.setdefault((before, after), []).append(f"`{field}`")
        changes = [f"{before}{', '.join(of)}{after}" for (before, after), of in fields.items()]
        symptoms, fixes = rows.setdefault((*hint.remedies,) or (hint.name,), ([], changes))
        symptoms.append(f"`{hint.patterns[0] if hint.patterns else hint.signal}`")
        fixes += filter(None, [hint.advice])
    cells = [(", ".join(symptoms), " ".join(fixes)) for symptoms, fixes in rows.values()]
    table = [("symptom", "fix"), ("---",) * 2, *cells]
    bar = "\\|"
    return "\n".join(f"| {' | '.join(cell.replace('|', bar) for cell in row)} |" for row in table)


def test_the_documentation_contains_the_table():
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    assert as_markdown() in page, f"put the output of python {__file__} into the page"


NOW = time.time()
LOST_PEER = "RuntimeError: [pair.cc:553] Connection closed by peer"


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "program.log").write_text("first\nexits with return code = -9\nlast")
    (tmp_path / "errors").mkdir()
    config = {"sft": {"micro_batch_tokens": 8}}
    run = StageRun("sft", "f", 1, config, {}, {}, tmp_path, 60.0)
    ranks = Ranks(tmp_path, 2, None, None)
    return Attempt(run, LaunchConfig(), ["deepspeed", "a b"], ranks, code=1, seconds=31.4)


@pytest.fixture
def of_several_machines(attempt, tmp_path):
    return replace(attempt, ranks=Ranks(tmp_path, 2, None, Pulse(tmp_path, 30.0, {})))


def report(attempt, rank, text, seconds=0.0):
    path = attempt.run.directory / "errors" / f"{int((NOW + seconds) * 1e9)}-rank{rank}.txt"
    path.write_text(text)


def die(attempt, rank, status, seconds=0.0):
    heartbeat = Heartbeat(rank, 1, "update", 7, since=NOW)
    attempt.ranks.deaths[rank] = Death(heartbeat, NOW + seconds, status)


def text(attempt, **changes):
    return str(stage_error(replace(attempt, **changes)))


KILLED = "rank 1 was ended by SIGKILL in update of step 7"


@pytest.mark.parametrize(
    ("reports", "deaths", "log", "cause"),
    [
        # The first report counts.
        ([(1, "ValueError: A", 0), (0, "ValueError: B", 0.1)], [], None, "rank1: ValueError: A"),
        # A report of a lost peer is a consequence, also of an earlier time.
        ([(0, LOST_PEER, 0), (1, "ValueError: A", 0.1)], [], None, "rank1: ValueError: A"),
        ([(0, "ncclRemoteError: A call failed", 0), (1, "ValueError: A", 0.1)], [], None,
         "rank1: ValueError: A"),
        # The driver sees a death later than the peers of the rank do.
        ([(0, LOST_PEER, -0.1)], [(1, -9, 0)], None, KILLED),
        ([(0, "RuntimeError: gathering failed", -0.1)], [(1, -9, 0)], None, KILLED),
        # SIGTERM, SIGABRT and a late death are consequences.
        ([(1, "ValueError: A", 0)], [(0, -15, 0)], None, "rank1: ValueError: A"),
        ([(1, "ValueError: A", 0)], [(0, -6, 0)], None, "rank1: ValueError: A"),
        ([(1, "ValueError: A", 0)], [(0, -9, 5)], None, "rank1: ValueError: A"),
        # The launcher logs the exit code of a rank that it reaped first.
        ([], [(1, None, 0)], None, KILLED),
        ([], [(1, None, 0)], "exits with return code = 1", "rank 1 ended with exit code 1"),
        # That code may be that of the rank that reports the loss.
        ([(0, LOST_PEER, 0.1)], [(1, None, 0)], "exits with return code = 1",
         "rank 1 ended without a report"),
        ([(0, LOST_PEER, 0)], [], None, "a rank was ended by SIGKILL, according to the launcher\n"),
        ([(0, LOST_PEER, 0)], [], "last words",
         f"rank0: {LOST_PEER}; the log ends with\nlast words\n"),
        ([], [(1, -40, 0)], None, "rank 1 was ended by signal 40 in"),
        ([], [(0, -11, 0)], None, "rank 0 was ended by SIGSEGV in update of step 7"),
    ],
)  # fmt: skip
def test_the_cause_is_the_first_failure_and_not_its_consequences(
    attempt, reports, deaths, log, cause
):
    if log is not None:
        (attempt.run.directory / "program.log").write_text(log)
    for rank, words, seconds in reports:
        report(attempt, rank, words, seconds)
    for rank, status, seconds in deaths:
        die(attempt, rank, status, seconds)
    message = text(attempt)
    assert f"\n{cause}" in message
    assert "B" not in message.partition("command")[0]
    assert ("pair.cc" in message) == ("pair.cc" in cause)


def test_a_death_has_a_fix_a_crash_the_end_of_the_log_and_a_full_disk_explains_no_signal(
    attempt, monkeypatch
):
    monkeypatch.setattr("rlhf_pipeline.stages.launch.failure.is_full", lambda directory: True)
    die(attempt, 1, -9)
    assert text(attempt).startswith("stage sft failed after 31 s (exit code 1)\n")
    assert "  cause    most likely the kernel, for lack of main memory" in text(attempt)
    assert "  fix      Lower sft.micro_batch_tokens (8)." in text(attempt)
    die(attempt, 1, -11)
    assert "the log ends with\nfirst" in text(attempt)


@pytest.mark.parametrize("seen", [True, False])
def test_a_full_disk_explains_a_rank_without_a_reason(attempt, monkeypatch, seen):
    """The rank could not write its reason."""
    (attempt.run.directory / "program.log").write_text("")
    monkeypatch.setattr("rlhf_pipeline.stages.launch.failure.is_full", lambda directory: True)
    if seen:
        die(attempt, 0, 1)
    assert ": No space left on device" in text(attempt)
    assert "  space    " in text(attempt)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"code": 3}, "exit code 3)"),
        ({"code": -9}, "SIGKILL to the launcher)"),
        ({"code": 0}, "exit code 0 but no manifest)"),
        ({"code": None}, "a rank failed; the others were stopped)"),
        ({"code": None, "stuck": "rank 1 is behind"}, "ended by the watchdog)\nrank 1 is behind"),
    ],
)
def test_the_end_of_a_launch_is_explained(attempt, end, words):
    report(attempt, 0, LOST_PEER)
    assert f"31 s ({words}" in text(attempt, **end)


def test_the_message_shows_command_log_and_how_to_resume_without_secrets(attempt, monkeypatch):
    report(attempt, 0, "OSError: [Errno 28] No space left on device")
    secret = "--params=a=https://me:canary@host/x?sig=canary,b=c d"
    monkeypatch.setattr(sys, "argv", ["/x/kedro", "run", secret])
    assert "command  deepspeed 'a b'" in text(attempt)
    assert f"log      {attempt.run.directory}/program.log" in text(attempt)
    again = "again    kedro run '--params=a=https://...@host/x?... d'"
    assert f"{again}  (this stage starts from its first step)" in text(attempt)
    (attempt.run.directory / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert "(this stage resumes after step 12)" in text(attempt)
    assert "  space    " in text(attempt)


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
def test_the_launchers_of_several_machines_say_which_one_failed(
    of_several_machines, tmp_path, log, reason
):
    (tmp_path / "program.log").write_text(log)
    assert text(of_several_machines).partition("\n")[2].startswith(reason)
    report(of_several_machines, 0, "ValueError: the cause")
    assert "rank0: ValueError: the cause" in text(of_several_machines)


def test_a_rank_that_lost_its_peer_is_not_the_cause_if_its_launcher_ends(
    of_several_machines, tmp_path
):
    log = tmp_path / "program.log"
    log.write_text("pdsh@a: b: ssh exited with exit code 1\n")
    report(of_several_machines, 0, LOST_PEER)
    assert LOST_PEER in text(of_several_machines)
    log.write_text(f"{log.read_text()}pdsh@a: c: ssh exited with exit code 255")
    assert "node c is lost" in text(of_several_machines)


if __name__ == "__main__":
    print(as_markdown())
