"""Known failures: recognised by messages of libraries, answered with the user's parameters."""

import signal
from pathlib import Path

import pytest

from rlhf_pipeline.stages.launch.hints import FOLLOW_UP, HINTS, Hint, advice, find_hint

PPO = {
    "ppo": {
        "micro_batch_tokens": 8,
        "sampling": {"batch_size_per_gpu": 1},
        "actor": {
            "gradient_checkpointing": True,
            "deepspeed": {"zero_stage": 2, "offload_optimizer": False},
        },
        "critic": {
            "gradient_checkpointing": False,
            "deepspeed": {"zero_stage": 3, "offload_optimizer": True},
        },
    },
    "launch": {"halve_micro_batch_on_oom": False, "processes": 2},
}


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU memory"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "main memory"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. port: 29640, code: -98, name: EADDRINUSE",
            "port in use",
        ),
        (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
            "operation to complete",
            "collective timeout",
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=",
            "collective timeout",
        ),
        ("OSError: [Errno 28] No space left on device", "disk full"),
        ("the model for best needs 12 MiB, /data has 8.0 MiB free", "disk full"),
        ("op_builder.builder.MissingCUDAException: CUDA_HOME does not exist", "no compiler"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environm", "no compiler"),
        ("main.c:5:10: fatal error: Python.h: No such file or directory", "no compiler"),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). "
            "Please update your GPU driver",
            "driver",
        ),
        ("CUDA error: no kernel image is available for execution on the device", "driver"),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system "
            "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclSystemError: "
            "System call (e.g. socket, malloc) or external library call failed or device error.",
            "NCCL",
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "damaged weights",
        ),
        (
            "Exception: data did not match any variant of untagged enum ModelWrapper at line 9",
            "damaged tokenizer",
        ),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "hub unavailable",
        ),
        ("no rank has made progress for 1500 s: rank 1 is behind", "stuck"),
        (
            "RuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but "
            "you set 'torch.use_deterministic_algorithms(True)'",
            "not repeatable",
        ),
    ],
)
def test_messages_of_libraries_are_recognised(reason, name):
    assert find_hint(reason).name == name


def test_an_unknown_failure_has_no_hint():
    assert find_hint("ValueError: the cause", 1) is None
    assert find_hint("rank 1 was ended by SIGTERM", -15) is None


@pytest.mark.parametrize(
    ("number", "kernel_kills", "name"),
    [
        (signal.SIGKILL, 0, "killed from outside"),
        (signal.SIGKILL, 1, "killed for lack of memory"),
        (signal.SIGKILL, None, "killed for lack of memory"),
        (signal.SIGBUS, 0, "shared memory"),
        (signal.SIGSEGV, None, "crash"),
    ],
)
def test_a_signal_has_a_meaning(number, kernel_kills, name):
    assert find_hint("rank 0 was ended", -number, kernel_kills).name == name


def test_advice_shows_values_and_omits_exhausted_parameters():
    assert advice(find_hint("CUDA out of memory"), PPO) == (
        "Lower ppo.micro_batch_tokens (8). "
        "Set launch.halve_micro_batch_on_oom (false) to true. "
        "Set ppo.critic.gradient_checkpointing (false) to true. "
        "Raise ppo.actor.deepspeed.zero_stage (2). "
        "Set ppo.actor.deepspeed.offload_optimizer (false) to true."
    )


def test_lack_of_main_memory_advises_against_offloading():
    text = advice(find_hint("MemoryError"), PPO)
    assert "Set ppo.critic.deepspeed.offload_optimizer (true) to false." in text
    assert "actor.deepspeed.offload_optimizer" not in text


@pytest.mark.parametrize(
    "report",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:1",
        "ncclRemoteError: A call failed possibly due to a network error",
    ],
)
def test_reports_of_a_lost_peer_are_recognised(report):
    assert FOLLOW_UP.search(report)


def test_every_failure_has_either_a_pattern_or_a_signal():
    assert all(bool(hint.patterns) != bool(hint.signal) for hint in HINTS)


def test_every_advice_consists_of_imperative_sentences():
    texts = [remedy for hint in HINTS for remedy in hint.remedies]
    texts += [hint.advice for hint in HINTS if hint.advice]
    assert [text for text in texts if not (text[0].isupper() and text.endswith("."))] == []


def as_markdown() -> str:
    """The known failures as a Markdown table."""
    rows = [("failure", "recognised by", "cause", "fix"), ("---",) * 4]
    for hint in HINTS:
        actions = [remedy.replace("{", "`").replace("}", "`") for remedy in hint.remedies]
        fix = " ".join([*actions, *filter(None, [hint.advice])])
        rows.append((hint.name, recognised_by(hint), hint.cause, fix))
    bar = "\\|"
    return "\n".join(f"| {' | '.join(cell.replace('|', bar) for cell in row)} |" for row in rows)


def recognised_by(hint: Hint) -> str:
    if hint.patterns:
        return f"`{'|'.join(hint.patterns)}`"
    without = ", while the kernel killed no process for lack of memory"
    return f"signal {hint.signal}{without if hint.requires_zero_kernel_kills else ''}"


def test_every_row_of_the_table_has_four_cells():
    rows = as_markdown().splitlines()
    assert len(rows) == len(HINTS) + 2
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_the_documentation_contains_the_table():
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    assert as_markdown() in page, (
        "put the output of python tests/stages/launch/test_hints.py into the page"
    )


if __name__ == "__main__":
    print(as_markdown())
