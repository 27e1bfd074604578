"""Several ranks as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from rlhf_pipeline.distributed.world import World


@dataclass(frozen=True)
class ThreadWorld(World):
    """Ranks that are threads of this process."""

    barrier_of_threads: threading.Barrier
    contributions: list

    def sum(self, tensor):
        self.contributions[self.rank] = tensor.detach().clone()
        self.barrier_of_threads.wait(600)
        total = torch.stack(self.contributions).sum(0)
        self.barrier_of_threads.wait(600)
        return total


@pytest.fixture(scope="session")
def on_threads():
    """Calls a function with each of `ranks` worlds, in parallel threads; returns the results."""

    def run(ranks: int, function) -> list:
        barrier, contributions = threading.Barrier(ranks), [None] * ranks
        worlds = [
            ThreadWorld(rank, ranks, torch.device("cpu"), barrier, contributions)
            for rank in range(ranks)
        ]
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(function, worlds))

    return run
