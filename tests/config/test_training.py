"""Options of trainable and frozen models: combinations without effect are refused."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.block import validated
from rlhf_pipeline.config.ppo import CriticConfig, PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.training import (
    RewardModelConfig,
    SavingConfig,
    SFTConfig,
    evaluation_steps,
)

MODEL = {"optimizer": {"learning_rate": 1e-3}}
SUPERVISED = MODEL | {"epochs": 1, "batch_size": 4, "micro_batch_tokens": 2}
PPO = {
    "steps": 4, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 4,
    "critic": MODEL,
}  # fmt: skip
NF4 = {"quantize": "nf4"}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (SFTConfig, {"lora": NF4 | {"train_rest": True}},
         "train_rest: found true with quantize nf4, expected false"),
        (SFTConfig, {"lora": NF4, "deepspeed": {"zero_stage": 3}},
         "deepspeed.zero_stage: found 3 with lora.quantize nf4, expected 0 to 2: 4-bit weights "
         "cannot be sharded. Fix: set zero_stage to 2"),
        (SFTConfig, {"deepspeed": {"accumulate": "bf16"}},
         "accumulate: found bf16, expected fp32 with precision fp32. Fix: leave it out"),
        (SFTConfig, {"deepspeed": {"zero_stage": 3, "kernels": "compile"}},
         "kernels: found compile, expected liger or null at zero_stage 3. Fix: set "
         "zero_stage to 2"),
        (DPOConfig, {"loss": "ipo", "label_smoothing": 0.1},
         "label_smoothing: found 0.1 with loss ipo, expected 0.0: it has no effect. Fix: leave it "
         "out, or choose another loss"),
        (DPOConfig, {"target_margin": 0.5},
         "target_margin: found 0.5 with loss sigmoid, expected 1.0"),
        (DPOConfig, {"loss": "simpo", "reference": {"deepspeed": {"precision": "bf16"}}},
         "reference: found a block with loss simpo, expected none"),
    ],
)  # fmt: skip
def test_options_that_conflict_are_refused(kind, fields, message):
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(SUPERVISED | fields)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["reference", "reward_model"])
def test_a_frozen_model_in_main_memory_is_sharded_whatever_trains(name):
    """DeepSpeed-Chat's `--offload_reference_model`, beside an actor that is not sharded."""

    def read(deepspeed):
        block = {"actor": MODEL | {"deepspeed": {"zero_stage": 0}}, name: {"deepspeed": deepspeed}}
        return validated("ppo", PPOConfig, PPO | block)

    config, _ = read({"offload_parameters": True})
    (model,) = [model for model in config.models() if model.name == name]
    assert (model.config.zero_stage, model.config.offload_parameters) == (3, True)
    assert read({"offload_parameters": True, "zero_stage": 0})[1] == [
        f"ppo.{name}.deepspeed.zero_stage: found 0, expected 3 with offload_parameters. "
        "Fix: set zero_stage to 3"
    ]


@pytest.mark.parametrize("reference", [{"precision": "bf16"}, {"zero_stage": 0}])
def test_a_reference_block_is_refused_with_adapters(reference):
    reference = {"reference": {"deepspeed": reference}}
    policy = MODEL | {"lora": {}}
    message = r"reference: found a block, expected none with LoRA: .* Fix: remove reference"
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(PPO | {"actor": policy} | reference)
    with pytest.raises(ValidationError, match=message):
        DPOConfig.model_validate(SUPERVISED | policy | reference)
    for kept in ({"lora": None}, {"lora": {"train_rest": True}}):  # no start to compare with
        PPOConfig.model_validate(PPO | {"actor": MODEL | kept} | reference)
        DPOConfig.model_validate(SUPERVISED | kept | reference)


def test_only_a_loss_that_reads_a_reference_loads_one():
    for loss, models in (("sigmoid", 2), ("robust", 2), ("sigmoid_norm", 2), ("simpo", 1)):
        assert len(DPOConfig.model_validate(SUPERVISED | {"loss": loss}).models()) == models
    DPOConfig.model_validate(SUPERVISED | {"loss": "robust", "label_smoothing": 0.1})


@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({}, [2, 4, 6, 7]),
        ({"checkpoint_every": 3}, [2, 3, 4, 6, 7]),
        ({"checkpoint_at_evaluations": False}, [7]),
        ({"checkpoint_at_evaluations": False, "checkpoint_every": 3}, [3, 6, 7]),
    ],
)
def test_checkpoints_follow_evaluations_intervals_and_the_last_step(fields, due):
    """Of seven steps, the even ones are evaluated."""
    config = SavingConfig.model_validate(fields)
    assert due == [
        step for step in range(1, 8) if config.checkpoint_due(step, last=7, evaluated=step % 2 == 0)
    ]
    assert config.recipe() == {}  # the choice does not change the result


OWN = {"path": "facebook/opt-350m"}


BUILT = {"architecture": {"model_type": "gpt2"}, "vocab_size": 300}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *((kind, {"start": "own"}, "base_model: found none, expected one for start own")
          for kind in (RewardModelConfig, CriticConfig)),
        *((kind, {"base_model": OWN}, f"start: found {start}, expected own beside base_model")
          for kind, start in ((RewardModelConfig, "sft"), (CriticConfig, "reward_model"))),
        (RewardModelConfig, {"start": "base", "base_model": OWN},
         "start: found base, expected own beside base_model"),
        # A built model would learn another tokenizer than the policy's.
        (CriticConfig, {"start": "own", "base_model": BUILT},
         "base_model.path: found none, expected a folder"),
    ],
)  # fmt: skip
def test_a_base_model_of_its_own_and_the_start_belong_together(kind, fields, message):
    given = SUPERVISED if kind is RewardModelConfig else MODEL
    kind.model_validate(given | {"start": "own", "base_model": OWN})
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(given | fields)
    assert message in str(refusal.value)


def test_evaluations_are_evenly_spaced_and_the_last_one_is_after_the_last_step():
    assert evaluation_steps(10, 4) == {2, 5, 8, 10}
    assert evaluation_steps(3, 5) == {1, 2, 3}
