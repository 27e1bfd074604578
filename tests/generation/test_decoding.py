"""Which models take one mask for all layers."""

import pytest
from transformers import PreTrainedConfig

from rlhf_pipeline.generation.decoding import takes_prepared_mask


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, True),
        ({"sliding_window": None}, True),
        ({"sliding_window": 64}, True),
        ({"sliding_window": 63}, False),
        ({"layer_types": ["full_attention"] * 2}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_a_window_needs_a_mask_of_its_own_if_it_is_shorter_than_the_room(fields, expected):
    assert takes_prepared_mask(PreTrainedConfig(**fields), 64) is expected
