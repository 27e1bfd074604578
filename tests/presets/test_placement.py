"""Memory settings: the cheapest ones that fit."""

import pytest

from rlhf_pipeline.presets import placement
from rlhf_pipeline.presets.placement import place
from rlhf_pipeline.sizing.hardware import named
from rlhf_pipeline.sizing.models import find_model

SHAPE = find_model("llama-3-70b").shape
PLAIN = {"zero_stage": 1, "precision": "bf16"}
SUPERVISED = {"epochs": 1, "batch_size": 8, "micro_batch_tokens": 64}
PPO = {"steps": 1, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 64}


@pytest.fixture
def refuse(monkeypatch):
    """Make settings fit unless a predicate refuses them; return the settings that were tried."""

    def install(predicate):
        monkeypatch.setattr(placement, "plan_stage", lambda stage, p, *_: p[stage])
        monkeypatch.setattr(placement, "fits", lambda block, _: not predicate(block))

    return install


def placed(stage, gpus, method="full", shape=SHAPE, **changes):
    lora = {"lora": {"quantize": "nf4" if method == "qlora" else None}}
    model = {"optimizer": {"learning_rate": 1e-5}} | ({} if method == "full" else lora)
    block = {
        "sft": SUPERVISED | model,
        "ppo": PPO | {"actor": model, "critic": model},
        "evaluate": {},
    }[stage]
    found = place(stage, {stage: block | changes}, shape, named(None, gpus), method)
    return None if found is None else found[0]


def test_what_fits_is_left_alone(refuse):
    refuse(lambda block: False)
    assert placed("sft", "8x80") == {"deepspeed": PLAIN, "micro_batch_tokens": 8192}
    assert placed("evaluate", "1x80") == {
        "precision": "bf16",
        "zero_stage": 0,
        "micro_batch_tokens": 8192,
        "sampling.batch_size_per_gpu": 64,
    }


@pytest.mark.parametrize(("minibatch", "accumulate"), [(64, "bf16"), (128, None)])
def test_gradients_add_up_in_bf16_where_nothing_adds_up(refuse, minibatch, accumulate):
    """One row of a minibatch on each of 64 ranks is one micro batch."""
    refuse(lambda block: block["actor"]["deepspeed"]["zero_stage"] < 3)
    sizes = {"minibatch_size": minibatch, "rollout_batch_size": minibatch}
    found = placed("ppo", "8x8x80", **sizes)
    for model in ("actor", "critic"):
        assert found[f"{model}.deepspeed"].get("accumulate") == accumulate
    refuse(lambda block: False)  # stage 1 reduces the sums
    assert placed("ppo", "8x8x80", **sizes)["actor.deepspeed"] == PLAIN


@pytest.mark.parametrize(
    ("gpus", "method", "expected"),
    [
        # ZeRO stage, c: gradient checkpointing, o: offloaded optimizer
        ("1x80", "full", "1 1c 1co"),
        ("8x80", "full", "1 1c 2c 3c 2co 3co"),
        ("8x80", "lora", "1 1c 3c"),
        ("8x80", "qlora", "1 1c"),  # 4 bits are never sharded
    ],
)
def test_the_order_is_that_of_the_costs(refuse, gpus, method, expected):
    """Nothing is tried with larger micro batches if the smallest of them does not fit."""
    tried = []

    def refused(block):
        deepspeed = block["deepspeed"]
        name = f"{deepspeed['zero_stage']}{'c' * block.get('gradient_checkpointing', False)}"
        name += "o" * deepspeed.get("offload_optimizer", False)
        tried.append((name, block["micro_batch_tokens"]))
        return True

    refuse(refused)
    assert placed("sft", gpus, method) is None
    assert tried == [(name, tokens) for tokens in (2048, 1024) for name in expected.split()]


def test_frozen_models_are_sharded_before_they_are_offloaded(refuse):
    refuse(lambda block: not block["actor"].get("gradient_checkpointing"))
    assert "reference.deepspeed" not in placed("ppo", "8x80")
    refuse(lambda block: "reward_model" not in block)
    found = placed("ppo", "8x80")
    assert found["reference.deepspeed"] == found["reward_model.deepspeed"] == {"zero_stage": 3}
    offloaded = {"zero_stage": 3, "offload_parameters": True}
    assert placed("ppo", "1x80")["reference.deepspeed"] == offloaded
    with_adapters = placed("ppo", "1x80", "qlora")
    assert with_adapters["reward_model.deepspeed"] == offloaded
    assert "reference.deepspeed" not in with_adapters  # the actor is its own reference


def test_a_sharded_actor_samples_from_shards_before_it_samples_layer_by_layer(refuse):
    refuse(lambda block: block["actor"]["deepspeed"]["zero_stage"] < 3)
    assert "generator" not in placed("ppo", "8x80")
    refuse(lambda block: "generator" not in block)
    found = placed("ppo", "8x80")
    # 8 key-value heads on 8 ranks
    assert (found["generator"], found["hybrid.inference_tp_size"]) == ("hybrid", 8)
    four_heads = find_model("qwen2.5-7b").shape
    assert placed("ppo", "8x80", shape=four_heads)["hybrid.inference_tp_size"] == 4
    assert placed("ppo", "8x80", shape=find_model("opt-66b").shape) is None  # no such copies
    refuse(lambda block: "gather_for_generation" not in block)
    assert placed("ppo", "8x80")["gather_for_generation"] is False
    assert placed("evaluate", "8x80")["gather_for_generation"] is False


def test_the_largest_sizes_that_fit_are_taken(refuse):
    def size(block):
        return block["micro_batch_tokens"], block["sampling"]["batch_size_per_gpu"]

    refuse(lambda block: size(block) > (4096, 16))
    found = placed("evaluate", "1x80")
    assert (found["micro_batch_tokens"], found["sampling.batch_size_per_gpu"]) == (4096, 16)
