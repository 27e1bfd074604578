"""Sizes of the tensors that a computation makes."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):
    """Notes how many numbers each new float32 tensor has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.sizes.append(result.numel())
        return result


@pytest.fixture
def float32_sizes():
    """A block that lists the sizes of the float32 tensors that are made inside."""

    @contextmanager
    def recorded():
        with Sizes() as mode:
            yield mode.sizes

    return recorded
