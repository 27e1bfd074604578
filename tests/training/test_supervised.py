"""The loop of SFT, reward model, DPO and KTO: evaluations, and exact resumption between them."""

import json
import math
from dataclasses import replace

import pytest
from tiny_jobs import logged
from training.by_hand import token_logprobs

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime.job import LaunchedJob, list_checkpoints, newest_valid_step
from rlhf_pipeline.runtime.manifest import folder_digest
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.training import supervised
from rlhf_pipeline.training.sft import SFTTask

CONFIG = SFTConfig.model_validate(
    {
        "optimizer": {"learning_rate": 1e-3}, "epochs": 2, "batch_size": 4,
        "micro_batch_tokens": 64, "evaluations": 8, "checkpoint_every": 3,
        "checkpoint_at_evaluations": False,
    }
)  # fmt: skip
"""Eight steps, each with an evaluation."""


class KilledError(Exception):
    """Stands for a kill."""


@pytest.fixture
def make_job(sft_inputs, tmp_path):
    def make(name):
        (tmp_path / name).mkdir()
        return LaunchedJob("sft", "f", 1, {}, sft_inputs, {}, tmp_path / name, 60.0)

    return make


def train(job, world, config=CONFIG):
    task = SFTTask(TokenContract.read(job.inputs["base_model"]))
    return supervised.train(
        job, config, task, load_policy, world, start="base_model", rows="demonstrations"
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_evaluation_at_the_start_is_that_of_the_given_model(make_job, world, sft_inputs):
    config = CONFIG.model_copy(update={"epochs": 1, "evaluations": 1})
    job, other = make_job("with"), make_job("without")
    metrics = train(job, world, config.model_copy(update={"evaluate_at_start": True}))
    plain_metrics = train(other, world, config)
    start, *records = logged(job.directory)
    plain = logged(other.directory)
    assert records == plain and metrics == plain_metrics  # training itself is the same

    model = load_policy(sft_inputs["base_model"], "fp32").eval()
    rows = [([5 + i] * (1 + i % 3), [20 + i, 30 + i, 1]) for i in range(16)]
    loss = -sum(token_logprobs(model, *row).mean().item() for row in rows) / 16
    assert start["validation/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert start["validation/perplexity"] > records[-1]["validation/perplexity"]


def test_training_resumes_exactly_from_before_the_newest_evaluation(world, make_job, monkeypatch):
    expected, job = make_job("uninterrupted"), make_job("interrupted")
    metrics = train(expected, world)

    evaluate, count = supervised.evaluate, []

    def killed_at_the_sixth(setup):
        count.append(1)
        if len(count) == 6:
            raise KilledError
        return evaluate(setup)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(supervised, "evaluate", killed_at_the_sixth)
        train(job, world)
    (checkpoint,) = list_checkpoints(job.checkpoints)
    assert newest_valid_step(job.checkpoints) == 3
    (ranked,) = json.loads((checkpoint / "loop.json").read_text())["best"]
    # Steps 4 and 5 were better, but the checkpoint still needs the model of step 3.
    assert ranked["step"] == 3
    assert names(job.checkpoints) == [
        "best-00000003", "best-00000004", "best-00000005", "step-00000003",
    ]  # fmt: skip

    assert train(replace(job, resume_from=3), world) == metrics
    assert folder_digest(job.export) == folder_digest(expected.export)
    assert logged(job.directory) == logged(expected.directory)
    assert [line["step"] for line in read_json_lines(job.metrics_file)] == [*range(1, 9)]
    for each in (job, expected):
        assert names(each.checkpoints) == ["best-00000008", "step-00000006", "step-00000008"]


def test_an_early_end_leaves_no_model_that_was_replaced(world, make_job, monkeypatch):
    """PPO may stop at its KL limit, some evaluations after the newest checkpoint."""
    job = make_job("stopped")
    step_ended = supervised.Checkpoints.step_ended

    def no_checkpoint(self, step, *, due, loop):
        return step_ended(self, step, due=False, loop=loop)

    monkeypatch.setattr(supervised.Checkpoints, "step_ended", no_checkpoint)
    train(job, world)
    assert names(job.checkpoints) == ["best-00000008"]
