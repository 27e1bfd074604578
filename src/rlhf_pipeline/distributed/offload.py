"""What sampling does not need leaves the GPU for main memory, and comes back.

A storage gives up its memory and gets other memory later. It stays the same object, so DeepSpeed's
own views of it stay valid at every ZeRO stage. `DeepSpeedEngine.offload_states` makes new tensors
instead, has nothing for stage 0, and refuses torch's AdamW at stage 3.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_pipeline.distributed.engine import free_memory
from rlhf_pipeline.distributed.lean_deepspeed import get_accelerator
from rlhf_pipeline.distributed.world import on_gpu
from rlhf_pipeline.runtime import heartbeat

PIECE = 2**24
"""Bytes of a pinned copy. Torch reserves a power of two for each and keeps it for the next time."""


def weights(model: nn.Module) -> Iterator[Tensor]:
    """The weights of a model: whole ones, and the own parts of sharded ones."""
    for parameter in model.parameters():
        yield from (parameter.data, getattr(parameter, "ds_tensor", parameter.data))


@contextmanager
def in_main_memory(tensors: Iterable[Tensor], staying: Iterable[Tensor]) -> Iterator[None]:
    """Keep `tensors` in main memory inside the block, where nothing may read or write them.

    What shares memory with those that are `staying` stays, too.
    """
    needed = {tensor.untyped_storage().data_ptr() for tensor in staying}
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "cpu"]
    moved = []
    for pointer, storage in {storage.data_ptr(): storage for storage in storages}.items():
        if pointer in needed:
            continue
        own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).split(PIECE)
        copies = [torch.empty(len(x), dtype=torch.uint8, pin_memory=on_gpu()) for x in own]
        torch._foreach_copy_(copies, own, non_blocking=True)
        moved.append((storage, storage.nbytes(), own, copies))
        storage.resize_(0)
        heartbeat.tick()
    free_memory()  # whole blocks, before something lasting takes a part of them
    try:
        yield
    finally:
        for storage, size, own, copies in moved:
            storage.resize_(size)
            torch._foreach_copy_(own, copies, non_blocking=True)
            heartbeat.tick()
        get_accelerator().synchronize()  # ZeRO-3 gathers on a stream that waits for no other
