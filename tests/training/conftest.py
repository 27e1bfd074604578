"""One rank in this process, for every test of training; several ranks in processes of their own for some."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import rlhf_pipeline
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.models.loading import load_scores, load_tokenizer
from rlhf_pipeline.models.scalar_head import store_score_mean


@pytest.fixture(autouse=True)
def _signals_end_the_tests():
    """Training takes SIGTERM for a request to save; without this it would be taken from pytest, too."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="package")
def environment():
    """One rank's environment, with a port of its own at each use."""

    def make() -> dict[str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip

    return make


@pytest.fixture(scope="package")
def world(environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield join(0, timeout_s=60)
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class ThreadWorld(World):
    """Ranks that are threads of this process."""

    meeting: threading.Barrier
    sent: list

    def sum(self, tensor):
        self.sent[self.rank] = tensor.detach().clone()
        self.meeting.wait(30)
        total = torch.stack(self.sent).sum(0)
        self.meeting.wait(30)
        return total


@pytest.fixture(scope="session")
def on_threads():
    """Calls a function with each of `ranks` worlds at once, in threads that talk to each other; returns what each made."""

    def run(ranks: int, function) -> list:
        meeting, sent = threading.Barrier(ranks), [None] * ranks
        worlds = [
            ThreadWorld(rank, ranks, torch.device("cpu"), meeting, sent) for rank in range(ranks)
        ]
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(function, worlds))

    return run


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """Runs a test file as a program, by DeepSpeed's launcher: its main part gets one JSON argument and a folder."""

    def run(file: str, argument: object, *, ranks: int = 2, accelerator: str = "cpu") -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--num_gpus", str(ranks), "--master_port", str(port), "--no_local_rank"]
        source = Path(rlhf_pipeline.__file__).parents[1]
        ended = subprocess.run(
            [Path(sys.executable).with_name("deepspeed"), *options, file, json.dumps(argument, default=str), folder],
            env=os.environ | {"PYTHONPATH": str(source), "DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
        return folder

    return run


@pytest.fixture(scope="session")
def ppo_inputs(make_model, tmp_path_factory):
    """A policy, a reward model with a random head, and eight prompts."""
    sft = make_model("llama", seed=1)
    reward = tmp_path_factory.mktemp("reward")
    model = load_scores(sft, "fp32", new_head=True)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.classifier.score.weight)
    model.classifier.save_pretrained(reward)
    load_tokenizer(sft).save_pretrained(reward)
    TokenContract.read(sft).write(reward)
    store_score_mean(reward, 0.1)
    prompts = tmp_path_factory.mktemp("prompts")
    TokenContract.read(sft).write(prompts)
    table = pa.table(
        {
            "id": [str(i) for i in range(8)],
            "prompt_ids": [[5 + i] * (1 + i % 3) for i in range(8)],
            "source": ["files"] * 8,
            "messages": [[{"role": "user", "content": str(i)}] for i in range(8)],
        }
    )
    for name in ("train", "validation"):
        with (
            pa.OSFile(str(prompts / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    return {"prompts": prompts, "sft_model": sft, "reward_model": reward}
