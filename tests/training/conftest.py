"""Several ranks as threads of one process; inputs of SFT."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pytest
import torch
from ppo_runs import ppo_config, run_ppo
from rank_fixtures import write_table
from transformers import PreTrainedModel

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World


@dataclass(frozen=True, kw_only=True)
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

    def gather(self, value):
        self.contributions[self.rank] = value
        self.barrier_of_threads.wait(600)
        found = list(self.contributions)
        self.barrier_of_threads.wait(600)
        return found

    def most(self, numbers):
        own = torch.zeros(self.size, len(numbers), dtype=torch.long)
        own[self.rank] = torch.tensor(numbers)
        return self.sum(own).amax(0).tolist()


@pytest.fixture(scope="session")
def on_threads():
    """Calls a function with each of `ranks` worlds, in parallel threads; returns the results."""

    def run(ranks: int, function) -> list:
        shared = {"barrier_of_threads": threading.Barrier(ranks), "contributions": [None] * ranks}
        worlds = [ThreadWorld(n, ranks, torch.device("cpu"), **shared) for n in range(ranks)]
        with loaded_one_by_one(), ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(function, worlds))

    return run


@contextmanager
def loaded_one_by_one():
    """Threads load their models one after the other.

    While transformers loads a model, it replaces `PreTrainedModel.tie_weights` and torch's default
    type for the whole process. Two loads at once would leave the replacement for later tests.
    """
    load, lock = PreTrainedModel.__dict__["from_pretrained"], threading.RLock()

    def from_pretrained(cls, *args, **kwargs):
        with lock:
            return load.__func__(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load


@pytest.fixture(scope="module")
def sft_inputs(make_model, tmp_path_factory):
    """A tiny model and 16 demonstrations, for training and for validation."""
    table = pa.table(
        {
            "id": [str(i) for i in range(16)],
            "prompt_ids": [[5 + i] * (1 + i % 3) for i in range(16)],
            "response_ids": [[20 + i, 30 + i, 1] for i in range(16)],
            "loss_mask": [[True] * 3] * 16,
        }
    )
    model = make_model("llama", seed=1)
    rows = write_table(table, tmp_path_factory.mktemp("rows"), TokenContract.read(model))
    return {"base_model": model, "demonstrations": rows}


@pytest.fixture
def train_ppo(ppo_inputs, world, tmp_path):
    """Runs PPO with changed parameters, in a subfolder if a test has several runs."""

    def run(folder="", *, inputs=ppo_inputs, generator=None, answers=0, **changes):
        config = ppo_config(**changes)
        return run_ppo(
            config, inputs, world, tmp_path / folder, generator=generator, answers=answers
        )

    return run


@pytest.fixture(scope="module")
def trained(ppo_inputs, world, tmp_path_factory):
    """A finished PPO of two steps."""
    return run_ppo(ppo_config(), ppo_inputs, world, tmp_path_factory.mktemp("ppo"))
