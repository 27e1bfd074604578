"""Presets: parameters of a model on some hardware, as a file that a person wants to read."""

import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.presets import as_yaml, make_preset


def test_the_file_contains_the_parameters_with_their_sources():
    preset = make_preset("llama-2-7b", "1x24", "qlora")
    assert preset.name == "llama-2-7b-1x24-qlora"
    text = as_yaml(preset, preset.name)
    for line in (
        "# llama-2-7b on 1 GPU of 24 GB; QLoRA.",
        "#   kedro run --env=llama-2-7b-1x24-qlora",
        "base_model:\n  path: meta-llama/Llama-2-7b-hf",
        "  sources: [{name: Dahoas/rm-static}]       # DeepSpeed-Chat",
        "  lora: {rank: 64, alpha: 16, quantize: nf4}  # Dettmers 2023",
        "    learning_rate: 0.0002                   # Dettmers 2023",
        "    learning_rate: 0.0001                   # 10 x Llama 2: Biderman 2024",
        "  deepspeed: {zero_stage: 1, precision: bf16}",
    ):
        assert f"\n{line}" in f"\n{text}"


def test_a_scheduler_starts_the_ranks_of_several_nodes():
    preset = make_preset("opt-1.3b", "2x8x80", "full")
    assert preset.parameters["launch"] == {
        "processes": 8,
        "mode": "command",
        "nodes": 2,
        "command": "srun --nodes=2 --ntasks-per-node=8 {command}",
    }
    assert "8 GPUs of 80 GB on each of 2 nodes; all weights train" in as_yaml(preset, "x")
    assert make_preset("opt-1.3b", "8x80", "full").parameters["launch"] == {"processes": 8}


def test_every_rank_has_its_share_of_a_batch():
    # 3 ranks: 32 and 64 become 33 and 66; 512 responses become one minibatch of 513.
    parameters = make_preset("opt-1.3b", "3x80", "full").parameters
    assert parameters["sft"]["batch_size"] == 33
    assert parameters["reward_model"]["batch_size"] == parameters["dpo"]["batch_size"] == 66
    assert parameters["ppo"]["minibatch_size"] == 513
    assert parameters["ppo"]["rollout_batch_size"] == 513
    text = as_yaml(make_preset("opt-1.3b", "8x8x80", "full"), "x")
    assert "batch_size: 64                            # for 64 ranks; InstructGPT has 32\n" in text


def test_adapters_are_on_all_models_that_train():
    parameters = make_preset("llama-3-8b", "1x80", "lora").parameters
    ppo, lora = parameters["ppo"], {"rank": 16, "alpha": 32}
    blocks = [parameters[name] for name in ("sft", "reward_model", "dpo")]
    assert [block["lora"] for block in (*blocks, ppo["actor"], ppo["critic"])] == [lora] * 5
    assert "lora" not in make_preset("llama-3-8b", "8x80", "full").parameters["sft"]


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
    with pytest.raises(ConfigError) as refused:
        make_preset(model, gpus, method)
    assert str(refused.value) == message


PLAIN = {"zero_stage": 1, "precision": "bf16"}
SHARDED = PLAIN | {"zero_stage": 3}
RECOMPUTED = {"actor.gradient_checkpointing": True, "critic.gradient_checkpointing": True}
ON_SHARDS = {"generator": "hybrid", "hybrid.inference_tp_size": 8}
AWAY = {"zero_stage": 3, "offload_parameters": True}


def trained(deepspeed):
    return {"actor.deepspeed": deepspeed, "critic.deepspeed": deepspeed}


def frozen(deepspeed):
    return {"reference.deepspeed": deepspeed, "reward_model.deepspeed": deepspeed}


@pytest.mark.parametrize(
    ("chosen", "tokens", "rows", "settings"),
    [
        (("opt-1.3b", "1x80", "full"), 8192, 64, trained(PLAIN)),
        (("llama-3-8b", "1x80", "qlora"), 4096, 64, trained(PLAIN)),  # smaller passes come first
        (("opt-2.7b", "1x80", "full"), 8192, 64,
         trained(PLAIN | {"offload_optimizer": True}) | RECOMPUTED),
        # Frozen models are sharded before they are offloaded, and both before the trained ones.
        (("llama-3-8b", "8x80", "full"), 8192, 64,
         trained(PLAIN | {"zero_stage": 2}) | RECOMPUTED | frozen({"zero_stage": 3})),
        (("opt-6.7b", "4x80", "full"), 4096, 32,
         trained(PLAIN | {"zero_stage": 2}) | RECOMPUTED | frozen(AWAY)),
        # A sharded actor samples from shards, or layer by layer where its family has none. With one
        # row of a minibatch on each rank, nothing adds up, and bf16 loses nothing.
        (("llama-3-70b", "8x8x80", "full"), 8192, 64,
         trained(SHARDED | {"accumulate": "bf16"}) | RECOMPUTED | ON_SHARDS),
        (("llama-3-70b", "4x8x80", "full"), 8192, 64,
         trained(SHARDED | {"offload_optimizer": True}) | RECOMPUTED | ON_SHARDS),
        (("opt-66b", "8x8x80", "full"), 8192, 64,
         trained(SHARDED | {"accumulate": "bf16"}) | RECOMPUTED | {"gather_for_generation": False}),
        (("llama-3-70b", "8x80", "lora"), 8192, 64,
         trained(SHARDED) | RECOMPUTED | {"gather_for_generation": False}),
    ],
)  # fmt: skip
def test_ppo_gets_the_cheapest_settings_that_fit(chosen, tokens, rows, settings):
    preset = make_preset(*chosen)
    sizes = {"micro_batch_tokens": tokens, "sampling.batch_size_per_gpu": rows}
    names = ("deepspeed", "gradient_checkpointing", "generator", "generation", "tp_size", *sizes)
    found = {
        name.removeprefix("ppo."): value.value
        for name, value in preset.settings.items()
        if name.startswith("ppo.") and name.endswith(names)
    }
    assert found == settings | sizes


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


def test_a_critic_starts_from_the_policy_beside_a_reward_model_of_another_family():
    preset = make_preset("llama-3.2-1b", "1x80", "full", reward="opt-350m")
    assert preset.parameters["ppo"]["critic"]["start"] == "policy"


def test_a_pair_without_a_reward_model_or_with_a_chat_model_is_no_equal_pair():
    with pytest.raises(ConfigError, match="--reward-model: found opt-350m with --pipeline grpo"):
        make_preset("opt-1.3b", "1x80", "full", "grpo", reward="opt-350m")
    preset = make_preset("llama-3-8b", "8x80", "full", instruct=True, reward="llama-3.2-1b")
    assert preset.parameters["ppo"]["critic"]["start"] == "policy"
