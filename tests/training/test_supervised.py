"""The loop of SFT, reward model and DPO."""

import json
import math

import pytest
import torch

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import supervised
from rlhf_pipeline.training.sft import SFTTask


@pytest.fixture
def train(sft_inputs, world, tmp_path):
    """Trains for two steps; returns the records of metrics.jsonl and the returned metrics."""

    def run(name, **changes):
        config = {
            "optimizer": {"learning_rate": 1e-3}, "epochs": 1, "batch_size": 8,
            "micro_batch_tokens": 64, "evaluations": 1,
        }  # fmt: skip
        (tmp_path / name).mkdir()
        job = LaunchedJob("sft", "f", 1, {}, sft_inputs, {}, tmp_path / name, 60.0)
        task = SFTTask(TokenContract.read(sft_inputs["base_model"]))
        metrics = supervised.train(
            job, SFTConfig.model_validate(config | changes), task, load_policy, world,
            start="base_model", rows="demonstrations",
        )  # fmt: skip
        records = [json.loads(line) for line in job.metrics_file.read_text().splitlines()]
        return {
            r["step"]: {n: v for n, v in r["metrics"].items() if "time/" not in n} for r in records
        }, metrics

    return run


def test_the_evaluation_at_the_start_is_that_of_the_given_model(train, sft_inputs):
    records, metrics = train("with", evaluate_at_start=True)
    plain, plain_metrics = train("without")
    start = records.pop(0)
    assert records == plain and metrics == plain_metrics  # training itself is the same

    model = load_policy(sft_inputs["base_model"], "fp32").eval()
    total, tokens = 0.0, 0
    for i in range(16):
        prompt, response = [5 + i] * (1 + i % 3), [20 + i, 30 + i, 1]
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].detach()
        places = range(len(prompt) - 1, len(prompt) + 2)
        for place, token in zip(places, response, strict=True):
            total -= logits[place].log_softmax(-1)[token].item()
            tokens += 1
    assert start["validation/perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert start["validation/perplexity"] > records[2]["validation/perplexity"]
