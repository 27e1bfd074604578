"""PPO on one page is an oracle of the program: they share the math and nothing else."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from ppo_runs import ppo_config, run_ppo

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import load_rows
from rlhf_pipeline.generation.generator import row_seeds, uniform_draws
from rlhf_pipeline.training.prompts import PromptStream

PAGE = Path(__file__).parents[2] / "examples" / "ppo_in_one_file.py"
EXACT = {"rtol": 0, "atol": 1e-6}  # two steps move a weight by 1e-4 to 1e-3


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("ppo_in_one_file", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_program_train_the_same_weights(page, ppo_inputs, world, tmp_path):
    config = ppo_config(ppo_epochs=2, evaluations=1)
    run = run_ppo(config, ppo_inputs, world, tmp_path / "ppo")
    contract = TokenContract.read(ppo_inputs["sft_model"])
    rows = load_rows(ppo_inputs["prompts"] / "train.arrow", world)
    stream, size = PromptStream(rows.num_rows, 1, None), config.rollout_batch_size
    settings = page.Settings(
        steps=2, rollout_batch_size=size, max_response_tokens=6, ppo_epochs=2,
        learning_rate=1e-3, eps=1e-4, kl_coef=config.kl.coef,
    )  # fmt: skip
    batches = (rows.columns(stream.draw(size))["prompt_ids"] for _ in range(2))
    actor, critic = page.train(
        ppo_inputs["sft_model"], ppo_inputs["reward_model"], batches,
        lambda step: uniform_draws(row_seeds(1, step, np.arange(size)), 6),
        contract.pad_id, contract.eos_id, settings,
    )  # fmt: skip
    for name, own in (("actor", actor), ("critic", critic)):
        weights = {key.removeprefix("classifier."): x for key, x in run.weights(name).items()}
        assert weights.keys() == own.state_dict().keys()
        for key, weight in own.state_dict().items():
            torch.testing.assert_close(weight, weights[key], **EXACT, msg=f"{name}: {key}")
        first = next(key for key in weights if "proj" in key)
        before = {key.removeprefix("classifier."): x for key, x in run.start[name].items()}[first]
        assert (weights[first] - before).abs().max() > 1e-4
