"""Presets: parameters of a model on some hardware, as a file that a person wants to read."""

import re

import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.models import MODELS
from rlhf_pipeline.sizing.presets import METHODS, SOURCES, as_yaml, hyperparameters, make_preset


def test_the_file_contains_the_parameters_with_their_sources():
    preset = make_preset("llama-2-7b", "1x24", "qlora")
    assert preset.name == "llama-2-7b-1x24-qlora"
    text = as_yaml(preset, preset.name)
    for line in (
        "# llama-2-7b on 1 GPU of 24 GB; QLoRA.",
        "  lora: {rank: 64, alpha: 16, quantize: nf4}  # Dettmers 2023",
        "    learning_rate: 0.0002                   # Dettmers 2023",
        "    learning_rate: 0.0001                   # 10 x Llama 2: Biderman 2024",
        "  deepspeed: {zero_stage: 1, precision: bf16, kernels: liger}",
        "# Extras: liger, quantization. A run says how to install one that is missing.",
    ):
        assert f"\n{line}" in f"\n{text}"


def test_every_rank_has_its_share_of_a_batch():
    # 3 ranks: 32 and 64 become 33 and 66; 512 responses become one minibatch of 513.
    parameters = make_preset("opt-1.3b", "3x80", "full").parameters
    assert parameters["sft"]["batch_size"] == 33
    assert parameters["reward_model"]["batch_size"] == parameters["dpo"]["batch_size"] == 66
    assert parameters["ppo"]["minibatch_size"] == 513
    assert parameters["ppo"]["rollout_batch_size"] == 513
    text = as_yaml(make_preset("opt-1.3b", "8x8x80", "full"), "x")
    assert "batch_size: 64                            # for 64 ranks; InstructGPT has 32\n" in text


@pytest.mark.parametrize(
    ("model", "gpus", "method", "message"),
    [
        ("llama-2-7b", "1x24", "full", "--gpus: found 1x24, expected more memory for llama-2-7b "
         "with --method full. Fix: use --gpus 1x141, or --method qlora"),
        ("opt-175b", "1x24", "qlora", "--gpus: found 1x24, expected more memory for opt-175b with "
         "--method qlora. Fix: use a smaller model"),
        ("opt-1.3b", "8by80", "full", "--gpus: found '8by80', expected GPUs x GiB such as 8x80, or "
         "nodes x GPUs x GiB such as 2x8x80"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_fits(model, gpus, method, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_preset(model, gpus, method)


def test_a_chat_model_takes_the_place_of_its_base_model():
    preset = make_preset("qwen2.5-7b", "8x80", "full", "dpo", instruct=True)
    assert preset.name == "qwen2.5-7b-instruct-8x80-dpo"
    assert preset.parameters["base_model"]["path"] == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("road", "start", "message"),
    [
        ("full", {"instruct": True}, "--instruct: found opt-1.3b, expected a model with"),
        ("grpo", {"reward": "opt-350m"}, "--reward-model: found opt-350m with --pipeline grpo"),
    ],
)
def test_a_start_that_a_model_or_a_road_has_not_is_refused(road, start, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_preset("opt-1.3b", "8x80", "full", road, **start)


PLAIN = {"zero_stage": 1, "precision": "bf16"}
SHARDED = PLAIN | {"zero_stage": 3}
LIGER = {"kernels": "liger"}
RECOMPUTED = {"actor.gradient_checkpointing": True, "critic.gradient_checkpointing": True}
SPLIT = {"hybrid.inference_tp_size": 8}
ALONE = {"offload_during_rollout": True}
"""Nothing else is on the GPU while vLLM samples."""
AWAY = {"zero_stage": 3, "offload_parameters": True}


def trained(deepspeed):
    return {"actor.deepspeed": deepspeed, "critic.deepspeed": deepspeed}


def frozen(deepspeed):
    return {"reference.deepspeed": deepspeed, "reward_model.deepspeed": deepspeed}


@pytest.mark.parametrize(
    ("chosen", "tokens", "rows", "settings"),
    [
        (("opt-1.3b", "1x80", "full"), 8192, 256, trained(PLAIN)),
        # Adapters of 4-bit models are not for vLLM. Smaller passes come before other means.
        (("llama-3-8b", "1x80", "qlora"), 4096, 256,
         trained(PLAIN | LIGER) | {"generator": "transformers"}),
        (("opt-2.7b", "1x80", "full"), 8192, 256,
         trained(PLAIN | {"offload_optimizer": True}) | RECOMPUTED),
        # Frozen models are sharded before they are offloaded, and both before the trained ones.
        (("llama-3-8b", "8x80", "full"), 8192, 64,
         trained(PLAIN | LIGER | {"zero_stage": 2}) | RECOMPUTED | frozen({"zero_stage": 3})
         | ALONE),
        (("opt-6.7b", "4x80", "full"), 4096, 128,
         trained(PLAIN | {"zero_stage": 2}) | RECOMPUTED | frozen(AWAY) | ALONE),
        # Between machines, stage 1 sends gradients once.
        (("llama-3-8b", "2x8x80", "full"), 8192, 32,
         trained(PLAIN | LIGER | {"accumulate": "bf16"}) | RECOMPUTED | frozen({"zero_stage": 3})),
        # vLLM's copy of a sharded actor is split. With one row of a minibatch on each rank, nothing
        # adds up, and bf16 loses nothing.
        (("llama-3-70b", "8x8x80", "full"), 8192, 8,
         trained(SHARDED | LIGER | {"accumulate": "bf16"}) | RECOMPUTED | SPLIT),
        (("llama-3-70b", "4x8x80", "full"), 8192, 16,
         trained(SHARDED | LIGER | {"offload_optimizer": True}) | RECOMPUTED | SPLIT),
        (("opt-66b", "8x8x80", "full"), 8192, 8,
         trained(SHARDED | {"accumulate": "bf16"}) | RECOMPUTED | SPLIT | ALONE),
        (("llama-3-70b", "8x80", "lora"), 8192, 64,
         trained(SHARDED | LIGER) | RECOMPUTED | SPLIT | ALONE),
    ],
)  # fmt: skip
def test_ppo_gets_the_cheapest_settings_that_fit(chosen, tokens, rows, settings):
    preset = make_preset(*chosen)
    sizes = {"micro_batch_tokens": tokens, "sampling.batch_size_per_gpu": rows}
    names = ("deepspeed", "gradient_checkpointing", "generator", "generation", "tp_size",
             "offload_during_rollout", *sizes)  # fmt: skip
    found = {
        name.removeprefix("ppo."): value.value
        for name, value in preset.settings.items()
        if name.startswith("ppo.") and name.endswith(names)
    }
    assert found == {"generator": "vllm"} | settings | sizes


def test_stage_2_comes_before_checkpointing_and_more_rows_are_worth_the_way_to_main_memory():
    grpo = make_preset("llama-3-8b", "8x80", "full", "grpo").parameters["grpo"]
    assert grpo["actor"]["deepspeed"]["zero_stage"] == 2
    assert "gradient_checkpointing" not in grpo["actor"]
    assert grpo["sampling"]["batch_size_per_gpu"] == 128 == grpo["rollout_batch_size"] // 8
    assert grpo["offload_during_rollout"] is True


@pytest.mark.parametrize("model", ["opt-1.3b", "opt-13b"])
def test_a_reward_model_of_350m_stands_beside_a_larger_policy(model):
    """The pairs of DeepSpeed-Chat. OPT's models share a tokenizer, so the critic is small, too."""
    preset = make_preset(model, "8x80", "full", reward="opt-350m")
    assert preset.name == f"{model}-opt-350m-8x80"
    trained = preset.parameters["reward_model"]
    assert (trained["start"], trained["base_model"]) == ("own", {"path": "facebook/opt-350m"})
    assert "start" not in preset.parameters["ppo"]["critic"]
    alone = make_preset(model, "8x80", "full")
    assert preset.memory["reward_model"].held < alone.memory["reward_model"].held / 3
    text = as_yaml(preset, "x")
    assert f"kedro rlhf preset {model} --gpus 8x80 --reward-model opt-350m`" in text
    assert f"{'  start: own':<42}  # a reward model of its own size\n" in text


@pytest.mark.parametrize(
    ("chosen", "start"),
    [
        (("llama-3.2-1b", "1x80"), {"reward": "opt-350m"}),  # another family
        (("llama-3-8b", "8x80"), {"reward": "llama-3.2-1b", "instruct": True}),  # a chat model
    ],
)
def test_a_critic_starts_from_the_policy_beside_a_reward_model_of_other_tokens(chosen, start):
    preset = make_preset(*chosen, "full", **start)
    assert preset.parameters["ppo"]["critic"]["start"] == "policy"


# --- the published values, by model, size and method ----------------------------------------------


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        # InstructGPT's rates for 1.3B and 6B, and for 175B; PPO as in Huang et al. up to 7B.
        ("opt-1.3b", "full", [9.65e-6, 9e-6, 3e-6, 3e-6, 5e-7]),
        ("opt-13b", "full", [9.65e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("opt-66b", "full", [5.03e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("bloom", "full", [5.03e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("llama-2-7b", "full", [2e-5, 1e-5, 3e-6, 3e-6, 5e-7]),
        ("llama-2-70b", "full", [2e-5, 5e-6, 1e-6, 1e-6, 5e-7]),
        ("llama-3-8b", "full", [5e-6, 3e-6, 3e-6, 3e-6, 5e-7]),
        ("llama-3-70b", "full", [2e-6, 3e-6, 1e-6, 1e-6, 5e-7]),
        ("mistral-7b", "full", [2e-5, 9e-6, 3e-6, 3e-6, 5e-7]),
        ("qwen3-8b", "full", [7e-6, 9e-6, 3e-6, 3e-6, 5e-7]),
        # Adapters: SFT as in QLoRA, with half the rate above 13B; else ten times the rate.
        ("llama-3-8b", "lora", [2e-4, 3e-5, 3e-5, 3e-5, 5e-6]),
        ("llama-2-13b", "qlora", [2e-4, 1e-4, 1e-5, 1e-5, 5e-6]),
        ("llama-2-70b", "qlora", [1e-4, 5e-5, 1e-5, 1e-5, 5e-6]),
    ],
)
def test_learning_rates(model, method, expected):
    blocks = ("sft", "reward_model", "ppo.actor", "ppo.critic", "dpo")
    values = hyperparameters(model, method)
    assert [values[f"{name}.optimizer.learning_rate"].value for name in blocks] == expected


@pytest.mark.parametrize("method", METHODS)
def test_every_value_names_a_publication(method):
    for model in MODELS:
        for name, (_, source) in hyperparameters(model, method).items():
            assert any(known in source for known in SOURCES), (model, name)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # Steps, responses of a step and of an update, passes, KL coefficient, temperature.
        ("llama-2-7b", (1953, 512, 512, 4, 0.05, 0.7)),  # Huang et al.
        ("llama-2-13b", (400, 512, 64, 1, 0.01, None)),  # Llama 2
        ("llama-2-70b", (400, 512, 64, 1, 0.005, None)),
    ],
)
def test_ppo_follows_one_publication_as_a_whole(model, expected):
    values = hyperparameters(model, "full")
    names = (
        "steps", "rollout_batch_size", "minibatch_size", "ppo_epochs", "kl.coef",
        "sampling.temperature",
    )  # fmt: skip
    found = [values.get(f"ppo.{name}") for name in names]
    assert tuple(value and value.value for value in found) == expected
    sources = {v.source for n, v in values.items() if n.startswith("ppo.") and "tokens" not in n}
    paper = "Huang 2024" if model == "llama-2-7b" else "Llama 2"
    assert all(source.endswith(paper) for source in sources)


def test_values_of_dpo_and_of_weight_decay():
    names = [f"dpo.{name}" for name in ("beta", "epochs", "batch_size", "optimizer.learning_rate")]
    plain = hyperparameters("llama-3-70b", "full")
    assert [plain[name].value for name in names] == [0.1, 1, 64, 5e-7]  # Rafailov et al.
    zephyr = hyperparameters("mistral-7b", "full")
    assert [zephyr[name].value for name in names] == [0.01, 1, 128, 5e-7]
    decay = "sft.optimizer.weight_decay"
    assert hyperparameters("llama-2-7b", "full")[decay] == (0.1, "Llama 2")
    assert hyperparameters("llama-2-7b", "lora")[decay] == (0.0, "Dettmers 2023")
