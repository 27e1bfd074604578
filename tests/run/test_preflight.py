"""What the chosen nodes need is checked before a run and before each node."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.registry import FirstRows
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.run import preflight
from rlhf_pipeline.run.checks import check, check_values
from rlhf_pipeline.run.config_loader import LayeredConfigLoader
from rlhf_pipeline.run.preflight import (
    careful_faults,
    check_gate,
    check_inputs,
    check_judging_rows,
    check_memory,
    check_pipeline,
    check_root,
    check_rows,
    sized,
)
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.hardware import GIB, Hardware

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def parameters():
    return LayeredConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["parameters"]


def test_a_root_in_which_no_folder_can_be_made_is_refused():
    with pytest.raises(
        ConfigError, match=r"^root: found '/proc/data', but /proc is a folder .*Fix"
    ):
        check_root("/proc/data")


def test_a_full_disk_does_not_refuse_the_commands_that_free_it(disk):
    """A run is refused by what needs space."""
    disk.remount("nr_inodes=1")  # without room for another folder
    check_root(str(disk.path / "data"))
    disk.remount("ro")
    with pytest.raises(ConfigError, match=r"cannot write to \(Read-only file system\)"):
        check_root(str(disk.path / "data"))


def refused(params, name="grpo"):
    """What the checks of a pipeline say about parameters of --params."""
    project = bootstrap_project(CONF.parent).project_path
    with KedroSession.create(project, env="tiny", runtime_params=params) as session:
        catalog = session.load_context().catalog
        with pytest.raises(ConfigError) as refusal:
            check_pipeline(pipelines[name], catalog)
    return str(refusal.value)


def test_only_the_blocks_of_the_pipeline_are_at_fault_and_the_file_is_named(tmp_path):
    """Three ranks divide neither the batches of DPO, KTO and PPO, nor those of GRPO."""
    rewards = {"rewards": [{"reference": "exact"}], "rollout_batch_size": 32}
    rewards |= {"sampling": {"max_response_tokens": 16}}
    message = refused(
        {"root": str(tmp_path), "launch": {"processes": 3}, "grpo": rewards, "ppo": None,
         "reward_model": None, "sft": None}
    )  # fmt: skip
    assert message == (
        "grpo.rollout_batch_size (--params): found 32, expected a multiple of 24: 3 ranks "
        "(launch.processes) times 8 responses (grpo.responses_per_prompt). Fix: use 24 or 48"
    )


def test_only_a_run_that_evaluates_asks_the_harness_about_its_tasks(parameters, harness, tmp_path):
    tasks = {"tasks": {"names": ["bad"]}}
    blocks = check(parameters | {"evaluate": parameters["evaluate"] | tasks}, gpus=0)
    preflight.dry_run(blocks, {"sft"}, tmp_path, 1)
    assert harness() == []
    with pytest.raises(ConfigError, match=r"^evaluate\.tasks\.names: Tasks not found: bad\. Fix: "):
        preflight.dry_run(blocks, {"evaluate_dpo"}, tmp_path, 1)


@pytest.mark.parametrize("character", "*?[]{}:")
def test_a_root_that_is_a_pattern_or_a_list_is_refused(character):
    with pytest.raises(
        ConfigError, match=rf"^root: found '\{character}' in '/data/a\{character}b'"
    ):
        check_root(f"/data/a{character}b")
    check_root('/data/it\'s "a"\nroot, $HOME;touch x=1 # 100% `id` & <é> \\')


@pytest.mark.parametrize(
    ("nodes", "empty", "needs"),
    [
        (["dpo"], "reward_model", "dpo needs rows with chosen and rejected"),
        (["sft", "reward_model"], "reward_model", "reward_model needs rows with chosen"),
        (["grpo"], "ppo", "grpo needs rows with a prompt with a true answer or without any"),
        (["sft"], "sft", "sft needs rows with an answer"),
        (["kto"], "reward_model", None),  # labelled answers fill the same phase
        (["distill"], "sft", "distill needs rows with an answer"),
        (["sft"], "ppo", None),
        (["evaluate"], "ppo", None),
    ],
)
def test_a_stage_without_a_row_is_refused_before_anything_trains(tmp_path, nodes, empty, needs):
    paths = [f"{folder}/train.arrow" for folder in ("sft", "reward_model", "ppo", "kto")]
    files = {path: {"rows": 0 if path.startswith(empty) else 9} for path in paths}
    report = {"files": files, "sources": {"files (pc.csv)": {}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    blocks = {"distill": SimpleNamespace(given_batch_size=4)}
    end = r".*; found none in files \(pc\.csv\)\. Fix: name such columns"
    with pytest.raises(DataError, match=f"^split: {needs}{end}") if needs else nullcontext():
        check_rows(tmp_path, nodes, blocks)


@pytest.mark.parametrize(
    ("path", "rows", "fix"),
    [
        ("evaluation/test.arrow", 1, "expected at least 2. Fix: raise split.test_fraction"),
        ("judge_model/train.arrow", 19, "expected at least 20. Fix: raise evaluate.judge_model.h"),
        ("judge_model/train.arrow", 20, None),
    ],
)
def test_too_few_rows_to_judge_are_refused_before_anything_trains(tmp_path, path, rows, fix):
    (tmp_path / "report.json").write_text(json.dumps({"files": {path: {"rows": rows}}}))
    found = rf"^split: found {rows} rows in {path}, {fix}"
    with pytest.raises(DataError, match=found) if fix else nullcontext():
        check_judging_rows(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (20 * [{"chosen": "a", "rejected": "b"}], None),
        (19 * [{"chosen": "a", "rejected": "b"}], "found comparisons of 19 prompts, expected at "
         "least 20, for five models in turn are measured on a fifth by all 1 ranks. Fix: add"),
        (20 * [{"chosen": "a"}], "found one answer in a row, expected chosen and rejected in"),
    ],
)  # fmt: skip
def test_careful_comparisons_are_looked_at_before_a_run(rows, message):
    prompts = [(Message("user", f"{number}?"),) for number in range(len(rows))]
    examples = [Example(prompt, **row) for prompt, row in zip(prompts, rows, strict=True)]
    found = FirstRows({f"a:{number}": row for number, row in enumerate(examples)})
    assert [*careful_faults(found, 1)] == [] or "one answer" in message, "other rows may follow"
    found.is_whole = True
    faults = [*careful_faults(found, 1)]
    assert [fault.startswith(f"evaluate.judge_model.path: {message}") for fault in faults] == (
        [True] if message else []
    )
    assert message or "at least 40, for five models" in next(careful_faults(found, 8))


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


def test_a_reward_model_of_an_earlier_version_is_refused_before_a_policy_trains(reward_model):
    """Its report does not say what the model knows beyond length, which the verdict reads."""
    blocks = dict.fromkeys(parameter_blocks()) | {"reward_model": SimpleNamespace(gate=None)}
    given = {"reward_model": reward_model}
    with pytest.raises(
        ConfigError, match=r"^reward_model: found one of an earlier version, .*Fix: "
    ):
        check_inputs("ppo", given, ["ppo"], blocks)


@pytest.mark.parametrize("gate", [None, 0.44])
def test_a_reward_model_above_the_gate_reaches_ppo(reward_model, gate):
    check_gate(reward_model, gate, ppo())


@pytest.mark.parametrize(
    "rewards", [["json:dumps"], [{"model": "trained", "weight": 0}, "json:dumps"]]
)
def test_a_reward_model_without_weight_needs_no_accuracy(reward_model, rewards):
    check_gate(reward_model, 0.5, ppo(rewards=rewards))


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


def test_the_memory_of_a_distillation_contains_its_teacher(parameters):
    """A bf16 OPT-13B beside a small student: 2 bytes for each weight on each of 2 GPUs."""
    plan = {"teacher": "facebook/opt-13b", "reference": {"deepspeed": {"precision": "bf16"}}}
    given = as_json(check_values(parameters | {"distill": plan}))
    gpus = Hardware(2, gpu_memory=16 * GIB)
    with pytest.raises(ConfigError, match=r"^distill: found 23\.\d GiB of weights.* 16\.0 GiB of"):
        check_memory(given, {"distill"}, gpus, refuses=True)
    assert check_memory(given, {"distill"}, Hardware(2, gpu_memory=80 * GIB), refuses=True) == []


def test_a_teacher_of_unknown_size_is_not_checked_and_a_warning_says_so(parameters):
    given = as_json(check_values(parameters | {"distill": {"teacher": "someone/model"}}))
    (warning,) = check_memory(given, {"distill"}, Hardware(1, gpu_memory=GIB), refuses=True)
    assert warning.startswith(
        "distill: its memory is not checked: distill.teacher.path: found someone/model, whose sizes"
    )


def test_a_distillation_does_not_ask_how_good_the_reward_model_is(parameters):
    """It does not read the reward model, which is a judge only."""
    blocks = check_values(parameters | {"distill": {"teacher": "someone/model"}})
    assert blocks["reward_model"].gate is not None
    check_inputs("distill", {}, {"distill"}, blocks)


def test_lengths_are_checked_against_the_model_that_the_split_receives(parameters, tmp_path):
    """A model on the hub is known once it is fetched. Both limits need 512 + 256 positions."""
    parameters["split"] |= {"max_prompt_tokens": 512, "max_response_tokens": 256}
    blocks = check_values(parameters)

    def split_with(positions: int) -> None:
        config = {"model_type": "llama", "max_position_embeddings": positions}
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_inputs("split", {"base_model": tmp_path}, {"split"}, blocks)

    split_with(768)
    with pytest.raises(
        ConfigError,
        match=r"split\.max_response_tokens: found 256, expected at most 255: .* 767 positions",
    ):
        split_with(767)


@pytest.mark.parametrize(
    ("nodes", "missing", "refused"),
    [
        (["split", "sft"], "ppo/train.arrow", "correct"),
        (["sft", "ppo"], "ppo/train.arrow", "correct"),
        (["ppo"], "ppo/train.arrow", "correct"),
        (["dpo"], "ppo/train.arrow", None),  # nobody reads the rewards of PPO
        (["evaluate"], "ppo/train.arrow", None),  # PPO is trained
        (["sft", "ppo"], "evaluation/test.arrow", "exact"),
        (["evaluate"], "evaluation/test.arrow", "exact"),
        (["register"], "evaluation/test.arrow", "exact"),
    ],
)
def test_a_split_without_true_answers_that_a_run_reads_is_refused(
    parameters, tmp_path, nodes, missing, refused
):
    """Before the first stage that reads the split, whichever run has made it."""
    (tmp_path / "mine.py").write_text("def correct(prompts, responses, references): ...")
    files = {"reward_model/train.arrow": {"rows": 1}}
    report = {"files": files, "without_reference": {missing: {"files (pairs.jsonl)": 144}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    parameters["ppo"] |= {"rewards": [f"{tmp_path}/mine.py:correct"]}
    parameters["evaluate"] |= {"judges": [{"reference": "exact"}]}
    blocks = check_values(parameters)
    reader = next(name for name in nodes if name != "split")
    inputs = {"split": tmp_path}
    if reader in ("evaluate", "register"):
        inputs["params:evaluate"] = blocks["evaluate"]
    with (
        pytest.raises(DataError, match=rf"{missing} .*, as {refused} reads it")
        if refused
        else nullcontext()
    ):
        check_inputs(f"{reader} of a test", inputs, set(nodes), blocks)


def test_a_split_that_holds_nothing_back_is_refused_before_a_policy_trains(parameters, tmp_path):
    """As with `--from-nodes=ppo --params=inputs=newest` and a split of an earlier run."""
    (tmp_path / "report.json").write_text('{"files": {}, "without_reference": {}}')
    parameters["evaluate"] |= {"judge_model": {"held_back": 0.5}}
    blocks = check_values(parameters)
    with pytest.raises(ConfigError, match=r"held_back: found a split that holds nothing back"):
        check_inputs("ppo", {"split": tmp_path}, {"ppo", "evaluate"}, blocks)
    (tmp_path / "judge_model").mkdir()
    check_inputs("ppo", {"split": tmp_path}, {"ppo", "evaluate"}, blocks)


@pytest.fixture
def automatic(parameters, monkeypatch):
    """SFT of OPT-1.3B in bf16, on one GPU with 80 GiB; the other stages have numbers."""
    monkeypatch.setattr(
        preflight, "hardware_at_hand", lambda launch: Hardware(1, gpu_memory=80 * GIB)
    )
    sft = parameters["sft"] | {"micro_batch_tokens": "auto", "deepspeed": {"precision": "bf16"}}
    model = {"path": "facebook/opt-1.3b"}
    return parameters | {"base_model": model, "sft": sft | {"batch_size": 4096}}


def test_the_blocks_of_a_run_have_numbers(automatic):
    blocks = check_values(automatic)
    found = sized(blocks)
    assert found["sft"].micro_batch_tokens == 32768
    assert found["sft"].recipe()["micro_batch_tokens"] == 32768
    assert found | {"sft": blocks["sft"]} == blocks


def test_ranks_of_an_earlier_run_may_have_had_another_number(automatic):
    blocks = check_values(automatic | {"launch": {"continue_from": 8}})
    with pytest.raises(ConfigError, match=r"^sft\.micro_batch_tokens: found auto with launch"):
        sized(blocks)
    given = automatic["sft"] | {"micro_batch_tokens": 32768}
    numbers = check_values(automatic | {"launch": {"continue_from": 8}, "sft": given})
    assert sized(numbers) == numbers
