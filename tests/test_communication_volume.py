"""Bytes and seconds of training by ZeRO stage, worked by hand."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from communication_volume import (
    BUCKET,
    LIVE,
    Collectives,
    Link,
    gathered,
    total_seconds,
    total_sent,
    training_step,
)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "expected"),
    [
        (0, 1, 1500),  # all-reduce: 2 * 3/4 * 1000 bytes
        (0, 3, 1500),  # once in a step
        (1, 1, 2250),  # and 3/4 * 1000 to gather the weights
        (1, 3, 2250),
        (2, 1, 2250),
        (2, 3, 5250),  # 3 * 1500 + 750
        (3, 1, 2250),  # 750 forward, 750 backward, 750 to reduce and scatter
        (3, 3, 6750),
    ],
)
def test_bytes_of_each_stage(stage, micro_batches, expected):
    step = training_step(500, stage, micro_batches=micro_batches, live=0)
    assert total_sent(step, 4) == pytest.approx(expected)


def test_weights_that_stay_are_not_gathered_again():
    """Of 500, 100 stay for the backward pass: 750 + 4/5 * 750 + 750."""
    assert total_sent(training_step(500, 3, live=100), 4) == pytest.approx(2100)
    assert total_sent(training_step(500, 3), 4) == pytest.approx(1500)


def test_a_recomputed_layer_above_the_limit_is_gathered_a_third_time():
    """Half of each layer of 200 exceeds 100, so half of the weights: 2100 + 375."""
    assert total_sent(training_step(500, 3, live=100, layer=200), 4) == pytest.approx(2475)
    assert total_sent(training_step(500, 3, live=100, layer=100), 4) == pytest.approx(2100)


def test_gloo_scatters_by_an_all_reduce():
    """In fp32: 1500 + 1500 + 3000."""
    step = training_step(500, 3, width=4, live=0, reduce_rounds=2)
    assert total_sent(step, 4) == pytest.approx(6000)


def test_one_rank_sends_nothing():
    step = training_step(500, 3)
    assert total_sent(step, 1) == 0
    assert total_seconds(step, 1, Link(1.0, 1.0)) == 0


def test_seconds_of_a_busy_link():
    """Chunks of 100 bytes at 100 a second: three hops of a second each, and the last latency."""
    link = Link(bandwidth=100, latency=0.25)
    assert Collectives(1, 400).seconds(4, link) == pytest.approx(3.25)
    assert Collectives(2, 400, count=3).seconds(4, link) == pytest.approx(19.5)


def test_seconds_of_a_slow_answer():
    """Half a second a half, two seconds of latency: three hops of 2.5, then the second half."""
    assert Collectives(1, 400).seconds(4, Link(100, 2)) == pytest.approx(8.0)


def test_buckets_add_latency_and_no_bytes():
    """1000 bytes in buckets of 400: three, each with two latencies of 10 seconds."""
    step = training_step(500, 0, bucket=200)
    assert total_sent(step, 2) == pytest.approx(1000)
    assert total_seconds(step, 2, Link(1e9, 10)) == pytest.approx(60, rel=1e-3)


def test_weights_for_a_rollout():
    assert gathered(500).sent(4) == pytest.approx(750)
    assert gathered(500, passes=3, width=4).sent(4) == pytest.approx(4500)


def test_the_settings_are_those_of_training():
    """The driver computes sizes without DeepSpeed's settings, whose module it never imports."""
    from rlhf_pipeline.config.training import TrainedModelConfig
    from rlhf_pipeline.distributed.deepspeed_config import training_settings

    config = TrainedModelConfig.model_validate(
        {"optimizer": {"learning_rate": 1e-5}, "deepspeed": {"zero_stage": 3}}
    )
    zero = training_settings(config, hidden_size=1, on_gpu=False)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] == BUCKET
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == LIVE
