"""Presets: parameters of a model on some hardware, as a file that a person wants to read."""

import pytest
import yaml

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.presets.preset import as_yaml, find_preset, make_preset


def test_the_file_contains_the_parameters():
    preset = make_preset("llama-2-7b", "1x24", "qlora")
    assert preset.name == "llama-2-7b-1x24-qlora"
    text = as_yaml(preset, preset.name)
    assert yaml.safe_load(text) == preset.parameters
    assert as_yaml(make_preset("llama-2-7b", "1x24", "qlora"), preset.name) == text
    assert max(map(len, text.splitlines())) <= 100
    for line in (
        "# llama-2-7b on 1 GPU of 24 GB; QLoRA.",
        "#   kedro run --env=llama-2-7b-1x24-qlora",
        "base_model:\n  path: meta-llama/Llama-2-7b-hf",
        "  sources: [{name: Dahoas/rm-static}]       # DeepSpeed-Chat",
        "  lora: {rank: 64, alpha: 16, quantize: nf4}  # Dettmers 2023",
        "    learning_rate: 2.0e-4                   # Dettmers 2023",
        "    learning_rate: 1.0e-4                   # 10 x Llama 2: Biderman 2024",
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


def test_what_does_not_fit_is_refused_with_what_fits():
    with pytest.raises(ConfigError) as refused:
        make_preset("llama-2-7b", "1x24", "full")
    assert str(refused.value) == (
        "--gpus: found 1x24, expected more memory for llama-2-7b with --method full. Fix: use "
        "--gpus 1x141, or --method qlora"
    )
    with pytest.raises(
        ConfigError, match=r"opt-175b with --method qlora\. Fix: use a smaller model"
    ):
        make_preset("opt-175b", "1x24", "qlora")
    assert find_preset("opt-66b", "1x24", "full") is None


def test_other_hardware_than_that_of_the_table():
    assert make_preset("opt-1.3b", "4x48", "full").parameters["launch"] == {"processes": 4}
    with pytest.raises(ConfigError, match="--gpus: found '8by80', expected GPUs x GiB"):
        make_preset("opt-1.3b", "8by80", "full")
