"""DeepSpeed accepts the settings that this project makes, and refuses others."""

import copy

import pytest
from deepspeed_settings import engine_settings, refusal

from rlhf_pipeline.config.training import SFTConfig


@pytest.fixture
def settings():
    config = SFTConfig(
        epochs=1, batch_size=8, micro_batch_tokens=64, optimizer={"learning_rate": 1e-5},
        deepspeed={"zero_stage": 3, "precision": "bf16"},
    )  # fmt: skip
    return engine_settings(config, config, hidden_size=64, on_gpu=True)["sft"]


def test_the_settings_are_accepted_on_any_number_of_ranks(settings):
    before = copy.deepcopy(settings)
    assert [refusal(settings, ranks) for ranks in (1, 8, 64)] == [None, None, None]
    assert settings == before


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("zero_optimization", {"stage": 4}, "stage: Input should be 0, 1, 2, 3"),
        ("zero_optimization", {"bogus": 1}, "bogus: Extra inputs are not permitted"),
    ],
)
def test_other_settings_are_refused(settings, place, value, reason):
    settings[place] |= value
    assert refusal(settings, 8).startswith(reason)
