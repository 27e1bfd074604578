"""The order of prompts, and those that a curriculum leaves out."""

import json

import pytest

from rlhf_pipeline.config.ppo import CurriculumConfig
from rlhf_pipeline.distributed.batches import step_rows
from rlhf_pipeline.training.prompts import PromptStream


def test_without_a_curriculum_steps_follow_the_permutations():
    stream = PromptStream(10, 1, None)
    drawn = [stream.draw(4).tolist() for _ in range(6)]
    assert drawn == [step_rows(10, 4, step, seed=1).tolist() for step in range(6)]
    stream.record(dict.fromkeys(range(10), 1.0))
    assert stream.draw(4).tolist() == step_rows(10, 4, 6, seed=1).tolist()


def test_solved_and_hopeless_prompts_sit_out_some_passes():
    """Ten prompts; of two, all or no responses are right. They miss the next pass."""
    stream = PromptStream(10, 1, CurriculumConfig(passes=1))
    stream.draw(10)
    stream.record({3: 1.0, 7: 0.0} | dict.fromkeys((0, 1, 2, 4, 5, 6, 8, 9), 0.5))
    assert sorted(stream.draw(8).tolist()) == [0, 1, 2, 4, 5, 6, 8, 9]
    assert sorted(stream.draw(10).tolist()) == [*range(10)]
    assert (stream.drawn, stream.left_out) == (30, 2)


def test_a_prompt_that_has_become_mixed_comes_again_at_once():
    stream = PromptStream(4, 1, CurriculumConfig(passes=3))
    stream.draw(4)
    stream.record({0: 1.0, 1: 0.5})
    stream.record({0: 0.5})
    assert sorted(stream.draw(4).tolist()) == [0, 1, 2, 3]


def test_if_all_prompts_are_left_out_they_return_later():
    stream = PromptStream(4, 1, CurriculumConfig(passes=2))
    stream.draw(4)
    stream.record(dict.fromkeys(range(4), 1.0))
    assert sorted(stream.draw(4).tolist()) == [0, 1, 2, 3]
    assert stream.left_out == 8


@pytest.mark.parametrize("after", [1, 3])
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(after):
    def step(stream):
        drawn = stream.draw(3).tolist()
        stream.record({number: number % 3 / 2 for number in drawn})
        return drawn

    stream = PromptStream(7, 1, CurriculumConfig(passes=1))
    for _ in range(after):
        step(stream)
    restored = PromptStream(7, 1, CurriculumConfig(passes=1))
    restored.restored(json.loads(json.dumps(stream.state())))
    assert [step(restored) for _ in range(5)] == [step(stream) for _ in range(5)]
