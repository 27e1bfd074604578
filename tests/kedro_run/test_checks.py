"""What the chosen nodes need is checked before a run and before each node."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from kedro.framework.project import pipelines

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.kedro_run import checks
from rlhf_pipeline.kedro_run.checks import (
    before_node,
    before_run,
    check_gate,
    check_root,
    check_split,
    check_values,
    sized,
)
from rlhf_pipeline.kedro_run.faults import block_faults, critic_faults, memory_faults, phase_faults
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.hardware import GIB, Hardware


@pytest.mark.parametrize(("capability", "precision"), [("8.0", "bf16"), ("7.0", "fp32")])
def test_a_run_beside_gpus_with_bf16_trains_in_it(
    load_catalog, tmp_path, monkeypatch, capability, precision
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '81559, {capability}, NVIDIA'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    catalog = load_catalog({"root": str(tmp_path), "launch": {"processes": 1}})
    assert catalog.load("params:sft").deepspeed.precision == precision


def test_a_root_that_is_a_pattern_a_list_or_no_folder_is_refused():
    for character in "*?[]{}:":
        with pytest.raises(ConfigError, match=rf"^root: found '\{character}' in '/data/a"):
            check_root(f"/data/a{character}b")
    check_root('/data/it\'s "a"\nroot, $HOME;touch x=1 # 100% `id` & <é> \\')
    with pytest.raises(ConfigError, match=r"^root: found '/proc/data', but /proc is a folder"):
        check_root("/proc/data")


def test_a_full_disk_does_not_refuse_the_commands_that_free_it(disk):
    """A run is refused by what needs space."""
    disk.remount("nr_inodes=1")  # without room for another folder
    check_root(str(disk.path / "data"))


def test_only_the_blocks_of_the_pipeline_are_at_fault_and_the_file_is_named(load_catalog, tmp_path):
    """Three ranks divide neither the batches of DPO, KTO and PPO, nor those of GRPO."""
    rewards = {"rewards": [{"reference": "exact"}], "rollout_batch_size": 32}
    rewards |= {"sampling": {"max_response_tokens": 16}}
    params = {"root": str(tmp_path), "launch": {"processes": 3}, "grpo": rewards}
    params |= {"ppo": None, "reward_model": None, "sft": None}
    catalog = load_catalog(params)
    with pytest.raises(ConfigError) as refusal:
        before_run(pipelines["grpo"], catalog)
    assert str(refusal.value) == (
        "grpo.rollout_batch_size (--params): found 32, expected a multiple of 24: 3 ranks "
        "(launch.processes) times 8 responses (grpo.responses_per_prompt). Fix: use 24 or 48"
    )


def test_a_policy_needs_its_block(changed):
    by_answers = {"rewards": [{"reference": "last_number"}]}
    blocks = {"rejection": {}, "distill": {"teacher": "FOLDER"}, "grpo": by_answers}
    for name, block in blocks.items():
        (fault,) = block_faults(check_values(changed({})), {"split", name})
        assert fault.startswith(
            f"{name}: found null, expected the parameters of the node {name}. Fix"
        )
        written = re.search(r"write `(.+?)` into", fault)
        assert yaml.safe_load(written[1]) == {name: block}
        assert [*block_faults(check_values(changed({name: block})), {"split", name})] == []


def test_a_phase_that_a_node_trains_on_needs_a_weight(changed):
    blocks = check_values(changed({"sft": None}))  # a node whose block is null needs no rows
    assert [*phase_faults(blocks, {"split", "sft", "ppo"})] == []
    blocks["distill"] = DistillConfig(teacher="FOLDER", given_batch_size=4)
    for weights, node, phase in (((0, 0, 1), "dpo", "reward_model"), ((0, 1, 1), "distill", "sft")):
        blocks["split"] = blocks["split"].model_copy(update={"weights": weights})
        (fault,) = phase_faults(blocks, {"split", node})
        assert fault.startswith(f"split.weights: found {list(weights)}, with 0 for {phase}, expec")
        assert [*phase_faults(blocks, {node})] == [], "its split is made already"


@pytest.mark.parametrize(
    ("nodes", "empty", "needs"),
    [
        (["dpo"], "reward_model", "dpo needs rows with chosen and rejected"),
        (["grpo"], "ppo", "grpo needs rows with a prompt with a true answer or without any"),
        (["sft"], "sft", "sft needs rows with an answer"),
        (["kto"], "reward_model", None),  # labelled answers fill the same phase
        (["distill"], "sft", "distill needs rows with an answer"),
        (["sft", "evaluate"], "ppo", None),
    ],
)
def test_a_stage_without_a_row_is_refused_before_anything_trains(tmp_path, nodes, empty, needs):
    paths = [f"{folder}/train.arrow" for folder in ("sft", "reward_model", "ppo", "kto")]
    files = {path: {"rows": 0 if path.startswith(empty) else 9} for path in paths}
    report = {"files": files, "sources": {"files (pc.csv)": {}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    blocks = dict.fromkeys(parameter_blocks(), True) | {
        "distill": SimpleNamespace(given_batch_size=4), "split": SimpleNamespace(held_back=0)
    }  # fmt: skip
    end = r".*; found none in files \(pc\.csv\)\. Fix: name such columns"
    with pytest.raises(DataError, match=f"^split: {needs}{end}") if needs else nullcontext():
        check_split(tmp_path, nodes, blocks)


@pytest.mark.parametrize(
    ("path", "rows", "fix"),
    [
        ("evaluation/test.arrow", 1, "expected at least 2. Fix: raise split.test_fraction"),
        ("judge_model/train.arrow", 19, "expected at least 20. Fix: raise evaluate.judge_model.h"),
        ("judge_model/train.arrow", 20, None),
    ],
)
def test_too_few_rows_to_judge_are_refused_before_anything_trains(
    changed, tmp_path, path, rows, fix
):
    (tmp_path / "report.json").write_text(json.dumps({"files": {path: {"rows": rows}}}))
    found, blocks = rf"^split: found {rows} rows in {path}, {fix}", check_values(changed({}))
    check_split(tmp_path, ["register"], blocks)
    with pytest.raises(DataError, match=found) if fix else nullcontext():
        check_split(tmp_path, ["evaluate_dpo"], blocks)


def test_a_critic_that_cannot_read_the_policys_tokens_is_refused_before_anything_trains(
    changed, tmp_path
):
    """The split has comparisons in the tokens of the reward model only if those are others."""
    blocks = check_values(changed({}))
    (tmp_path / "reward_model_own").mkdir()
    with pytest.raises(ConfigError, match=r"^ppo\.critic\.start: found reward_model, but"):
        before_node("sft", {"split": tmp_path}, {"sft", "ppo"}, blocks)
    blocks = check_values(changed({"ppo.critic.start": "policy"}))
    assert [*critic_faults(tmp_path, blocks, {"sft", "ppo"})] == []


@pytest.fixture
def reward_model(tmp_path):
    """A finished reward model whose accuracy is between 45% and 65%."""
    ends = {"": 0.55, "_lower": 0.45, "_upper": 0.65}
    metrics = {f"validation/accuracy{end}": value for end, value in ends.items()}
    Manifest("reward_model", "", 0, {}, {}, {}, metrics, {}).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("gate", "rewards", "fits"),
    [
        (0.5, ["trained"], False),
        (0.44, ["trained"], True),
        (None, ["trained"], True),
        (0.5, [{"model": "trained", "weight": 0}, "json:dumps"], True),
    ],
)
def test_a_reward_model_that_may_be_no_better_than_chance_never_reaches_ppo(
    reward_model, gate, rewards, fits
):
    model = {"optimizer": {"learning_rate": 1e-3}}
    sizes = {"steps": 1, "rollout_batch_size": 2, "rewards": rewards}
    policy = PPOConfig.model_validate(sizes | {"actor": model, "critic": model})
    message = (
        r"reward_model\.gate: found an accuracy of 55\.0% \(95%: 45\.0% to 65\.0%\) on "
        r"held-out comparisons, expected a lower end above 50\.0%.*set reward_model\.gate to null"
    )
    with nullcontext() if fits else pytest.raises(StageError, match=message):
        check_gate(reward_model, gate, policy)


def test_a_reward_model_of_an_earlier_version_is_refused_before_a_policy_trains(reward_model):
    """Its report does not say what the model knows beyond length, which the verdict reads."""
    blocks = dict.fromkeys(parameter_blocks()) | {"reward_model": SimpleNamespace(gate=None)}
    given = {"reward_model": reward_model}
    message = r"^reward_model: found one of an earlier version, .*Fix: "
    with pytest.raises(ConfigError, match=message):
        before_node("ppo", given, ["ppo"], blocks)


STAGES = {"base_model", "split", "sft", "reward_model", "ppo", "evaluate"}


@pytest.fixture
def large(parameters):
    """OPT-6.7B, whose fp32 weights alone are 24.8 GiB."""
    return parameters | {"base_model": {"path": "facebook/opt-6.7b"}}


def gpus(gib, ranks=1, nodes=1):
    return Hardware(ranks, nodes=nodes, gpu_memory=gib * GIB, main_memory=500 * GIB)


def test_what_cannot_fit_is_a_fault_and_activations_alone_are_a_warning(large):
    """20 bytes for each of 6.658e9 weights: weights, master copies and gradients 4, states 8. On 16
    GPUs these fit; the activations of 32 rows with 2,000 tokens do not."""
    ((fault,), warnings) = memory_faults(large, {"sft"}, gpus(96))
    assert warnings == [] and fault == (
        "sft: found 124.0 GiB of weights, gradients and optimizer states on each rank, expected at "
        "most the 96.0 GiB of its GPU. Fix: --params=sft.deepspeed.offload_optimizer=true; "
        "launch.memory_check=warn starts nevertheless"
    )
    large["sft"] = large["sft"] | {"micro_batch_tokens": 2**17, "batch_size": 512}
    large["split"] = large["split"] | {"max_prompt_tokens": 1500, "max_response_tokens": 500}
    (faults, (warning,)) = memory_faults(large, {"sft"}, gpus(80, ranks=8, nodes=2))
    assert faults == [] and warning.startswith("sft: may run out of memory: found ")
    assert "Fix: --params=sft.micro_batch_tokens=" in warning


def test_other_stages_small_models_and_unknown_sizes_pass(large, parameters):
    unknown = large | {"base_model": {"path": "someone/model"}}
    for given, nodes, hardware in (
        (large, {"split", "base_model"}, gpus(24)),
        (parameters, STAGES, Hardware(2)),
        (parameters, STAGES, Hardware(2, main_memory=2 * GIB)),
        (unknown, STAGES, gpus(1)),
    ):
        assert memory_faults(given, nodes, hardware) == ([], [])


def test_of_a_mixture_of_experts_a_warning_says_that_it_is_not_checked(large, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 300, "num_experts": 4}'
    )
    given = large | {"base_model": {"path": str(tmp_path)}}
    (faults, (warning,)) = memory_faults(given, {"sft"}, gpus(1))
    assert faults == [] and warning.startswith("memory is not checked: base_model: found a mixture")


def test_the_memory_of_a_distillation_contains_its_teacher(changed):
    """A bf16 OPT-13B beside a small student: 2 bytes for each weight on each of 2 GPUs."""
    plan = {"teacher": "facebook/opt-13b", "reference": {"deepspeed": {"precision": "bf16"}}}
    given = as_json(check_values(changed({"distill": plan})))
    ((fault,), _) = memory_faults(given, {"distill"}, gpus(16, ranks=2))
    assert re.match(r"distill: found 23\.\d GiB of weights.* 16\.0 GiB of", fault)
    assert memory_faults(given, {"distill"}, gpus(80, ranks=2)) == ([], [])
    unknown = as_json(check_values(changed({"distill": {"teacher": "someone/model"}})))
    (faults, (warning,)) = memory_faults(unknown, {"distill"}, gpus(1))
    assert faults == [] and warning.startswith("distill: its memory is not checked: distill.teac")


def test_lengths_are_checked_against_the_model_that_the_split_receives(parameters, tmp_path):
    """A model on the hub is known once it is fetched. Both limits need 512 + 256 positions."""
    parameters["split"] |= {"max_prompt_tokens": 512, "max_response_tokens": 256}
    blocks = check_values(parameters)

    def split_with(positions: int) -> None:
        config = {"model_type": "llama", "max_position_embeddings": positions}
        (tmp_path / "config.json").write_text(json.dumps(config))
        before_node("split", {"base_model": tmp_path}, {"split"}, blocks)

    split_with(768)
    message = r"split\.max_response_tokens: found 256, expected at most 255: .* 767 positions"
    with pytest.raises(ConfigError, match=message):
        split_with(767)


@pytest.mark.parametrize(
    ("nodes", "missing", "refused"),
    [
        (["split", "sft"], "ppo/train.arrow", "correct"),
        (["ppo"], "ppo/train.arrow", "correct"),
        (["dpo"], "ppo/train.arrow", None),  # nobody reads the rewards of PPO
        (["evaluate"], "ppo/train.arrow", None),  # PPO is trained
        (["sft", "ppo"], "evaluation/test.arrow", "exact"),
        (["register"], "evaluation/test.arrow", "exact"),
    ],
)
def test_a_split_without_true_answers_that_a_run_reads_is_refused(
    parameters, tmp_path, nodes, missing, refused
):
    """Before the first stage that reads the split, whichever run has made it."""
    (tmp_path / "mine.py").write_text("def correct(prompts, responses, references): ...")
    files = {"reward_model/train.arrow": {"rows": 1}}
    rows = {"files (pairs.jsonl)": 144, "files (more.jsonl)": 3}
    report = {"files": files, "without_reference": {missing: rows}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    parameters["ppo"] |= {"rewards": ["trained", f"{tmp_path}/mine.py:correct"]}
    parameters["evaluate"] |= {"judges": [{"reference": "exact"}]}
    blocks = check_values(parameters)
    reader = next(name for name in nodes if name != "split")
    inputs = {"split": tmp_path}
    if reader in ("evaluate", "register"):
        inputs["params:evaluate"] = blocks["evaluate"]
    message = re.escape(
        f"split: found prompts without a true answer in {missing} (files (pairs.jsonl) 144, files "
        f"(more.jsonl) 3), expected one for each, as {refused} reads it. Fix: set "
        "split.without_reference to drop, which keeps such prompts out of PPO and the final "
        "evaluation, or set columns.reference of the source"
    )
    with pytest.raises(DataError, match=message) if refused else nullcontext():
        before_node(f"{reader} of a test", inputs, set(nodes), blocks)


def test_a_split_that_holds_nothing_back_is_refused_before_a_policy_trains(parameters, tmp_path):
    """As with `--from-nodes=ppo --params=inputs=newest` and a split of an earlier run."""
    (tmp_path / "report.json").write_text('{"files": {}, "without_reference": {}}')
    parameters["evaluate"] |= {"judge_model": {"held_back": 0.5}}
    blocks = check_values(parameters)
    with pytest.raises(ConfigError, match=r"held_back: found a split that holds nothing back"):
        before_node("ppo", {"split": tmp_path}, {"ppo", "evaluate"}, blocks)
    (tmp_path / "judge_model").mkdir()
    before_node("ppo", {"split": tmp_path}, {"ppo", "evaluate"}, blocks)


def test_the_blocks_of_a_run_have_numbers_for_automatic_micro_batches(parameters, monkeypatch):
    """SFT of OPT-1.3B in bf16, on one GPU with 80 GiB; the other stages have numbers."""
    monkeypatch.setattr(checks, "hardware_at_hand", lambda launch: Hardware(1, gpu_memory=80 * GIB))
    sft = parameters["sft"] | {"deepspeed": {"precision": "bf16"}, "batch_size": 4096}
    model = {"path": "facebook/opt-1.3b"}

    def blocks(tokens, **more):
        return check_values(
            parameters | {"base_model": model, "sft": sft | {"micro_batch_tokens": tokens}} | more
        )

    assert sized(blocks("auto")) == blocks(32768) == sized(blocks(32768))
    earlier = {"launch": {"continue_from": 8}}  # its ranks may have had another number
    with pytest.raises(ConfigError, match=r"^sft\.micro_batch_tokens: found auto with launch"):
        sized(blocks("auto", **earlier))
    assert sized(blocks(32768, **earlier)) == blocks(32768, **earlier)
