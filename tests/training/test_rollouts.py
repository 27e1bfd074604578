"""Groups that teach: what is resampled, on one rank and on two ranks that are threads."""

from types import SimpleNamespace

import pytest
import torch
from ppo_runs import ppo_config

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.generation.records import Scored
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.training import rollouts
from rlhf_pipeline.training.prompts import PromptStream

COUNT = 32


def config_of(**changes) -> PPOConfig:
    return ppo_config(
        **{"advantage": "grpo", "critic": None, "responses_per_prompt": 2, "score_clip": None}
        | {"equal_groups": "resample", "missing_eos_penalty": 0.0}
        | changes
    )


class Prompts:
    """A table whose prompts are their own numbers."""

    def columns(self, numbers):
        return {"prompt_ids": [[int(number) + 1] for number in numbers]}


@pytest.fixture
def step(on_threads, monkeypatch):
    """Runs the rollout of a step; returns prompts, scores and metrics, in the order of one rank.

    The responses to every third prompt differ in their scores.
    """

    def roll_out(setup, rows, seeds, step):
        return rows["prompt_number"], seeds

    def score(setup, rollout, rows, **_):
        numbers, seeds = rollout
        setup.seeds.extend(seeds)
        sequences = collate([[n + 1] for n in numbers], [[9]] * len(numbers), 0)
        scores = torch.tensor(
            [
                float(slot) if n % 3 == 0 else 1.0
                for n, (*_, slot) in zip(numbers, seeds, strict=True)
            ]
        )
        zeros = torch.zeros(len(numbers), 1)
        ended = torch.ones(len(numbers), dtype=torch.bool)
        return Scored(sequences, zeros, zeros, None, scores, ended, clipped_scores=scores)

    monkeypatch.setattr(rollouts, "roll_out", roll_out)
    monkeypatch.setattr(rollouts, "score", score)

    def run(ranks: int, config: PPOConfig):
        def one(world):
            stream = PromptStream(COUNT, 1, config.curriculum)
            setup = SimpleNamespace(
                config=config, world=world, stream=stream, prompts=Prompts(), seed=1, seeds=[]
            )
            rows, seeds = rollouts.training_prompts(setup, 1)
            first = score(setup, roll_out(setup, rows, seeds, 1), rows)
            scored, metrics = rollouts.resample(setup, first, rows, 1)
            if ranks == 1:  # with more, some rows fill gaps
                assert len({*setup.seeds}) == len(setup.seeds)
            prompts = scored.sequences.prompt_ids[:, -1] - 1
            return prompts, scored.scores, metrics, stream.state()

        found = on_threads(ranks, one)
        prompts, scores = (
            torch.stack([rank[part] for rank in found], dim=1).flatten().tolist() for part in (0, 1)
        )
        return prompts, scores, found[0][2], found[0][3]

    return run


def test_equal_groups_get_other_prompts(step):
    """Of four prompts with two responses each, all differ in the end, and nothing else changes."""
    prompts, scores, metrics, state = step(1, config_of())
    assert prompts[:4] == prompts[4:] and all(number % 3 == 0 for number in prompts)
    assert all(first != second for first, second in zip(scores[:4], scores[4:], strict=True))
    assert metrics == {"rollout/resampled": (state["drawn"] - 4) / 4} and state["drawn"] > 4
    kept, _, none, state = step(1, config_of(equal_groups="keep"))
    assert none == {} and state["drawn"] == 4
    assert all(new == old for new, old in zip(prompts, kept, strict=True) if old % 3 == 0)


@pytest.mark.parametrize("limit", [1, 10])
def test_any_number_of_ranks_makes_the_same_step(step, limit):
    config = config_of(maximum_resamples=limit, curriculum={"solved": 1.0, "passes": 1})
    assert step(2, config) == step(1, config)


def test_resampling_is_bounded(step):
    prompts, *_, state = step(1, config_of(maximum_resamples=1))
    assert state["drawn"] <= 8 and any(number % 3 for number in prompts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_groups_get_the_next_prompts_in_the_order_of_their_slots(step, ranks):
    first = PromptStream(COUNT, 1, None)
    drawn = first.draw(16)
    slots = (drawn % 3 > 0).nonzero()[0].tolist()
    assert slots != sorted(slots, key=lambda slot: slot % 2)  # nor the order of two ranks
    drawn[slots] = first.draw(len(slots))
    config = config_of(rollout_batch_size=32, minibatch_size=32, maximum_resamples=1)
    assert step(ranks, config)[0] == [*drawn, *drawn]


def test_resampled_rows_share_no_forward_pass_with_the_update():
    """The graphs of the pass that scored the first rows would train."""
    setup = SimpleNamespace(config=config_of(), models=None)
    assert not rollouts.one_pass(setup, None, 1)


def test_the_curriculum_hears_of_every_prompt(step):
    """Scores of at least 1 are right: all of other prompts, and of a third prompt those of its
    slots from 1 on."""
    *_, state = step(1, config_of(curriculum={}))
    drawn = PromptStream(COUNT, 1, None).draw(state["drawn"])
    assert {number for number, _ in state["returns"]} >= {*drawn[drawn % 3 > 0].tolist()}
    assert len({*drawn[drawn % 3 > 0]} - {*drawn[:4]}) > 0
