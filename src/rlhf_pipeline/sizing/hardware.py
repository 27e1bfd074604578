"""The machines that a plan is for: GPUs by name, and the ones at hand."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_pipeline.errors import ConfigError, suggestion

GIB = 2**30
GPUS: dict[str, int] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""GiB of memory by name, as NVIDIA's data sheets say."""
WITHOUT_BF16 = ("t4", "v100-32")


@dataclass(frozen=True)
class Hardware:
    """Nodes (machines) with equal ranks."""

    ranks: int
    """Ranks on each node: GPUs, or processes on the CPU."""
    nodes: int = 1
    gpu_memory: int | None = None
    """Bytes of each GPU; None: the ranks are on the CPU."""
    main_memory: int | None = None
    """Bytes of each node; None: not known."""
    name: str = "CPU"
    total: int | None = None
    """All ranks, if not every node has as many as `ranks`, the most."""
    has_bf16: bool = False
    """Whether the GPUs compute in bf16: Ampere and newer."""

    @property
    def world(self) -> int:
        return self.total or self.ranks * self.nodes

    @property
    def on_gpu(self) -> bool:
        return self.gpu_memory is not None

    @property
    def rank_memory(self) -> int | None:
        """Bytes that a rank may use: its GPU's, or its share of main memory."""
        if self.gpu_memory is not None:
            return self.gpu_memory
        return None if self.main_memory is None else self.main_memory // self.ranks


def at_hand(ranks: Sequence[int], gpus: list[str]) -> Hardware:
    """This machine, which stands for all nodes with so many `ranks` each, on the CPU without
    `gpus`.

    `gpus` are numbers or UUIDs, of which the smallest GPU counts. If nvidia-smi does not list them,
    no memory is known.
    """
    here = Hardware(max(ranks), len(ranks), main_memory=main_memory(), total=sum(ranks))
    if not gpus:
        return here
    listing = ""
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=memory.total,compute_cap,name"]
        command.append("--format=csv,noheader,nounits")
        command.append(f"--id={','.join(gpus)}")
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = [line.split(", ", 2) for line in listing.splitlines() if line.split(",")[0].isdigit()]
    if not found:
        return replace(here, main_memory=None)
    mebibytes, name = min((int(memory), name) for memory, _, name in found)
    has_bf16 = all(re.match(r"[89]\.|\d\d", capability) for _, capability, _ in found)
    return replace(here, gpu_memory=mebibytes * 2**20, name=name, has_bf16=has_bf16)


def main_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process may use, by `proc` and `sys` in `root`, or None."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2, version 1
            mount = root / "sys/fs/cgroup" / controllers
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            place = mount.joinpath(*Path(group).parts[1:])
            limits += [folder / file for folder in (place, *place.parents)]
    found = [int(text) for text in map(_text, limits) if text.isdigit()]
    total = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    if total is not None:
        found.append(int(total[1]) * 1024)
    return min(found, default=None)


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def named(gpu: str | None, gpus: str | None) -> Hardware:
    """The hardware of the options `--gpu` (a name in `GPUS`, or GiB), which wins over the size in
    `--gpus` (8x80, 2x8x80; None: one GPU). Raises ConfigError if an option has another form."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)", gpus or "1x80")
    if match is None:
        raise ConfigError(
            f"--gpus: found {gpus!r}, expected GPUs x GiB such as 8x80, or nodes x GPUs x GiB "
            "such as 2x8x80"
        )
    size = gpu or match[3]
    if size not in GPUS and not re.fullmatch(r"[1-9]\d*", size):
        raise ConfigError(
            f"--gpu: found {size!r}{suggestion(size, GPUS)}, expected gibibytes or one of "
            f"{', '.join(GPUS)}"
        )
    memory = GIB * (GPUS[size] if size in GPUS else int(size))
    name = size if size in GPUS else "GPU"
    has_bf16 = size not in WITHOUT_BF16
    return Hardware(int(match[2]), int(match[1] or 1), memory, name=name, has_bf16=has_bf16)
