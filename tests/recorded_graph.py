"""A stand-in for CUDA graphs: it records the operators of a step, and replays them.

As on a GPU, a replay runs the same operators on the same memory. It knows nothing of Python: a
number that the host would compute anew for each step keeps its first value, and a result goes to
where the first one went. An operator whose value the host reads cannot be recorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recorder(TorchDispatchMode):
    """Records the operators inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_number = func.overloadpacket is torch.ops.aten.index and all(
            x.dtype == torch.long for x in tensors(args[1])
        )
        if not by_number and not READS_VALUES.isdisjoint(func.tags):
            raise RuntimeError(f"{func}: the host reads a value while a graph is recorded")
        result = func(*args, **(kwargs or {}))
        own = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        new = [x for x in tensors(result) if x.untyped_storage().data_ptr() not in own]
        self.calls.append((func, args, kwargs or {}, new))
        return result

    def replay(self) -> None:
        """Run the operators again; results go to the memory of the first ones."""
        for func, args, kwargs, new in self.calls:
            found = tensors(func(*args, **kwargs))
            for old, value in zip(new, found if new else (), strict=bool(new)):
                old.copy_(value)


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


class Graphs:
    """Records like `decoding.record`, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        recorder = Recorder()
        with recorder:
            step()

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay
