"""The ranks that train together, the collectives between them, and the device of this rank."""

import atexit
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore

from rlhf_pipeline.distributed.products import prefers_onednn, use_onednn
from rlhf_pipeline.distributed.zero import deepspeed, get_accelerator
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.program import DETERMINISTIC, LOOPBACK, RENDEZVOUS


@dataclass(frozen=True)
class World:
    """The ranks that train together, as seen by one of them."""

    rank: int
    size: int
    device: torch.device
    host: torch.distributed.ProcessGroup | None = None
    """Collectives of tensors in main memory. None: the default group, if it is Gloo."""
    deterministic: bool = False
    """Whether a GPU is to repeat its results bit for bit, see `launch.deterministic`."""

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks. The host does not wait for the device."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.host)
        return found.tolist()

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over all ranks, on this rank's device; the argument is not changed."""
        # NCCL sums tensors of the device only.
        total = tensor.detach().to(self.device, non_blocking=True, copy=True)
        torch.distributed.all_reduce(total)
        return total

    def sums(
        self, values: Mapping[str, Tensor], *, equal: Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Additive scalars summed over all ranks, in one collective.

        `equal` are scalars on the device that all ranks already have, which the host reads at the
        same time: it waits for the device once.
        """
        known = equal or {}
        total = self.sum(torch.stack([value.detach().double() for value in values.values()]))
        found = torch.cat([total, *(value.double().view(1) for value in known.values())])
        return dict(zip([*values, *known], found.tolist(), strict=True))

    def any(self, condition: bool) -> bool:
        """Whether the condition is true on at least one rank."""
        return bool(self.sum(torch.tensor(float(condition))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; see `gather_json`."""
        return gather_json(value, torch.device("cpu"), self.host)

    def barrier(self) -> None:
        torch.distributed.barrier()


def join(seed: int, *, timeout_s: float) -> World:
    """Join the other ranks of this launch. All use the same seed, so they draw equal new weights.

    Raises StageError if torch does not find the GPU of this rank.
    """
    limit, distributed = timedelta(seconds=timeout_s), torch.distributed
    device = take_device()  # before NCCL, which would take the first GPU on every rank
    if not on_gpu():
        # Whoever reads this table starts compilers. DeepSpeed reads it for one operation, never on
        # GPUs: shared memory needs a compiler and leaves 69 MB per rank in /dev/shm, for
        # tensor-parallel inference only.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    # For groups that are made without a timeout, as DeepSpeed's are: NCCL's default is 10 minutes.
    groups = distributed.distributed_c10d
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = limit
    if not distributed.is_initialized():
        _meet(limit)
    deepspeed.init_distributed(timeout=limit, verbose=False)
    atexit.register(_leave)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.manual_seed(seed)
    host = None if device.type == "cpu" else distributed.new_group(backend="gloo", timeout=limit)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    world = World(rank, size, device, host, deterministic=DETERMINISTIC in os.environ)
    if not on_gpu():
        use_onednn(not world.any(not prefers_onednn()))
    return world


def gather_json(
    value: Any, device: torch.device, group: torch.distributed.ProcessGroup | None = None
) -> list[Any]:
    """The values of all ranks of a group, by rank, as JSON, which is data and never code.

    A tuple becomes a list, and a key a text. The group exchanges tensors on this device.
    """
    text = json.dumps(value, default=lambda number: number.item()).encode()
    own = torch.tensor([len(text)], device=device)
    lengths = [own.clone() for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(lengths, own, group=group)
    sizes = torch.cat(lengths).tolist()
    own = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(texts, own, group=group)
    return [json.loads(found.cpu().numpy().tobytes()) for found in texts]


def _meet(timeout: timedelta) -> None:
    """Create a process group through a store: the driver's private file, or MASTER_ADDR alone.

    The store that torch creates by itself listens on every interface and accepts any command.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = socket.gethostbyname(os.environ["MASTER_ADDR"])
    if RENDEZVOUS in os.environ:
        store: Store = FileStore(os.environ[RENDEZVOUS], size)
        store.set_timeout(timeout)
    else:
        port, listener = int(os.environ["MASTER_PORT"]), None
        if rank == 0:
            listener = socket.create_server((address, port), backlog=size).detach()
        store = TCPStore(address, port, size, rank == 0, timeout, master_listen_fd=listener)
    if (interface := _interface_to(address)) is not None:
        # By default, Gloo uses the interface that the machine's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.distributed.init_process_group(
        get_accelerator().communication_backend_name(),
        timeout=timeout,
        world_size=size,
        rank=rank,
        store=store,
        # With its GPU, NCCL connects at once, so a broken network fails here and not later.
        device_id=own_device() if on_gpu() else None,
    )


def _interface_to(address: str) -> str | None:
    """The network interface by which this machine reaches an address; None if it is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = probe.getsockname()[0]
    if own.startswith("127."):
        own = LOOPBACK
    found = psutil.net_if_addrs().items()
    return next((name for name, all_ in found if own in [each.address for each in all_]), None)


def _leave() -> None:
    """Close the connections before the interpreter exits; their threads could abort the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on_gpu() -> bool:
    """Whether the ranks compute on GPUs: DeepSpeed's decision, as the driver has prescribed it.

    `torch.cuda.is_available()` may be true although the user hid the GPUs: DeepSpeed's launcher
    sets CUDA_VISIBLE_DEVICES for its ranks, on a CPU as well.
    """
    return bool(get_accelerator().device_name() == "cuda")


def take_device() -> torch.device:
    """Make the GPU with this rank's local number, or the CPU, the current device, and return it.

    Raises StageError if torch does not find that GPU.
    """
    if not on_gpu():
        return own_device()
    number, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= found:
        visible = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        raise StageError(
            f"torch: found {found} GPUs with {visible}, expected at least {number + 1}, one for "
            "each rank. Fix: check the driver with `nvidia-smi` and torch with `python -m "
            "torch.utils.collect_env`; or empty CUDA_VISIBLE_DEVICES to train on the CPU"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def own_device() -> torch.device:
    """The device that `take_device` has taken."""
    return torch.device(get_accelerator().current_device_name())
