"""Scoring and the update share the forward passes of actor and critic where that is exact."""

import pytest
import torch
from ppo_runs import ppo_config, run_ppo

from rlhf_pipeline.models import forward
from rlhf_pipeline.training import experience, ppo_update, rollouts


@pytest.fixture
def passes(monkeypatch):
    """The forward passes with a graph of actor and critic, and those without."""
    counts = {"with graph": 0, "without": 0}

    def counted(function):
        def run(model, *args, **options):
            trains = any(parameter.requires_grad for parameter in model.parameters())
            if trains:
                counts["with graph" if torch.is_grad_enabled() else "without"] += 1
            return function(model, *args, **options)

        return run

    for name in ("response_logprobs", "response_logprobs_and_entropy", "response_values"):
        function = counted(getattr(forward, name))
        for module in (experience, rollouts, ppo_update):
            monkeypatch.setattr(module, name, function, raising=False)
    return counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_pass_gives_the_same_weights_as_two(
    ppo_inputs, world, tmp_path, monkeypatch, passes, stage
):
    """Two steps, each with one optimizer step on all rows."""
    optimizer = {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4}
    model = {"optimizer": optimizer, "deepspeed": {"zero_stage": stage}}
    config = ppo_config(micro_batch_tokens=1000, actor=model, critic=model)
    shared = run_ppo(config, ppo_inputs, world, tmp_path / "shared")
    assert passes["with graph"] == 2 * 2
    monkeypatch.setattr("rlhf_pipeline.training.ppo.one_pass", lambda *_: False)
    apart = run_ppo(config, ppo_inputs, world, tmp_path / "apart")
    for name in ("actor", "critic"):
        after, expected = shared.weights(name), apart.weights(name)
        for key, value in expected.items():
            torch.testing.assert_close(after[key], value, rtol=1e-5, atol=2e-7)
    for one, other in zip(shared.lines, apart.lines, strict=True):
        assert one.keys() == other.keys()
        assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"ppo_epochs": 2}, {"minibatch_size": 4}, {"micro_batch_tokens": 20}]
)
def test_a_policy_that_changes_or_does_not_fit_takes_passes_of_its_own(
    ppo_inputs, world, tmp_path, passes, changes
):
    run_ppo(ppo_config(**changes), ppo_inputs, world, tmp_path)
    assert passes["without"] > 0


def test_log_probabilities_of_the_sampler_spare_the_pass_of_the_actor(ppo_inputs, world, tmp_path):
    """Their gap to those of the forward pass is rounding, and is reported."""
    config = ppo_config(ppo_epochs=2, old_logprobs="rollout")
    sampler = run_ppo(config, ppo_inputs, world, tmp_path / "sampler").lines
    again = run_ppo(ppo_config(ppo_epochs=2), ppo_inputs, world, tmp_path / "again").lines
    for line, other in zip(sampler, again, strict=True):
        assert 0 < line["rollout/logprob_gap"] < 1e-5
        assert 0 < other["rollout/logprob_gap"] < 1e-5
        assert line["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-4)
