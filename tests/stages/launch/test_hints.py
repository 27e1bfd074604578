"""Known failures: recognised by what libraries say, answered in the user's own parameters."""

import signal
from pathlib import Path

import pytest

from rlhf_pipeline.stages.launch.hints import FOLLOW_UP, HINTS, advice, as_markdown, find_hint

PPO = {
    "ppo": {
        "micro_batch_size_per_gpu": 8,
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
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9", "main memory"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 29640, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "port in use"),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
         "collective timeout"),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE", "collective timeout"),
        ("OSError: [Errno 28] No space left on device", "disk full"),
        ("deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist", "no compiler"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged weights"),
        ("Exception: data did not match any variant of untagged enum ModelWrapper at line 9", "damaged tokenizer"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "no hub"),
        ("no rank has made progress for 1500 s: rank 1 is behind", "stuck"),
    ],
)  # fmt: skip
def test_a_library_s_words_are_recognised(reason, name):
    assert find_hint(reason).name == name


def test_what_is_not_known_gets_no_hint():
    assert find_hint("ValueError: the cause", 1) is None
    assert find_hint("rank 1 was ended by SIGTERM", -15) is None


@pytest.mark.parametrize(
    ("number", "kernel_kills", "name"),
    [
        (signal.SIGKILL, 0, "killed by somebody"),
        (signal.SIGKILL, 1, "killed for lack of memory"),
        (signal.SIGKILL, None, "killed for lack of memory"),
        (signal.SIGBUS, 0, "shared memory"),
        (signal.SIGSEGV, None, "crash"),
    ],
)
def test_a_signal_has_a_meaning(number, kernel_kills, name):
    assert find_hint("rank 0 was ended", -number, kernel_kills).name == name


def test_advice_names_parameters_with_their_values_and_leaves_out_what_is_exhausted():
    assert advice(find_hint("CUDA out of memory"), PPO) == (
        "lower ppo.micro_batch_size_per_gpu (8); set to true launch.halve_micro_batch_on_oom (false); "
        "set to true ppo.critic.gradient_checkpointing (false); raise ppo.actor.deepspeed.zero_stage (2); "
        "set to true ppo.actor.deepspeed.offload_optimizer (false)"
    )


def test_main_memory_is_not_saved_by_offloading_to_it():
    said = advice(find_hint("MemoryError"), PPO)
    assert "set to false ppo.critic.deepspeed.offload_optimizer (true)" in said
    assert "actor.deepspeed.offload_optimizer" not in said


@pytest.mark.parametrize(
    "echo",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:1",
        "ncclRemoteError: A call failed possibly due to a network error",
    ],
)
def test_complaints_about_a_peer_are_known_as_such(echo):
    assert FOLLOW_UP.search(echo)


def test_every_failure_is_recognised_by_one_thing():
    assert all((hint.pattern is None) != (hint.signal is None) for hint in HINTS)


def test_the_page_for_people_is_this_table():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert as_markdown() in page, (
        "run python -m rlhf_pipeline.stages.launch.hints and put its table into docs/troubleshooting.md"
    )
