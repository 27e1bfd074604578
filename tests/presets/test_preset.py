"""Presets: parameters of a model on some hardware, as a file that a person wants to read."""

import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.presets.preset import as_yaml, make_preset


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
