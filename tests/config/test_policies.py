"""The options of distillation: a teacher is enough, and what shapes scores is refused."""

import pytest

from rlhf_pipeline.config.block import validated
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.training import FrozenModel
from rlhf_pipeline.kedro_run.faults import own_bases, path_faults

LORA = {"optimizer": {"learning_rate": 1e-4}, "lora": {}}


def test_a_teacher_is_enough():
    config = DistillConfig(teacher="facebook/opt-1.3b")
    assert config == DistillConfig(teacher={"path": "facebook/opt-1.3b"})
    assert (config.teacher.path, config.critic, config.rewards) == ("facebook/opt-1.3b", None, ())
    assert [model.block for model in config.models()] == ["distill.actor", "distill.reference"]
    # The round trip through job.json.
    assert DistillConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_teacher_is_loaded_beside_adapters_in_its_own_precision():
    given = {"teacher": "t", "actor": LORA, "reference": {"deepspeed": {"precision": "bf16"}}}
    _, teacher = DistillConfig.model_validate(given).models()
    assert isinstance(teacher, FrozenModel) and teacher.config.precision == "bf16"


NONE = "found a value, expected none: a distillation has neither scores nor advantages. Fix: remove"


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ({"rewards": [{"reference": "exact"}]}, f"rewards: {NONE} rewards"),
        ({"advantage": "grpo"}, f"advantage: {NONE} advantage"),
        ({"critic": LORA}, f"critic: {NONE}"),
        ({"old_logprobs": "recompute"}, f"old_logprobs: {NONE}"),
        ({"kl": {"place": "loss"}}, "kl.place: found a value, expected none: a distillation min"),
        ({"kl": {"coef": 0}}, "kl.coef: found 0, expected more than 0"),
        ({"teacher": None}, "teacher: "),
        ({"teacher": {"architecture": {"model_type": "llama"}}}, "teacher.path: missing"),
        ({"teacher": "https://host/model"}, "teacher.path: found a URL"),
    ],
)
def test_what_has_no_meaning_is_refused_and_a_teacher_has_weights(block, fault):
    _, faults = validated("distill", DistillConfig, {"teacher": "facebook/opt-1.3b", **block})
    assert any(each.startswith(f"distill.{fault}") for each in faults), faults


def test_a_teacher_s_folder_is_looked_at_before_a_run(tmp_path):
    blocks = {"base_model": None, "ppo": None, "reward_model": None}
    blocks["distill"] = DistillConfig(teacher=str(tmp_path))
    ((place, teacher),) = own_bases(blocks).items()
    (fault,) = path_faults(f"{place}.path", teacher.path)
    assert fault.startswith("distill.teacher.path: found '") and "a folder without c" in fault
