"""Known failures of a launched program: how they are recognised, what they mean, and which parameters help.

The one table behind the hints in error messages and the list in docs/troubleshooting.md, which this prints:

    python -m rlhf_pipeline.stages.launch.hints
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.runtime.disk_space import ADVICE, DISK_FULL, DISK_FULL_PATTERN

GPU_MEMORY, CPU_MEMORY, PORT = "GPU memory", "main memory", "port in use"


@dataclass(frozen=True)
class Remedy:
    """A parameter that helps, by the last part of its name."""

    verb: str
    field: str
    exhausted: tuple[Any, ...] = ()
    """Values at which there is nothing left to do."""


@dataclass(frozen=True)
class Hint:
    """One known failure."""

    name: str
    cause: str
    advice: str = ""
    """What to do that no parameter does."""
    remedies: tuple[Remedy, ...] = ()
    pattern: str | None = None
    """Regular expression for the failing rank's reason."""
    signal: signal.Signals | None = None
    """The signal that ended a rank."""
    uncounted: bool = False
    """Only where the kernel, by its own count, has ended no process for lack of memory meanwhile."""


SMALLER_BATCHES = (
    Remedy("lower", "micro_batch_size_per_gpu", (1,)),
    Remedy("lower", "batch_size_per_gpu", (1,)),
)
HALVING = (Remedy("set to true", "halve_micro_batch_on_oom", (True,)),)
SHARDING = (Remedy("raise", "zero_stage", (3, None)),)
CHECKPOINTING = (Remedy("set to true", "gradient_checkpointing", (True,)),)
OFFLOAD = tuple(
    Remedy("set to true", name, (True,)) for name in ("offload_optimizer", "offload_parameters")
)
NO_OFFLOAD = tuple(
    Remedy("set to false", name, (False,)) for name in ("offload_optimizer", "offload_parameters")
)
FEWER_RANKS = (Remedy("lower", "processes", (1,)),)

HINTS = (
    Hint(
        GPU_MEMORY,
        "a GPU has too little memory for what is asked of it",
        "",
        SMALLER_BATCHES + HALVING + CHECKPOINTING + SHARDING + OFFLOAD,
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Hint(
        CPU_MEMORY,
        "this machine has too little main memory for what is asked of it",
        "",
        SMALLER_BATCHES + HALVING + CHECKPOINTING + SHARDING + NO_OFFLOAD + FEWER_RANKS,
        r"DefaultCPUAllocator|MemoryError|std::bad_alloc|Cannot allocate memory",
    ),
    Hint(
        "killed by somebody",
        "not the kernel for lack of memory, by its own count; so the scheduler, for a limit of the job, or a person",
        "The scheduler's account of the job tells.",
        signal=signal.SIGKILL,
        uncounted=True,
    ),
    Hint(
        "killed for lack of memory",
        "most probably the kernel, for lack of main memory; else the scheduler or a person",
        "`dmesg | grep -i oom` tells.",
        SMALLER_BATCHES + CHECKPOINTING + SHARDING + NO_OFFLOAD + FEWER_RANKS,
        signal=signal.SIGKILL,
    ),
    Hint(
        "shared memory",
        "a page of shared memory could not be had: /dev/shm is full or small, as in containers with their 64 MB",
        "`df -h /dev/shm` tells. Start the container with --shm-size=8g, or remove what ended programs have left there.",
        signal=signal.SIGBUS,
    ),
    Hint(
        "crash",
        "compiled code of a library crashed; most often builds of torch, CUDA and the driver that do not fit together",
        "The log has the stack. `python -m torch.utils.collect_env` lists the versions.",
        signal=signal.SIGSEGV,
    ),
    Hint(
        "stuck",
        "a rank hangs, and the others wait for it; or a piece of work takes longer than the watchdog waits",
        "The log ends with what every thread of every rank was doing.",
        (Remedy("raise", "hang_timeout_s"),),
        r"no rank has made progress",
    ),
    Hint(
        "collective timeout",
        "a rank waited in vain for the others in a collective operation: one of them hangs, or they disagree on what is next",
        "On GPUs of one machine, try NCCL_P2P_DISABLE=1; between machines, NCCL_SOCKET_IFNAME and the firewall.",
        (Remedy("raise", "collective_timeout_s"),),
        r"Watchdog caught collective operation timeout|Timed out waiting|[Tt]imed out after \d+ ?ms"
        r"|Application timeout caused pair closure|DistStoreError",
    ),
    Hint(
        PORT,
        "another program listens on the port where the ranks meet; one that was picked is tried again on another, once",
        remedies=(Remedy("change, or set to null,", "master_port", (None,)),),
        pattern=r"EADDRINUSE|[Aa]ddress already in use",
    ),
    Hint(
        DISK_FULL,
        "no space is left on the device, or in the quota, of the work directory or of a cache",
        ADVICE,
        (Remedy("raise or set to null", "checkpoint_every", (None,)),),
        DISK_FULL_PATTERN,
    ),
    Hint(
        "no compiler",
        "DeepSpeed compiles its CPU Adam at its first use, which takes a C++ compiler, ninja and torch's version of CUDA",
        "Install them (`ds_report` lists what is missing).",
        (Remedy("or set to false", "offload_optimizer", (False,)),),
        r"CUDA_HOME|CUDAMismatch|Error building extension|Unable to JIT load|Ninja is required|CPUAdamBuilder"
        r"|No such file or directory: '[^']*(c\+\+|g\+\+|gcc|nvcc)'",
    ),
    Hint(
        "damaged weights",
        "a file of weights is cut short or is no safetensors file",
        "Fetch it again, without the hub's cache of it; a Git LFS pointer in place of a file does this, too.",
        (Remedy("see", "path", (None,)),),
        r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|PytorchStreamReader failed",
    ),
    Hint(
        "damaged tokenizer",
        "the tokenizer's files are missing, damaged, or newer than the installed tokenizers library",
        "Fetch the folder again; it needs tokenizer.json and tokenizer_config.json.",
        (Remedy("see", "path", (None,)),),
        r"Couldn't instantiate the backend tokenizer|did not match any variant of untagged enum|Can't load tokenizer",
    ),
    Hint(
        "no hub",
        "the Hugging Face hub cannot be reached, or refuses: no network, no such repository, or terms to be accepted there",
        "Set HF_ENDPOINT for a mirror, HF_TOKEN for a gated repository; or fetch it elsewhere and name the local folder.",
        (Remedy("see", "path", (None,)), Remedy("see", "revision", (None,))),
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|GatedRepoError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|HfHubHTTPError|couldn't connect to 'https|Temporary failure in name resolution|NameResolutionError",
    ),
)
"""The first that fits is shown."""

FOLLOW_UP = re.compile(
    r"Connection (closed|reset) by peer|ncclRemoteError|remote process exited|NCCL communicator was aborted|Broken pipe"
)
"""What a rank says when another one is gone: never the cause."""


def find_hint(
    reason: str, status: int | None = None, kernel_kills: int | None = None
) -> Hint | None:
    """The known failure behind a rank's end.

    Args:
        reason: what the rank left.
        status: exit status of one that left none, the negative number of a signal.
        kernel_kills: processes that the kernel ended for lack of memory meanwhile, on the whole machine; None: not known.
    """
    for hint in HINTS:
        ended_so = status is not None and hint.signal is not None and status == -hint.signal
        if ended_so and (kernel_kills == 0 or not hint.uncounted):
            return hint
        if hint.pattern is not None and re.search(hint.pattern, reason):
            return hint
    return None


def advice(hint: Hint, parameters: Mapping[str, Any]) -> str:
    """What to do, in the names of the parameters and with their present values; those with nothing left to give are out.

    Args:
        hint: the failure.
        parameters: the stage's blocks and `launch`, by their names, as JSON types.
    """
    steps = []
    for remedy in hint.remedies:
        found = [
            f"{place} ({json.dumps(value)})"
            for place, value in leaves(parameters)
            if place.rpartition(".")[2] == remedy.field and value not in remedy.exhausted
        ]
        steps += [f"{remedy.verb} {', '.join(found)}"] if found else []
    return "; ".join([*steps, *filter(None, [hint.advice])])


def as_markdown() -> str:
    """The table for people."""
    rows = ["| failure | recognised by | cause | what helps |", "|---|---|---|---|"]
    for hint in HINTS:
        counted = (
            ", and the kernel's count of processes ended for lack of memory stands still"
            if hint.uncounted
            else ""
        )
        known = (
            f"signal {hint.signal.name}{counted}"
            if hint.signal is not None
            else f"`{hint.pattern}`".replace("|", "\\|")
        )
        fields = [f"{remedy.verb} `{remedy.field}`" for remedy in hint.remedies]
        rows.append(
            f"| {hint.name} | {known} | {hint.cause} | {'; '.join([*fields, *filter(None, [hint.advice])])} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(as_markdown())
