"""Scoring a rollout by the models."""

from types import SimpleNamespace

import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.generation.records import ended
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.training.rollouts import score_sequences

PROMPTS = [[5, 6, 7], [8], [9, 10]]
RESPONSES = [[20, 1], [21, 22, 23, 24], [25, 26, 1]]


@pytest.fixture(scope="module")
def models(ppo_inputs):
    actor = freeze(load_policy(ppo_inputs["sft_model"], "fp32"))
    scorer = freeze(load_scores(ppo_inputs["reward_model"], "fp32"))
    contract = TokenContract.read(ppo_inputs["sft_model"])
    return SimpleNamespace(
        actor=actor, reference=actor, critic=scorer, reward_model=scorer, contract=contract,
        rewards=SimpleNamespace(trained_reads_tokens=True),
    )  # fmt: skip


def scored_by(models, world, tokens=8):
    sampling = {"temperature": 0.7, "max_response_tokens": 6}
    config = ppo_config(micro_batch_tokens=tokens, sampling=sampling)
    return score_sequences(ppo_setup_of(models, config, world), collate(PROMPTS, RESPONSES, 0))


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_each_row_is_scored_as_it_is_alone(models, world, tokens):
    scored = scored_by(models, world, tokens)
    assert scored.ended.tolist() == [True, False, True]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone, length = collate([prompt], [response], 0), len(response)
        vocab_size = models.contract.vocab_size
        logprobs = response_logprobs(models.actor, alone, vocab_size=vocab_size, temperature=0.7)
        expected = (logprobs, logprobs, response_values(models.critic, alone))
        found = (scored.logprobs, scored.ref_logprobs, scored.values)
        for whole, part in zip(found, expected, strict=True):
            torch.testing.assert_close(whole[row, :length], part[0], rtol=1e-5, atol=1e-5)
        score = sequence_scores(models.reward_model, alone)
        torch.testing.assert_close(scored.scores[row], score[0], rtol=1e-5, atol=1e-5)


def test_a_response_ended_if_it_contains_any_eos_of_the_model():
    ids = collate(PROMPTS, RESPONSES, 0).response_ids
    assert ended(ids, SimpleNamespace(eos_ids=(1, 24))).tolist() == [True, True, True]


def test_without_critic_and_reward_model_values_are_none_and_scores_zero(models, world):
    fewer = SimpleNamespace(**vars(models) | {"critic": None, "reward_model": None})
    scored = scored_by(fewer, world)
    assert scored.values is None
    assert scored.scores.tolist() == [0.0, 0.0, 0.0]


def test_a_reward_model_with_tokens_of_its_own_does_not_read_those_of_the_policy(models, world):
    rewards = SimpleNamespace(trained_reads_tokens=False)
    scored = scored_by(SimpleNamespace(**vars(models) | {"rewards": rewards}), world)
    assert scored.scores.tolist() == [0.0, 0.0, 0.0]
    assert scored.values is not None
