"""Known failures of a launched program: how to recognise them, their cause, and what helps.

The table feeds the hints in error messages, and the one in docs/troubleshooting.md.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGBUS, SIGKILL, SIGSEGV, Signals
from typing import Any

from rlhf_pipeline.config.block import leaves

GPU_MEMORY, CPU_MEMORY, PORT = "GPU memory", "main memory", "port in use"
DISK_FULL = "disk full"


@dataclass(frozen=True)
class Remedy:
    """A parameter that helps."""

    action: str
    """An imperative sentence in which {} stands for the parameter."""
    field: str
    """The last part of the parameter's name."""
    exhausted: tuple[Any, ...] = ()
    """Values that leave nothing to change."""


@dataclass(frozen=True)
class Hint:
    """One known failure, recognised either by a pattern or by a signal."""

    name: str
    cause: str
    advice: str = ""
    """What to do besides changing parameters, in complete sentences."""
    remedies: tuple[Remedy, ...] = ()
    pattern: str | None = None
    """Regular expression for the failing rank's reason."""
    signal: Signals | None = None
    """The signal that ended a rank."""
    requires_zero_kernel_kills: bool = False
    """True: applies only if the kernel killed no process for lack of memory during the launch."""


MICRO_BATCHES = ("micro_batch_tokens", "batch_size_per_gpu")
"""Fields that bound the memory of one forward pass. They change results only by rounding."""
OFFLOADS = ("offload_optimizer", "offload_parameters")


def _set(value: bool, *names: str) -> tuple[Remedy, ...]:
    return tuple(Remedy(f"Set {{}} to {json.dumps(value)}.", name, (value,)) for name in names)


SMALLER_BATCHES = tuple(Remedy("Lower {}.", name, (1,)) for name in MICRO_BATCHES)
HALVING = _set(True, "halve_micro_batch_on_oom")
SHARDING = (Remedy("Raise {}.", "zero_stage", (3, None)),)
CHECKPOINTING = _set(True, "gradient_checkpointing")
OFFLOAD, NO_OFFLOAD = _set(True, *OFFLOADS), _set(False, *OFFLOADS)
FEWER_RANKS = (Remedy("Lower {}.", "processes", (1,)),)
CHECK_PATH = (Remedy("Check {}.", "path", (None,)),)

HINTS = (
    Hint(
        GPU_MEMORY,
        "a GPU ran out of memory",
        "",
        SMALLER_BATCHES + HALVING + CHECKPOINTING + SHARDING + OFFLOAD,
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|torch\.OutOfMemoryError"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Hint(
        CPU_MEMORY,
        "this machine ran out of main memory",
        "",
        SMALLER_BATCHES + HALVING + CHECKPOINTING + SHARDING + NO_OFFLOAD + FEWER_RANKS,
        r"DefaultCPUAllocator|MemoryError|std::bad_alloc|Cannot allocate memory",
    ),
    Hint(
        "killed from outside",
        "a scheduler (a limit of the job) or a person; the kernel killed no process for lack of "
        "memory meanwhile",
        "Check the scheduler's record of the job.",
        signal=SIGKILL,
        requires_zero_kernel_kills=True,
    ),
    Hint(
        "killed for lack of memory",
        "most likely the kernel, for lack of main memory; otherwise a scheduler or a person",
        "Check with `dmesg | grep -i oom`.",
        SMALLER_BATCHES + CHECKPOINTING + SHARDING + NO_OFFLOAD + FEWER_RANKS,
        signal=SIGKILL,
    ),
    Hint(
        "shared memory",
        "shared memory (/dev/shm) is full or too small; containers have 64 MB by default",
        "Check with `df -h /dev/shm`. Start the container with --shm-size=8g, or remove files that "
        "ended programs left there.",
        signal=SIGBUS,
    ),
    Hint(
        "crash",
        "compiled code of a library crashed; most often torch, CUDA and the driver do not fit "
        "together",
        "Read the stack in the log. List the versions with `python -m torch.utils.collect_env`.",
        signal=SIGSEGV,
    ),
    Hint(
        "stuck",
        "a rank hangs and the others wait for it, or a piece of work takes longer than the "
        "watchdog waits",
        "Read the end of the log: it shows what every thread of every rank was doing.",
        (Remedy("Raise {}.", "hang_timeout_s"),),
        r"no rank has made progress",
    ),
    Hint(
        "collective timeout",
        "a rank waited too long for the others in a collective operation: one of them hangs, or "
        "the ranks called different operations",
        "On GPUs of one machine, try NCCL_P2P_DISABLE=1. Between machines, check "
        "NCCL_SOCKET_IFNAME and the firewall.",
        (Remedy("Raise {}.", "collective_timeout_s"),),
        r"Watchdog caught collective operation timeout|Timed out waiting"
        r"|[Tt]imed out after \d+ ?ms|Application timeout caused pair closure|DistStoreError",
    ),
    Hint(
        PORT,
        "another program uses the port at which the ranks meet; a port picked by the pipeline is "
        "replaced by another one, once",
        remedies=(Remedy("Change {} or set it to null.", "master_port", (None,)),),
        pattern=r"EADDRINUSE|[Aa]ddress already in use",
    ),
    Hint(
        DISK_FULL,
        "the disk or the quota of the work directory or of a cache is full",
        "Free some space: check with `df -h` and `du -sh data/*`. Finished stages keep their "
        "exports, unfinished stages keep `keep_last` checkpoints; `kedro rlhf clean` shows what "
        "can be removed.",
        (Remedy("Raise {} or set it to null.", "checkpoint_every", (None,)),),
        r"No space left on device|Disk quota exceeded|ENOSPC|MiB free",
    ),
    Hint(
        "no compiler",
        "DeepSpeed compiles its CPU Adam at first use; this requires a C++ compiler, ninja and the "
        "CUDA version of torch",
        "Install what `ds_report` lists as missing.",
        _set(False, "offload_optimizer"),
        r"CUDA_HOME|CUDAMismatch|Error building extension|Unable to JIT load|Ninja is required"
        r"|CPUAdamBuilder|No such file or directory: '[^']*(c\+\+|g\+\+|gcc|nvcc)'",
    ),
    Hint(
        "damaged weights",
        "a file of weights is truncated or not in safetensors format; it may be a Git LFS pointer",
        "Download the file again, without the hub's cache.",
        CHECK_PATH,
        r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer"
        r"|PytorchStreamReader failed",
    ),
    Hint(
        "damaged tokenizer",
        "the tokenizer's files are missing, damaged, or too new for the installed tokenizers "
        "library",
        "Download the folder again; it must contain tokenizer.json and tokenizer_config.json.",
        CHECK_PATH,
        r"Couldn't instantiate the backend tokenizer|did not match any variant of untagged enum"
        r"|Can't load tokenizer",
    ),
    Hint(
        "hub unavailable",
        "the Hugging Face hub cannot be reached or refuses access: no network, an unknown "
        "repository, or terms to accept",
        "Set HF_ENDPOINT to use a mirror, HF_TOKEN for a gated repository. Or download the files "
        "elsewhere and set the path to the local folder.",
        (*CHECK_PATH, Remedy("Check {}.", "revision", (None,))),
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|GatedRepoError|RepositoryNotFoundError"
        r"|RevisionNotFoundError|HfHubHTTPError|couldn't connect to 'https"
        r"|Temporary failure in name resolution|NameResolutionError",
    ),
)
"""The first that applies is shown."""

FOLLOW_UP = re.compile(
    r"Connection (closed|reset) by peer|ncclRemoteError|remote process exited"
    r"|NCCL communicator was aborted|Broken pipe"
)
"""What a rank reports when it lost a peer: never the first cause."""


def find_hint(
    reason: str, status: int | None = None, kernel_kills: int | None = None
) -> Hint | None:
    """The known failure behind a rank's end.

    Args:
        reason: the reason that the rank left.
        status: exit status of a rank that left none, the negative number of a signal.
        kernel_kills: processes on the whole machine that the kernel killed for lack of memory
            during the launch. None: unknown.
    """
    return next((hint for hint in HINTS if _applies(hint, reason, status, kernel_kills)), None)


def _applies(hint: Hint, reason: str, status: int | None, kernel_kills: int | None) -> bool:
    if hint.pattern is not None:
        return re.search(hint.pattern, reason) is not None
    ended_by_it = hint.signal is not None and status == -hint.signal
    return ended_by_it and (kernel_kills == 0 or not hint.requires_zero_kernel_kills)


def advice(hint: Hint, parameters: Mapping[str, Any]) -> str:
    """What to do, with the names and values of the parameters that are not exhausted.

    `parameters` are the stage's blocks and `launch`, by name, as JSON types.
    """
    sentences = []
    for remedy in hint.remedies:
        sentences += [
            remedy.action.format(f"{name} ({json.dumps(value)})")
            for name, value in leaves(parameters)
            if name.rpartition(".")[2] == remedy.field and value not in remedy.exhausted
        ]
    return " ".join([*sentences, *filter(None, [hint.advice])])
