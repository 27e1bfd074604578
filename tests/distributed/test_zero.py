"""Models for inference and for generation at ZeRO stages, on one rank in this process."""

from functools import partial

import numpy as np
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param

from rlhf_pipeline.config.training import FrozenModelConfig, SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed import engine as engines
from rlhf_pipeline.distributed import zero
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.distributed.zero import EMA, fp32_shards, is_sharded, whole_state_dict
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models.forward import probe_capabilities
from rlhf_pipeline.models.loading import load_policy

AVAILABLE = ZeroParamStatus.AVAILABLE


def block(**fields) -> TrainedModelConfig:
    return TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-3}} | fields)


@pytest.fixture(scope="module")
def policy(make_model):
    return make_model("llama")


def test_a_frozen_model_has_an_engine_only_if_it_is_sharded(policy, world):
    """An engine at stage 0 would create an optimizer; stages 1 and 2 need one."""
    trained = (block(deepspeed={"zero_stage": stage}).deepspeed for stage in (2, 3))
    settings = map(FrozenModelConfig().beside, trained)
    whole, sharded = (frozen_model(partial(load_policy, policy), each, world) for each in settings)
    assert not isinstance(whole, DeepSpeedEngine) and not is_sharded(whole)
    assert isinstance(sharded, DeepSpeedEngine) and is_sharded(sharded)
    assert isinstance(sharded.optimizer, DeepSpeedZeRoOffload) and sharded.lr_scheduler is None
    assert not any(
        parameter.requires_grad for model in (whole, sharded) for parameter in model.parameters()
    )


def test_stage_3_copies_weights_in_float32_once_more(policy, world):
    """DeepSpeed 0.19 compares a device with its name, so it never shares them (`sizing.memory`)."""
    engine = train_engine(partial(load_policy, policy), block(deepspeed={"zero_stage": 3}), 1)
    (masters,) = fp32_shards(engine)
    weights = [parameter.ds_tensor for parameter in engine.module.parameters()]
    assert masters.untyped_storage().data_ptr() not in {
        weight.untyped_storage().data_ptr() for weight in weights
    }


def test_no_weight_stays_gathered_after_its_pass(policy, world, monkeypatch):
    """Weights that a backward pass gathers to recompute a layer are released with that layer.

    DeepSpeed has to release frozen ones in another way than those that train.
    """
    monkeypatch.setattr(engines, "LIVE", 0)  # nothing is gathered ahead of its use
    config = block(deepspeed={"zero_stage": 3}, lora={"rank": 4}, gradient_checkpointing=True)
    engine = train_engine(partial(load_policy, policy), config, 3)
    found, backward = [], engine.backward

    def look(place):
        """Remember the parts with a whole weight. Biases, norms and adapters always are whole."""
        weights = engine.module.named_parameters()
        whole = [n for n, x in weights if x.ds_status == AVAILABLE and not x.ds_persist]
        found.append((place, {".".join(name.split(".")[:3]) for name in whole}))

    for number, layer in enumerate(engine.module.model.layers):
        place = f"model.layers.{number}"
        layer.mlp.down_proj.register_forward_pre_hook(lambda *_, place=place: look(place))

    def watched(loss):
        look("forward")
        backward(loss)
        look("backward")

    monkeypatch.setattr(engine, "backward", watched)

    def loss():
        return engine(torch.tensor([[5, 6, 7]]), use_cache=False).logits.square().mean(), {}

    for _ in range(3):  # from the second one on, DeepSpeed knows the order of the weights
        optimizer_step(engine, world, [loss, loss])
        look("step")
    assert [(place, whole) for place, whole in found if not whole <= {place}] == []
    assert ("model.layers.0", {"model.layers.0"}) in found


@pytest.mark.parametrize(
    ("own", "precision", "kernels"),
    [
        ({}, "bf16", "compile"),
        ({"precision": "fp32", "kernels": "liger"}, "fp32", "liger"),
        ({"zero_stage": 3}, "bf16", None),  # compiled layers cannot gather their weights
        ({"zero_stage": 3, "kernels": "liger"}, "bf16", "liger"),
    ],
)
def test_a_frozen_model_has_precision_and_kernels_of_its_companion(own, precision, kernels):
    """Otherwise the first KL between actor and reference would not be 0."""
    companion = block(deepspeed={"precision": "bf16", "kernels": "compile"}).deepspeed
    found = FrozenModelConfig.model_validate({"deepspeed": own}).beside(companion)
    assert (found.precision, found.kernels) == (precision, kernels)


@pytest.mark.parametrize("stage", [1, 3])
def test_generation_uses_its_cache_despite_gradient_checkpointing(policy, world, stage):
    """After the prompts, each forward pass reads one new token and takes the others from its cache.

    The responses equal those of the model without an engine. In training mode, layers with gradient
    checkpointing would not use a cache.
    """
    config = block(deepspeed={"zero_stage": stage}, gradient_checkpointing=True)
    engine = train_engine(partial(load_policy, policy), config, 1)
    widths, prompts, sampling = [], [[5, 6, 7], [8]], SamplingConfig(max_response_tokens=6)

    def responses(model):
        generator = TransformersGenerator(model, TokenContract.read(policy))
        rollout = generator.generate(prompts, sampling, row_seeds(1, 1, np.arange(2)))
        return rollout.sequences.response_ids

    probe_capabilities(engine)  # takes forward passes of its own
    hook = engine.module.register_forward_pre_hook(
        lambda m, args, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    found = responses(engine)
    hook.remove()
    assert torch.equal(found, responses(load_policy(policy, "fp32").eval()))
    assert widths == [4] + [1] * (len(widths) - 1) and len(widths) > 2
    assert engine.module.training


def test_a_failed_generation_restores_training_mode_and_shards(policy, world):
    engine = train_engine(partial(load_policy, policy), block(deepspeed={"zero_stage": 3}), 1)
    hooks = sum(len(module._forward_hooks) for module in engine.module.modules())
    assert hooks > 0
    with pytest.raises(KeyError), zero.for_generation(engine) as module:
        assert not module.training and module.lm_head.weight.numel() > 0
        raise KeyError
    assert engine.module.training and engine.module.lm_head.weight.numel() == 0
    assert sum(len(module._forward_hooks) for module in engine.module.modules()) == hooks


# --- the average of an engine's weights, on two ranks of the lab ----------------------------------


CASES = {f"fp32, stage {stage}": ("fp32", stage) for stage in range(4)} | {
    f"bf16, stage {stage}": ("bf16", stage) for stage in (2, 3)
}
DECAY, STEPS = 0.75, 3


def train(lab, precision: str, stage: int, *, swap: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after some steps; with `swap`, the average is swapped in and out after each step."""

    optimizer = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"}
    config = block(optimizer=optimizer, deepspeed={"zero_stage": stage, "precision": precision})
    engine = train_engine(partial(load_policy, lab.models["llama"]), config, STEPS)
    whole = torch.Tensor.detach if stage == 0 else safe_get_full_fp32_param

    def masters() -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in engine.module.named_parameters()}

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in whole_state_dict(engine.module).items()}

    ema, expected, averages = EMA(engine, DECAY), masters(), {}
    for step in range(STEPS):
        ids = torch.arange(5, 13).view(1, -1) + step + lab.world.rank
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        ema.update()
        now = masters()
        expected = {name: DECAY * mean + (1 - DECAY) * now[name] for name, mean in expected.items()}
        if swap:
            with ema.in_place():
                averages = weights()
    return {"last": weights(), "masters": masters(), "averages": averages, "expected": expected}


def case(lab, precision: str, stage: int) -> dict[str, bool] | None:
    swapped, plain = (train(lab, precision, stage, swap=swap) for swap in (True, False))
    if lab.world.rank:
        return None  # at stage 3, only the first rank has whole weights
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    relative = 1e-6 if precision == "fp32" else 8e-3
    averages, last = swapped["averages"], swapped["last"]
    return {
        "is the average": all(
            averages[name].dtype == dtype
            and torch.allclose(averages[name], mean.to(dtype), rtol=relative, atol=1e-7)
            for name, mean in swapped["expected"].items()
        ),
        "differs": not any(torch.equal(averages[name], last[name]) for name in averages),
        "changes nothing": all(
            torch.equal(swapped[kind][name], value)
            for kind in ("last", "masters")
            for name, value in plain[kind].items()
        ),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_average_is_that_of_the_fp32_weights_and_training_is_unchanged(cells, name):
    """Swapped in, it equals the average of DeepSpeed's fp32 weights in the model's precision."""
    assert cells[name] == {"is the average": True, "differs": True, "changes nothing": True}
