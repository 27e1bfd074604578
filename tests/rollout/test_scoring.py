"""Scoring a rollout by the models."""

from dataclasses import replace

import pytest
import torch

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.scoring import ScoringModels, score_sequences

PROMPTS = [[5, 6, 7], [8], [9, 10]]
RESPONSES = [[20, 1], [21, 22, 23, 24], [25, 26, 1]]


def scoring_models(policy, contract, reward_model=None, **options) -> ScoringModels:
    actor = freeze(load_policy(policy, "fp32"))
    scorer = None if reward_model is None else freeze(load_scores(reward_model, "fp32"))
    fields = {
        "temperature": 0.7,
        "micro_batch_tokens": 8,
        "world": World(0, 1, torch.device("cpu")),
    } | options
    return ScoringModels(
        policy=actor,
        reference=actor,
        critic=scorer,
        reward_model=scorer,
        contract=contract,
        **fields,
    )


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_each_row_is_scored_as_it_is_alone(policy, contract, make_reward_model, tokens):
    models = scoring_models(policy, contract, make_reward_model(), micro_batch_tokens=tokens)
    scored = score_sequences(collate(PROMPTS, RESPONSES, contract.pad_id), models)
    assert scored.ended.tolist() == [True, False, True]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone, length = collate([prompt], [response], contract.pad_id), len(response)
        logprobs = response_logprobs(
            models.policy, alone, vocab_size=contract.vocab_size, temperature=0.7
        )
        expected = (logprobs, logprobs, response_values(models.critic, alone))
        found = (scored.logprobs, scored.ref_logprobs, scored.values)
        for whole, part in zip(found, expected, strict=True):
            torch.testing.assert_close(whole[row, :length], part[0], rtol=1e-5, atol=1e-5)
        score = sequence_scores(models.reward_model, alone)
        torch.testing.assert_close(scored.scores[row], score[0], rtol=1e-5, atol=1e-5)


def test_a_response_ended_if_it_contains_any_eos_of_the_model(policy, contract):
    models = scoring_models(policy, replace(contract, eos_ids=(1, 24)))
    scored = score_sequences(collate(PROMPTS, RESPONSES, contract.pad_id), models)
    assert scored.ended.tolist() == [True, True, True]


def test_without_critic_and_reward_model_values_are_none_and_scores_zero(policy, contract):
    sequences = collate(PROMPTS, RESPONSES, contract.pad_id)
    scored = score_sequences(sequences, scoring_models(policy, contract))
    assert scored.values is None
    assert scored.scores.tolist() == [0.0, 0.0, 0.0]
