"""The options of distillation: a teacher is enough, and what shapes scores is refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.block import validated
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.training import FrozenModel
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.run.checks import check
from rlhf_pipeline.run.config_loader import LayeredConfigLoader
from rlhf_pipeline.run.faults import batch_faults
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

LORA = {"optimizer": {"learning_rate": 1e-4}, "lora": {}}


@pytest.mark.parametrize("teacher", ["facebook/opt-1.3b", {"path": "facebook/opt-1.3b"}])
def test_a_teacher_is_enough(teacher):
    config = DistillConfig.model_validate({"teacher": teacher})
    assert config.teacher.path == "facebook/opt-1.3b"
    assert (config.critic, config.rewards) == (None, ())
    assert [model.block for model in config.models()] == ["distill.actor", "distill.reference"]
    # The round trip through job.json.
    assert DistillConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_teacher_is_loaded_beside_adapters_in_its_own_precision():
    given = {"teacher": "t", "actor": LORA, "reference": {"deepspeed": {"precision": "bf16"}}}
    _, teacher = DistillConfig.model_validate(given).models()
    assert isinstance(teacher, FrozenModel) and teacher.config.precision == "bf16"


NONE = "found a value, expected none: a distillation has neither scores nor advantages. Fix: remove"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [{"reference": "exact"}]}, f"rewards: {NONE} rewards"),
        ({"advantage": "grpo"}, f"advantage: {NONE} advantage"),
        ({"curriculum": {}}, f"curriculum: {NONE}"),
        ({"score_clip": 1.0}, f"score_clip: {NONE}"),
        ({"missing_eos_penalty": 1.0}, f"missing_eos_penalty: {NONE}"),
        ({"overlong_penalty": 1.0}, f"overlong_penalty: {NONE}"),
        ({"reward_model": {"deepspeed": {"precision": "bf16"}}}, f"reward_model: {NONE}"),
        ({"critic": LORA}, f"critic: {NONE}"),
        ({"value_lam": 1.0}, f"value_lam: {NONE}"),
        ({"gamma": 0.9}, f"gamma: {NONE}"),
        ({"equal_groups": "drop"}, f"equal_groups: {NONE}"),
        ({"whiten_rewards": True}, f"whiten_rewards: {NONE}"),
        ({"importance": "sequence"}, f"importance: {NONE}"),
        ({"clip_range": 0.1}, f"clip_range: {NONE}"),
        ({"old_logprobs": "recompute"}, f"old_logprobs: {NONE}"),
        ({"beta": 1.5}, "Input should be less than or equal to 1"),
        ({"top_k": 0}, "Input should be greater than 0"),
        ({"given_batch_size": -1}, "Input should be greater than or equal to 0"),
        ({"kl": {"place": "loss"}}, "place: found a value, expected none: a distillation min"),
        ({"kl": {"target": 1.0}}, "target: found a value, expected none"),
        ({"kl": {"maximum": 1.0}}, "maximum: found a value, expected none"),
        ({"reference": {"deepspeed": {"offload_parameters": True}}},
         "reference.deepspeed.offload_parameters: found true at zero_stage 0"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(fields, message):
    with pytest.raises(ValidationError) as error:
        DistillConfig.model_validate({"teacher": "facebook/opt-1.3b", **fields})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ({}, "distill.teacher: missing. Fix: set it"),
        ({"teacher": {"architecture": {"model_type": "llama"}}}, "distill.teacher.path: missing"),
        ({"teacher": "https://host/model"}, "distill.teacher.path: found a URL"),
        ({"teacher": "t", "kl": {"coef": 0}}, "distill.kl.coef: found 0, expected more than 0"),
    ],
)
def test_a_teacher_has_weights(block, fault):
    _, faults = validated("distill", DistillConfig, block)
    assert any(each.startswith(fault) for each in faults), faults


def test_what_a_run_cannot_use_is_refused_before_it(tmp_path):
    conf = Path(__file__).parents[2] / "conf"
    loader = LayeredConfigLoader(
        str(conf),
        env="base",
        runtime_params={"distill": {"teacher": str(tmp_path)}},
        **CONFIG_LOADER_ARGS,
    )
    message = r"distill\.teacher\.path: found '.*', a folder without c"
    with pytest.raises(ConfigError, match=message):
        check(loader["parameters"], gpus=0, elsewhere=True)


def test_the_ranks_share_the_given_answers():
    distill = DistillConfig(teacher="facebook/opt-1.3b", given_batch_size=3)
    (fault,) = batch_faults({"distill": distill}, ["distill"], 2)
    assert fault.startswith("distill.given_batch_size: found 3, expected a multiple of 2 ranks")
