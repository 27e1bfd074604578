"""`kedro rlhf plan`: the stages of a pipeline, what fits, and what would."""

import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project
from rich.console import Console

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands.plan import make_plan, show, to_json
from rlhf_pipeline.config.stages import BLOCKS
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.hardware import named

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Runs the command in this process; returns what it prints, or the log if it `fails`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def plan(*options, params=(), fails=False):
        given = ",".join([f"root={tmp_path}", *params])
        arguments = ["rlhf", "plan", f"--params={given}", *options]
        done = CliRunner().invoke(cli, arguments, obj=bootstrap_project(PROJECT))
        assert done.exit_code == int(fails), done.output
        return " ".join(done.stderr.split()) if fails else done.stdout

    return plan


def weights_of_sft(plan):
    """The bytes of the weights in the stage `sft` of a plan."""
    (sft,) = (stage for stage in plan["stages"] if stage["stage"] == "sft")
    return sft["models"]["sft"]["weights"]


def test_the_hardware_at_hand(plan):
    found = json.loads(plan("--env=tiny", "--json"))
    assert found["hardware"]["ranks"] == 2
    assert [stage["stage"] for stage in found["stages"]] == [
        "sft", "reward_model", "ppo", "evaluate",
    ]  # fmt: skip
    assert all(stage["fits"] for stage in found["stages"])
    # conf/tiny: a Llama with 512 * 32 embeddings, twice 4 * 32 * 32 + 3 * 32 * 64 weights, 5 norms.
    assert found["parameters"] == 512 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64) + 5 * 32


def test_a_published_model_on_a_named_gpu_with_the_fix(plan):
    """OPT-1.3B: 18 bytes for each of 1.316e9 weights, gradients included, on 24 GB."""
    lines = plan("--model=opt-1.3b", "--gpus=1x24").splitlines()
    assert lines[0] == "opt-1.3b: 1,315,753,984 parameters, on 1 x GPU, 24.0 GiB each"
    assert sum("does not fit: found" in line for line in lines) == len(fixes(lines)) > 1


@pytest.mark.parametrize(("gpu", "size"), [("a100-80", 2), ("v100-32", 4)])
def test_a_named_gpu_has_the_precision_that_a_run_would_take(plan, gpu, size):
    found = json.loads(plan("--model=opt-1.3b", f"--gpu={gpu}", "--json"))
    assert weights_of_sft(found) == size * 1_315_753_984


def fixes(lines):
    """The option that each fix prints, which can be copied as a whole."""
    found = [re.search(r"Fix: --params=(\S+) \(", line) for line in lines]
    return [option[1] for option in found if option is not None]


def planned(stages, gpus, **changes):
    """The plan of OPT-1.3B, and what is printed of it in 80 columns."""
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env="base", **CONFIG_LOADER_ARGS)
    parameters = changed(loader["parameters"], changes)
    found = make_plan(parameters, stages, model="opt-1.3b", hardware=named(None, gpus))
    output = io.StringIO()
    show(found, Console(file=output, width=80))
    return found, output.getvalue()


def test_a_fix_is_on_one_line_of_a_terminal_with_80_columns():
    found, printed = planned(["ppo"], "1x24")
    (option,) = fixes(printed.splitlines())
    changes = found.fits["ppo"].changes.items()
    assert option == ",".join(f"{name}={value}".lower() for name, value in changes)
    assert len(option) > 80


def test_every_phase_has_its_memory_and_the_largest_one_is_the_peak():
    found, printed = planned(list(BLOCKS), "2x8x80")
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed and len(found.fits) == 6
    memory = found.fits["ppo"].memory
    rows = re.findall(r" (?:backward|step|scoring|generation) +([\d.]+) *\n", printed)
    sizes = [float(size) for size in rows]
    assert len(sizes) == sum(len(fit.memory.phases) for fit in found.fits.values())
    assert round(memory.peak / 2**30, 2) in sizes
    assert "actor generation" in printed and "reward_model scoring" in printed


def test_the_plan_names_the_number_that_auto_stands_for():
    found, printed = planned(["sft"], "8x40", **{"sft.micro_batch_tokens": "auto"})
    number = found.numbers["sft.micro_batch_tokens"]
    assert planned(["sft"], "8x40", **found.numbers)[0].fits == found.fits
    assert json.loads(to_json(found))["automatic"] == {"sft.micro_batch_tokens": number}
    assert f"sft.micro_batch_tokens: auto is {number} here\nsft fits: " in printed


def test_parameters_that_this_machine_refuses_are_planned(plan):
    """4-bit weights need a GPU, and two nodes another machine; a plan needs neither."""
    four_bit = ["sft.lora.quantize=nf4", "sft.deepspeed.precision=bf16"]
    found = json.loads(plan("--model=opt-6.7b", "--gpus=2x8x80", "--json", params=four_bit))
    assert (found["hardware"]["nodes"], found["hardware"]["ranks"]) == (2, 8)
    assert weights_of_sft(found) < 5e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--params=base_model.path=someone/model"],
         "base_model.path: found someone/model, whose sizes are not known on this machine. Fix: "
         "set it to a local folder with a config.json, or name a model of about its size, such "
         "as --model opt-1.3b"),
        (["--model=opt-1.3"], "model: found 'opt-1.3' (did you mean opt-1.3b?)"),
        (["--gpu=a1000"], "--gpu: found 'a1000'"),
    ],
)  # fmt: skip
def test_mistakes(plan, options, message):
    assert message in plan(*options, fails=True)


HUB = "split.sources=[{name: Dahoas/rm-static}]"


@pytest.mark.parametrize(
    ("options", "params", "expected"),
    [
        (["--env=tiny"], [], "The parameters are valid for 2 ranks."),
        (["--env=opt-30b-2x8x80", "--gpus=2x8x80", "-p", "dpo"], [],
         "The parameters are valid for 16 ranks."),
        # 4-bit weights need neither a GPU nor their library here.
        (["--model=opt-1.3b", "--gpus=1x24"],
         [HUB, "sft.lora.quantize=nf4", "sft.deepspeed.precision=bf16"],
         "The parameters are valid for 1 rank."),
        (["--env=tiny"], ["launch.processes=3", "sft.batch_size=2"],
         " - sft.batch_size (--params): found 2, expected a multiple of 3 ranks "),
        (["--model=opt-1.3b", "--gpus=2x8x80"], [HUB, "launch.processes=8"],
         "launch: found 8 ranks with mode local and processes 8, expected 16: 8 on each of 2 "
         "nodes. Fix: set launch.processes to 8, and launch.mode to command with launch.nodes 2"),
        (["--model=opt-1.3b", "--gpus=8x80"], [HUB, "split.max_prompt_tokens=2000"],
         " - ppo.sampling.max_response_tokens: found 256, expected at most 48: the model's 2048 "
         "positions"),
    ],
)  # fmt: skip
def test_the_parameters_are_checked_for_the_hardware(plan, options, params, expected):
    printed = plan("--check", *options, params=params, fails="expected" in expected)
    assert expected in printed


@pytest.mark.parametrize("option", ["--gpus=8x80", "--model=opt-1.3b", "--check", "--json"])
def test_only_this_machine_can_be_measured(option):
    done = CliRunner().invoke(
        cli, ["rlhf", "plan", "--measure", option], obj=bootstrap_project(PROJECT)
    )
    assert done.exit_code == 2 and "--measure measures this machine" in done.output
