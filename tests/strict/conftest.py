"""Inputs of every program, with tiny models and eight rows."""

import shutil

import pyarrow as pa
import pytest
from rank_fixtures import as_artifact, write_table
from strict_device import StrictDevice

from rlhf_pipeline.data.token_contract import TokenContract


@pytest.fixture(scope="session")
def inputs(ppo_inputs, make_model, tmp_path_factory):
    """Folders by the name of the input."""
    contract, rows = TokenContract.read(ppo_inputs["sft_model"]), range(8)
    prompts = {"id": [str(i) for i in rows], "prompt_ids": [[5 + i] * (1 + i % 3) for i in rows]}
    demonstrations = prompts | {
        "response_ids": [[20 + i] * (i % 4) + [1] for i in rows],
        "loss_mask": [[True] * (i % 4 + 1) for i in rows],
    }
    comparisons = prompts | {
        "chosen_ids": [[20 + i] * (i % 4) + [1] for i in rows],
        "rejected_ids": [[40 + i] * (i % 5) + [1] for i in rows],
    }
    tables = {"demonstrations": demonstrations, "comparisons": comparisons}
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


@pytest.fixture
def strict(world):
    """The device, for one rank in this process."""
    with StrictDevice() as device:
        yield device
