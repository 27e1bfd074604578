"""Prompts and responses as rectangular batches."""

import torch

from rlhf_pipeline.models.sequences import collate, pad


def batch():
    return collate([[5, 6], [7]], [[8], [9, 10, 11]], pad_id=0)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    assert batch().prompt_ids.tolist() == [[5, 6], [0, 7]]
    assert batch().prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch().response_ids.tolist() == [[8, 0, 0], [9, 10, 11]]
    assert batch().real_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch().lengths.tolist() == [[[2, 1]], [[1, 3]]]


def test_a_pad_id_inside_a_text_is_a_real_token():
    ids, mask = pad([[0, 0], [1]], pad_id=0, left=True)
    assert ids.tolist() == [[0, 0], [0, 1]]
    assert mask.tolist() == [[True, True], [False, True]]


def test_positions_come_from_the_mask():
    inputs = batch().model_inputs()
    assert inputs["input_ids"].tolist() == [[5, 6, 8, 0, 0], [0, 7, 9, 10, 11]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]]


def test_chosen_rows_lose_the_columns_that_only_others_need():
    assert batch().rows(torch.tensor([1])).prompt_ids.tolist() == [[7]]
    row = batch().rows(torch.tensor([0]))
    assert row.response_ids.tolist() == [[8]] and row.action_mask.tolist() == [[True]]


def test_a_response_has_tokens_that_the_policy_did_not_choose():
    """They exist: the model reads them, and they stay in the selected columns."""
    actions = [[True], [True, False, True]]
    batch = collate([[5, 6], [7]], [[8], [9, 10, 11]], 0, actions=actions, prompt_numbers=[3, 1])
    assert batch.action_mask.tolist() == [[True, False, False], [True, False, True]]
    assert batch.real_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.model_inputs()["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    row = batch.rows(torch.tensor([1])).to(torch.device("cpu"))
    assert row.action_mask.tolist() == [[True, False, True]] and row.prompt_numbers.tolist() == [1]
    assert row.packed().response_ids.tolist() == [[9, 10, 11]]
