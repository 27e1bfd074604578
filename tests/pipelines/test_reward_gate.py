"""A reward model trained on preferences of a coin never reaches PPO; one that learned does."""

from __future__ import annotations

import json
import shutil
from random import Random

import pyarrow as pa
import pytest
from conftest import PROJECT, Project
from ppo_runs import ppo_config
from rank_fixtures import as_artifact, write_table
from tiny_jobs import MAIN, tiny_job, trained

from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.run.checks import check_gate
from rlhf_pipeline.runtime.manifest import Manifest, verify

DEFAULT = RewardModelConfig.model_fields["gate"].default
SOURCES = """\
split:
  sources:
    - name: synthetic
      samples: 600
      phases: [sft, ppo]
    - name: files
      path: {path}
      phases: [reward_model]
      columns: {{prompt: prompt, chosen: chosen, rejected: rejected}}
  validation_fraction: 0.2
reward_model:
  gate: {gate}
  epochs: 2
launch:
  processes: 1
"""


def shuffled(rows, seed):
    """The comparisons, each swapped if a coin says so."""
    coin = Random(seed)
    return [(chosen, rejected)[:: coin.choice((1, -1))] for chosen, rejected in rows]


@pytest.mark.long
def test_shuffled_preferences_end_the_run_before_ppo(tmp_path):
    project = Project(tmp_path / "data")
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    rows = [(f"It is {n}.", f"No idea what {n} is.") for n in range(300)]

    def run(rows, last, *, check):
        file = tmp_path / "rows.jsonl"
        lines = [
            json.dumps({"prompt": f"What is {n}?", "chosen": chosen, "rejected": rejected})
            for n, (chosen, rejected) in enumerate(rows)
        ]
        file.write_text("\n".join(lines))
        parameters = SOURCES.format(path=json.dumps(str(file)), gate=DEFAULT)
        (tmp_path / "conf" / "local" / "parameters.yml").write_text(parameters)
        return project.kedro(
            f"--to-nodes={last}", f"--conf-source={tmp_path / 'conf'}", check=check
        )

    output = " ".join(run(shuffled(rows, seed=1), "ppo", check=False).split())
    metrics = Manifest.read(project.newest("06_models/reward_model")).metrics
    accuracy, lower, upper = (
        f"{metrics[f'validation/accuracy{end}']:.1%}" for end in ("", "_lower", "_upper")
    )
    assert (
        f"reward_model.gate: found an accuracy of {accuracy} (95%: {lower} to {upper}) on held-out "
        "comparisons, expected a lower end above 50.0%. A policy would maximize noise. Fix: use "
        "more comparisons" in output
    )
    assert not (project.root / "07_workspace" / "ppo").exists()
    assert not (project.root / "06_models" / "ppo_model").exists()
    for name in ("base_model", "sft_model", "reward_model"):
        folder = "02_base_model" if name == "base_model" else "06_models"
        verify(project.newest(f"{folder}/{name}"))

    assert "sft: reused" in run(rows, "reward_model", check=True)
    check_gate(project.newest("06_models/reward_model"), DEFAULT, ppo_config())


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
