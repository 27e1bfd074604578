"""A pretend accelerator for tests: it refuses what a GPU refuses, and counts waits for the device.

    with StrictDevice() as strict:
        sft.main(job)                  # a tensor in the wrong memory: MisplacedTensorError
    waits = [wait for wait in strict.waits if wait.own and wait.phase == "update"]

Its tensors live in main memory, so results equal those on the CPU bit for bit. They belong to the
device `privateuseone:<LOCAL_RANK>`, a type that torch reserves for extensions. A mark on a tensor's
storage says so, and ends with the storage. Three parts set and read the marks:

- A dispatch mode sees every operator and every collective, also in hooks of the backward pass. It
  marks results, and refuses operators that mix main memory and the device.
- A few methods of `torch.Tensor` would otherwise answer for main memory.
- An accelerator tells DeepSpeed the name of the device.

Unlike a GPU, the device never computes ahead of the host, and its random numbers are the CPU's.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch._C import TensorBase
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_pipeline
from rlhf_pipeline.runtime import heartbeat

TYPE = "privateuseone"
HOST = torch.device("cpu")
OWN_CODE, TORCH_CODE, STANDARD_LIBRARY = (
    f"{Path(module.__file__).parent}{os.sep}" for module in (rlhf_pipeline, torch, os)
)

aten = torch.ops.aten
COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
"""Operators between devices."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operators whose indices may be in main memory."""
TAKE_HOST_NUMBERS = {aten.masked_fill, aten.masked_fill_}
"""Operators that take a number from main memory, as all pointwise ones do."""
DECORATORS = ("typing_extensions",)
"""Modules outside the standard library that wrap functions of torch."""
READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class MisplacedTensorError(RuntimeError):
    """A tensor is in main memory where an operator needs it on the device, or the reverse."""


@dataclass(frozen=True)
class Wait:
    """One wait of the host for the device."""

    kind: str
    """The operator or method that waits."""
    file: str
    line: int
    """The innermost code outside torch and the standard library."""
    phase: str
    step: int | None
    """The phase and step of the program, see `rlhf_pipeline.runtime.heartbeat`."""

    @classmethod
    def here(cls, kind: str) -> Self:
        """A wait at this moment."""
        frame = sys._getframe(1)
        while _passes_on(frame.f_code.co_filename):
            frame = frame.f_back
        now = heartbeat._here
        return cls(kind, frame.f_code.co_filename, frame.f_lineno, now.phase, now.step)

    @property
    def own(self) -> bool:
        """Whether code of this project waits, not a library that it calls."""
        return self.file.startswith(OWN_CODE)

    def __str__(self) -> str:
        return f"{self.file.removeprefix(OWN_CODE)}:{self.line} {self.kind}"


def _passes_on(file: str) -> bool:
    """Whether the code in a file waits only because its caller does."""
    is_standard = file.startswith(STANDARD_LIBRARY) and "site-packages" not in file
    return is_standard or file.startswith((TORCH_CODE, __file__)) or Path(file).stem in DECORATORS


class StrictDevice:
    """The device. It exists inside a `with` block, in one thread."""

    def __init__(self) -> None:
        self.device = torch.device(TYPE, int(os.environ.get("LOCAL_RANK", "0")))
        self.waits: list[Wait] = []
        """All waits so far."""
        self._host_groups: list[torch.distributed.ProcessGroup] = []
        self._parts = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as parts:
            module = _device_module()
            parts.enter_context(mock.patch.object(torch, TYPE, module, create=True))
            parts.callback(sys.modules.pop, f"torch.{TYPE}")
            sys.modules[f"torch.{TYPE}"] = module
            parts.callback(set_accelerator, get_accelerator())
            set_accelerator(StrictAccelerator(self.device))
            parts.enter_context(_collectives_of_objects(self.device))
            new_group = torch.distributed.new_group
            recorded = partial(self._new_group, new_group)
            parts.enter_context(mock.patch.object(torch.distributed, "new_group", recorded))
            # Let `torch.tensor(data, device=...)` call operators, as `data.to(device)` does.
            parts.callback(torch._C._set_only_lift_cpu_tensors, False)
            torch._C._set_only_lift_cpu_tensors(True)
            placement = parts.enter_context(Placement(self))
            for name, method in _methods(self, placement).items():
                parts.enter_context(mock.patch.object(Tensor, name, method))
            self._parts = parts.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.close()

    def _new_group(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        group = function(*args, **options)
        if options.get("backend") == "gloo":
            self._host_groups.append(group)
        return group

    def is_for_main_memory(self, args: Any) -> bool:
        """Whether a collective uses a group that was made with Gloo, not with the device's library.

        The default group is Gloo's, too, but stands for NCCL's.
        """
        for each in args:
            with suppress(RuntimeError, TypeError):  # the kind of reduction is an object, too
                group = torch.distributed.ProcessGroup.unbox(each)
                if any(group.group_name == own.group_name for own in self._host_groups):
                    return True
        return False

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device."""
        return hasattr(tensor.untyped_storage(), "on_strict_device")

    def mark(self, tensor: Tensor) -> None:
        """Put the tensor, and all others with its storage, on the device."""
        tensor.untyped_storage().on_strict_device = True

    def local(self, device: torch.device) -> torch.device:
        """The device that a device of this type means: this one.

        Raises:
            MisplacedTensorError: it is that of another rank.
        """
        if device.index not in (None, self.device.index):
            raise MisplacedTensorError(f"device: found {device}, expected {self.device}")
        return self.device


class Placement(TorchDispatchMode):
    """Follows the marks through every operator."""

    def __init__(self, strict: StrictDevice) -> None:
        super().__init__()
        self._strict = strict
        self._leaving: str | None = None

    def host_copy(self, tensor: Tensor, method: str, **options: Any) -> Tensor:
        """A copy in main memory of a tensor of the device, made by a method of the tensor."""
        self._leaving = method
        try:
            return TensorBase.to(tensor, HOST, **options | {"copy": True})
        finally:
            self._leaving = None

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        enters = self._enters(kwargs)
        leaves = self._leaving is not None and func.overloadpacket is aten._to_copy
        present = any(self._strict.has(tensor) for tensor in _tensors((args, kwargs)))
        if present or func.namespace == "c10d":
            self._refuse_mixture(func, args, kwargs)
        copies = leaves and not kwargs.get("non_blocking", False)
        if copies or ((present or enters) and self._waits(func, args, kwargs)):
            self._strict.waits.append(Wait.here(self._leaving or func.overloadpacket.__name__))
        result = func(*args, **kwargs)
        if (present or enters) and not leaves and func.overloadpacket is not aten.copy_:
            for tensor in _tensors(result):
                self._strict.mark(tensor)
        return result

    def _enters(self, kwargs: dict[str, Any]) -> bool:
        """Whether the caller asks for a result on the device; torch itself computes it on the CPU.

        A caller that names the CPU may be torch, which knows no other device, so that means
        nothing.
        """
        device = kwargs.get("device")
        if device is None or device.type != TYPE:
            return False
        self._strict.local(device)
        kwargs["device"] = HOST
        return True

    def _refuse_mixture(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
        if func.namespace == "c10d" and self._strict.is_for_main_memory(args):
            return
        needed = _needed_on_device(func, args, kwargs)
        if misplaced := [tensor for tensor in needed if not self._strict.has(tensor)]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in misplaced)
            raise MisplacedTensorError(
                f"{func}: found tensors in main memory, shapes {shapes}, expected them on "
                f"{self._strict.device}"
            )

    def _waits(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the host waits for the device before it goes on, if a GPU were the device.

        Numbers, and shapes that depend on values, are read from the device. Main memory is not
        pinned, so a copy from there waits for the copies and kernels before it, if it may.
        """
        has, packet = self._strict.has, func.overloadpacket
        non_blocking = kwargs.get("non_blocking", False)
        if packet is aten._to_copy:
            return not has(args[0]) and not non_blocking
        if packet in COPIES:
            blocking = not non_blocking and not any(args[2:])
            pairs = zip(_tensors(args[0]), _tensors(args[1]), strict=True)
            return any(
                has(source) if not has(target) else not has(source) and source.dim() and blocking
                for target, source in pairs
            )
        if packet in INDEXING:  # a boolean index selects as many rows as are true
            return any(not has(each) or each.dtype == torch.bool for each in _tensors(args[1]))
        return not READS_VALUES.isdisjoint(func.tags)


def _needed_on_device(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensor arguments of an operator on the device that may not be in main memory."""
    if func.namespace == "c10d":
        return [] if "barrier" in func.name() else list(_tensors((args, kwargs)))
    if func.overloadpacket in COPIES:
        return []
    if func.overloadpacket in INDEXING:
        return [args[0], *(tensor for tensor in _tensors(args[2:]) if tensor.dim() > 0)]
    takes_numbers = torch.Tag.pointwise in func.tags or func.overloadpacket in TAKE_HOST_NUMBERS
    names, written = _arguments(func)
    found: list[Tensor] = []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        is_number = isinstance(value, Tensor) and value.dim() == 0 and name not in written
        if not (is_number and takes_numbers):
            found += _tensors(value)
    return found


@cache
def _arguments(func: OpOverload) -> tuple[list[str], set[str]]:
    """The names of an operator's arguments; of those that it writes to."""
    arguments = func._schema.arguments
    written = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
    return [each.name for each in arguments], written


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _methods(strict: StrictDevice, placement: Placement) -> dict[str, Any]:
    """Methods of `torch.Tensor` that torch answers without an operator."""

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target, options = _target_and_options(args, kwargs)
        if target is None:
            return TensorBase.to(tensor, **options)
        if target.type == "cpu" and strict.has(tensor):
            return placement.host_copy(tensor, "to", **options)
        if target.type == TYPE:
            target = strict.local(target)
        if target == strict.device and strict.has(tensor):
            target = HOST  # where torch itself sees the tensor
        return TensorBase.to(tensor, device=target, **options)

    def cpu(tensor: Tensor, **options: Any) -> Tensor:
        if strict.has(tensor):
            return placement.host_copy(tensor, "cpu", **options)
        return TensorBase.cpu(tensor, **options)

    def tolist(tensor: Tensor) -> Any:
        if strict.has(tensor):
            tensor = placement.host_copy(tensor.detach(), "tolist")
        return TensorBase.tolist(tensor)

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if strict.has(tensor) and not force:
            raise TypeError(f"can't convert {strict.device} type tensor to numpy; use Tensor.cpu()")
        return TensorBase.numpy(cpu(tensor), force=force)

    return {
        "device": property(
            lambda tensor: (
                strict.device if strict.has(tensor) else TensorBase.device.__get__(tensor)
            )
        ),
        "is_cpu": property(
            lambda tensor: TensorBase.is_cpu.__get__(tensor) and not strict.has(tensor)
        ),
        "to": to,
        "cpu": cpu,
        "tolist": tolist,
        "numpy": numpy,
    }


def _target_and_options(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, dict[str, Any]]:
    """The device in the arguments of `Tensor.to`, if there is one; the other arguments by name."""
    options = dict(kwargs)
    first, *others = args or (None,)
    if isinstance(first, torch.dtype):
        names, options = ("non_blocking", "copy"), {"dtype": first, **options}
        target = options.pop("device", None)
    else:
        names = ("dtype", "non_blocking", "copy")
        target = options.pop("device", first)
    if (other := options.pop("other", target)) is not None and isinstance(other, Tensor):
        names = ("non_blocking", "copy")
        target, options = other.device, {"dtype": other.dtype, **options}
    options |= dict(zip(names, others, strict=False))
    return None if target is None else torch.device(target), options


class StrictAccelerator(CPU_Accelerator):
    """DeepSpeed's view of the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def device_name(self, device_index: int | None = None) -> str:
        return TYPE if device_index is None else f"{TYPE}:{device_index}"

    def current_device(self) -> int:
        return self._device.index

    def current_device_name(self) -> str:
        return str(self._device)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def _new(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return lambda data: torch.tensor(data, dtype=dtype, device=self._device)

    class Event:
        """An event that has come by the time of the second question."""

        def record(self) -> None:
            self._asked = False

        def query(self) -> bool:
            asked, self._asked = self._asked, True
            return asked

    BFloat16Tensor = property(lambda self: self._new(torch.bfloat16))
    ByteTensor = property(lambda self: self._new(torch.uint8))
    DoubleTensor = property(lambda self: self._new(torch.float64))
    FloatTensor = property(lambda self: self._new(torch.float32))
    HalfTensor = property(lambda self: self._new(torch.float16))
    IntTensor = property(lambda self: self._new(torch.int32))
    LongTensor = property(lambda self: self._new(torch.int64))


def _device_module() -> ModuleType:
    """torch looks for a module of the device's name, with functions like those of `torch.cuda`."""
    module = ModuleType(TYPE)
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _collectives_of_objects(device: torch.device) -> Any:
    """Gloo sends pickled objects from main memory, NCCL from the device."""
    return mock.patch.object(
        distributed_c10d, "_get_object_coll_device", lambda group=None: str(device)
    )
