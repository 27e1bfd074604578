"""The records of a step."""

import torch

from rlhf_pipeline.generation.records import Scored
from rlhf_pipeline.models.sequences import collate


def scored(prompts, responses, scores) -> Scored:
    sequences = collate(prompts, responses, 0, prompt_numbers=[row[0] for row in prompts])
    logprobs = torch.where(sequences.real_mask, -sequences.response_ids.float(), torch.nan)
    return Scored(
        sequences, logprobs, ref_logprobs=logprobs, values=None, scores=torch.tensor(scores),
        ended=torch.tensor([len(row) > 1 for row in responses]), parts={"a": torch.tensor(scores)},
    )  # fmt: skip


def test_replaced_rows_have_the_width_that_they_need():
    """The longest prompt and response leave, and a longer response comes."""
    rollout = scored([[7, 8, 9], [5]], [[20], [21, 22, 23]], [1.0, 2.0])
    other = scored([[6], [3, 4]], [[30, 31, 32, 33], [40, 41]], [3.0, 4.0])
    found = rollout.replaced(torch.tensor([0]), other, torch.tensor([1]))
    sequences = found.sequences
    assert sequences.prompt_ids.tolist() == [[3, 4], [0, 5]]
    assert sequences.prompt_mask.tolist() == [[True, True], [False, True]]
    assert sequences.response_ids.tolist() == [[40, 41, 0], [21, 22, 23]]
    assert sequences.action_mask.tolist() == [[True, True, False], [True] * 3]
    assert sequences.prompt_numbers.tolist() == [3, 5]
    assert found.logprobs[sequences.real_mask].tolist() == [-40, -41, -21, -22, -23]
    assert found.logprobs.shape == (2, 3)
    assert found.scores.tolist() == found.parts["a"].tolist() == [4.0, 2.0]
    assert found.ended.tolist() == [True, True]
    wider = rollout.replaced(torch.tensor([1]), other, torch.tensor([0]))
    assert wider.sequences.response_ids.tolist() == [[20, 0, 0, 0], [30, 31, 32, 33]]
    assert wider.sequences.prompt_ids.tolist() == [[7, 8, 9], [0, 0, 6]]
