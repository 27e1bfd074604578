"""A reward model trained on preferences of a coin never reaches PPO; one that learned does."""

from __future__ import annotations

import shutil
from random import Random

import pyarrow as pa
import pytest
from ppo_runs import ppo_config
from rank_fixtures import as_artifact, write_table
from tiny_jobs import MAIN, tiny_job, trained

from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.kedro_run.checks import check_gate
from rlhf_pipeline.runtime.manifest import Manifest

DEFAULT = RewardModelConfig.model_fields["gate"].default


def shuffled(rows, seed):
    """The comparisons, each swapped if a coin says so."""
    coin = Random(seed)
    return [(chosen, rejected)[:: coin.choice((1, -1))] for chosen, rejected in rows]


@pytest.fixture
def gate(world, make_model, tmp_path):
    """Trains a reward model on comparisons and asks the gate; a third of them is held out."""

    def gate(rows):
        policy = as_artifact(make_model("llama", seed=1))
        contract, folder = TokenContract.read(policy), tmp_path / "train"
        for part, own in (("train", rows[:96]), ("validation", rows[96:])):
            ids = [str(number) for number in range(len(own))]
            chosen, rejected = zip(*own, strict=True)
            columns = {"id": ids, "prompt_ids": [[5, 6]] * len(ids)}
            columns |= {"chosen_ids": chosen, "rejected_ids": rejected}
            write_table(pa.table(columns), tmp_path / part, contract)
        shutil.copy(tmp_path / "validation" / "validation.arrow", folder)
        inputs = {"sft_model": policy, "comparisons": folder}
        job = tiny_job("reward_model", inputs, tmp_path / "work", trained(0) | {"epochs": 2})
        metrics = MAIN["reward_model"](job)
        Manifest("reward_model", "", 0, {}, {}, {}, metrics, {}).write(tmp_path / "work")
        check_gate(tmp_path / "work", DEFAULT, ppo_config())

    return gate


ROWS = [([20 + n % 9, 1], [40 + n % 7, 1]) for n in range(144)]
"""The first token of an answer tells which one is better."""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
def test_the_gate_refuses_the_coin_of_any_seed(gate, seed):
    with pytest.raises(StageError, match=r"reward_model\.gate: found an accuracy of"):
        gate(shuffled(ROWS, seed))


def test_the_same_rows_as_they_are_pass(gate):
    gate(ROWS)
