"""The metrics of one step: collected, checked, timed and written."""

import json
import math
from types import SimpleNamespace

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.training.step_log import DivergenceGuard, StepLog


@pytest.fixture
def log(world, tmp_path):
    writer = MetricsFile(tmp_path / "metrics.jsonl", 9)
    best = SimpleNamespace(kept="No model is kept.")
    return StepLog(3, DivergenceGuard(world, writer, best, lambda name: f"change {name}"))


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("every response is empty", "every response is empty"),
        (None, "policy/loss is inf at step 3: training has diverged. Fix: change policy/loss"),
    ],
)
def test_a_fault_or_an_infinite_metric_fails_with_the_metrics_on_disk(
    log, tmp_path, fault, message
):
    log.add({"objective/kl": 1.0})
    with pytest.raises(StageError) as failure:
        log.add({"policy/loss": math.inf}, fault)
    assert str(failure.value) == f"{message}. No model is kept."
    (line,) = lines(tmp_path)
    assert line["step"] == 3 and line["metrics"].keys() == {"objective/kl", "policy/loss"}


def test_metrics_are_written_with_the_times_if_they_are_due(log, tmp_path):
    with log.timed("time/rollout_s"):
        log.add({"objective/kl": 1.0})
    log.write(due=False)
    assert lines(tmp_path) == []
    log.write(due=True)
    (line,) = lines(tmp_path)
    assert line["metrics"].keys() == {"objective/kl", "time/rollout_s", "time/step_s"}
    assert 0 <= line["metrics"]["time/rollout_s"] <= line["metrics"]["time/step_s"]
