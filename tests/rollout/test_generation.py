"""Generation by given random draws."""

import numpy as np
import pytest
import torch

from rlhf_pipeline.config.ppo import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.rollout.generation import InverseCDFSampler, generate, uniform_draws


def chosen(
    draw: float, logits: list[float], temperature: float = 1.0, vocab_size: int | None = None
) -> int:
    sampler = InverseCDFSampler(
        torch.tensor([[draw]], dtype=torch.float64), 3, temperature, vocab_size or len(logits)
    )
    scores = sampler(torch.zeros(1, 3, dtype=torch.long), torch.tensor([logits]))
    assert torch.isfinite(scores).sum() == 1
    return int(scores.argmax())


def test_a_draw_selects_by_the_distribution_function():
    """Probabilities 1/4, 1/2, 1/4: the distribution function is 0.25, 0.75, 1."""
    logits = [0.0, float(np.log(2.0)), 0.0]
    assert [chosen(u, logits) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 0.999999)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_temperature_sharpens():
    """At temperature 1/2 the probabilities are 1, 4, 1 over 6: the function is 0.1667, 0.8333, 1."""
    logits = [0.0, float(np.log(2.0)), 0.0]
    assert [chosen(u, logits, temperature=0.5) for u in (0.16, 0.17, 0.83, 0.84)] == [0, 1, 1, 2]


def test_padded_vocabulary_rows_are_never_sampled():
    assert chosen(0.999999, [0.0, 0.0, 50.0, 50.0], vocab_size=2) == 1


def test_an_impossible_token_is_not_sampled_at_the_edge():
    assert chosen(1.0 - 1e-16, [0.0, -1e9, -1e9]) == 0


def test_draws_belong_to_rows_and_not_to_ranks():
    whole = uniform_draws(7, 3, np.arange(6), 4)
    assert torch.equal(uniform_draws(7, 3, np.array([1, 3, 5]), 4), whole[1::2])
    assert not torch.equal(uniform_draws(7, 4, np.arange(6), 4), whole)
    assert not torch.equal(uniform_draws(8, 3, np.arange(6), 4), whole)


@pytest.fixture(scope="module")
def policy(make_model):
    folder = make_model("llama", seed=3)
    return freeze(load_policy(folder, "fp32")), TokenContract.read(folder)


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def responses(rollout):
    return [
        row[mask].tolist()
        for row, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_responses_do_not_depend_on_how_the_batch_is_cut(policy, size):
    model, contract = policy
    draws = uniform_draws(1, 1, np.arange(4), 12)
    whole = generate(
        model,
        PROMPTS,
        draws,
        SamplingConfig(max_response_tokens=12, batch_size_per_gpu=4),
        contract,
    )
    pieces = generate(
        model,
        PROMPTS,
        draws,
        SamplingConfig(max_response_tokens=12, batch_size_per_gpu=size),
        contract,
    )
    assert responses(whole) == responses(pieces)
    assert whole.prompt_ids[1, whole.prompt_mask[1]].tolist() == [8]


def test_a_response_ends_with_its_eos_or_is_cut(policy, monkeypatch):
    model, contract = policy
    ids = iter([torch.tensor([[5, 6, 20, 1, 0, 0], [5, 6, 21, 22, 23, 24]])])
    monkeypatch.setattr(model, "generate", lambda **kwargs: next(ids), raising=False)
    rollout = generate(
        model, [[5, 6], [5, 6]], torch.zeros(2, 4), SamplingConfig(max_response_tokens=4), contract
    )
    assert responses(rollout) == [[20, 1], [21, 22, 23, 24]]


def test_samples_follow_the_policy(policy):
    """First tokens of 4,000 responses to one prompt against the policy's own probabilities: within 5 standard errors."""
    model, contract = policy
    count = 4000
    draws = uniform_draws(2, 1, np.arange(count), 1)
    sampling = SamplingConfig(max_response_tokens=1, batch_size_per_gpu=1000, temperature=0.7)
    first = generate(model, [[5, 6, 7]] * count, draws, sampling, contract).response_ids[:, 0]
    expected = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(0)
    observed = torch.bincount(first, minlength=len(expected)) / count
    assert (
        (observed - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9
    ).all()
