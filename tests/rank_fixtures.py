"""Fixtures for tests of training code: one rank in this process, or several ranks under DeepSpeed.

Loaded by `conftest.py` as a plugin.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import warm
from ports import reserved_port

import rlhf_pipeline
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages.launch.node_program import launcher_of_machine

TESTS = Path(__file__).parent


def as_artifact(folder: Path) -> Path:
    """The folder with a manifest, as if a stage had finished it."""
    Manifest("test", "f", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


def write_table(table: pa.Table, folder: Path, contract: TokenContract) -> Path:
    """Make the folder a phase of a split: the rows for training and for validation."""
    folder.mkdir(exist_ok=True)
    contract.write(folder)
    for name in ("train", "validation"):
        path = str(folder / f"{name}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return as_artifact(folder)


PAUSE = """
import sys, time
from pathlib import Path

def pause(event, arguments):
    if event == "os.mkdir" and str(arguments[0]).endswith("step-{step:08d}.partial"):
        while Path({pause!r}).exists():
            time.sleep(0.01)

sys.addaudithook(pause)
"""


def pause_before_checkpoint(step: int, folder: Path, pause: Path) -> None:
    """Let training programs pause before they write the checkpoint of a step.

    They need `folder` in their PYTHONPATH: Python runs `sitecustomize.py` when it starts. They
    pause as long as the file `pause` exists.
    """
    (folder / "sitecustomize.py").write_text(PAUSE.format(step=step, pause=str(pause)))


@pytest.fixture(autouse=True)
def _restore_sigterm_handler():
    """Training replaces the handler of SIGTERM. Without this, pytest would ignore the signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def single_rank() -> Iterator[dict[str, str]]:
    """The environment variables of a single rank."""
    with reserved_port() as port:
        yield {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip


@pytest.fixture
def rank_environment():
    """Environment variables for a program that is a single rank."""
    with single_rank() as variables:
        yield variables


@pytest.fixture(scope="session")
def _process_group():
    """DeepSpeed keeps process groups for the life of the process, so one group serves all tests."""
    import torch

    from rlhf_pipeline.distributed.products import use_onednn
    from rlhf_pipeline.distributed.world import join

    with single_rank() as variables:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")  # `join` would set it for all later programs
            world = join(0, timeout_s=600)
        use_onednn(False)  # all tests multiply alike; `join` may have chosen it
        yield world, variables
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def world(_process_group):
    """One rank, in this process; its environment variables are set during the module's tests."""
    world, variables = _process_group
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield world


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """Runs a test file as a program under DeepSpeed's launcher; returns a folder with its results.

    The program gets two arguments: a JSON value, and the folder.
    """

    def run(file: str, argument: object, *, ranks: int = 2, accelerator: str = "cpu") -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        environment = {
            "PYTHONPATH": f"{Path(rlhf_pipeline.__file__).parents[1]}{os.pathsep}{TESTS}",
            "DS_ACCELERATOR": accelerator,
            "OMP_NUM_THREADS": "1",
        }
        with reserved_port() as port:
            devices = [str(rank) for rank in range(ranks)]
            launcher = launcher_of_machine([devices], 0, "127.0.0.1", port)
            program = [file, json.dumps(argument, default=str), str(folder)]
            code, output = warm.output_of([*launcher, *program], os.environ | environment)
        assert code == 0, output[-12000:]
        return folder

    return run


@pytest.fixture(scope="session")
def ppo_inputs(make_ppo_inputs, make_model):
    """A policy, a reward model with a random head, and eight prompts."""
    return make_ppo_inputs(make_model("llama", seed=1))


@pytest.fixture(scope="session")
def make_ppo_inputs(tmp_path_factory):
    """Makes the inputs of PPO for a policy: a reward model with a random head, eight prompts."""
    import torch

    from rlhf_pipeline.models.loading import load_tokenizer
    from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean

    def make(sft: Path) -> dict[str, Path]:
        reward = tmp_path_factory.mktemp("reward")
        model = load_scores(sft, "fp32", new_head=True)
        torch.manual_seed(5)
        torch.nn.init.normal_(model.classifier.score.weight)
        model.classifier.save_pretrained(reward)
        load_tokenizer(sft).save_pretrained(reward)
        TokenContract.read(sft).write(reward)
        store_score_mean(reward, 0.1)
        report = {"pairs": 8, "margin": 0.5, "margin_square": 1.0, "over_length": {"difference": 0}}
        (reward / "reward_report.json").write_text(json.dumps(report))
        table = pa.table(
            {
                "id": [str(i) for i in range(8)],
                "prompt_ids": [[5 + i] * (1 + i % 3) for i in range(8)],
                "source": ["files"] * 8,
                "messages": [[{"role": "user", "content": str(i)}] for i in range(8)],
                "reference": [str(i) for i in range(8)],
            }
        )
        prompts = write_table(table, tmp_path_factory.mktemp("prompts"), TokenContract.read(sft))
        return {
            "prompts": prompts,
            "sft_model": as_artifact(sft),
            "reward_model": as_artifact(reward),
        }

    return make


@pytest.fixture(scope="session")
def program_inputs(ppo_inputs, make_model, tmp_path_factory):
    """Inputs of every program, with tiny models and eight rows, by the name of the input."""
    contract, rows = TokenContract.read(ppo_inputs["sft_model"]), range(8)
    prompts = {"id": [str(i) for i in rows], "prompt_ids": [[5 + i] * (1 + i % 3) for i in rows]}
    demonstrations = prompts | {
        "response_ids": [[20 + i] * (i % 4) + [1] for i in rows],
        "loss_mask": [[True] * (i % 4 + 1) for i in rows],
    }
    comparisons = {
        "chosen_ids": [[20 + i] * (i % 4) + [1] for i in rows],
        "rejected_ids": [[40 + i] * (i % 5) + [1] for i in rows],
    }
    answers = {"response_ids": demonstrations["response_ids"], "label": [i % 3 != 0 for i in rows]}
    tables = {"demonstrations": demonstrations, "comparisons": prompts | comparisons}
    tables["labelled"] = prompts | answers
    folders = {
        name: write_table(pa.table(columns), tmp_path_factory.mktemp(name), contract)
        for name, columns in tables.items()
    }
    folders["prompts"] = tmp_path_factory.mktemp("prompts")
    shutil.copytree(ppo_inputs["prompts"], folders["prompts"], dirs_exist_ok=True)
    shutil.copy(folders["prompts"] / "validation.arrow", folders["prompts"] / "test.arrow")
    models = {
        "base_model": ppo_inputs["sft_model"],
        "ppo_model": as_artifact(make_model("llama", seed=2)),
    }
    return ppo_inputs | folders | models
