"""The dry run: errors name the stage, the parameter and the fix."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands import check as module
from rlhf_pipeline.commands.check import dry_run, environment_of
from rlhf_pipeline.config_loader import LayeredConfigLoader
from rlhf_pipeline.errors import ConfigError, PipelineError, StageError
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.hardware import named
from rlhf_pipeline.sizing.models import find_model
from rlhf_pipeline.stages.job import write_job

CONF = Path(__file__).parents[2] / "conf"
OPT = find_model("opt-1.3b")


def parameters(**given):
    given = {"base_model": {"path": OPT.path}, "split": {"sources": [HH]}, **given}
    loader = LayeredConfigLoader(str(CONF), env="base", runtime_params=given, **CONFIG_LOADER_ARGS)
    return loader["parameters"]


HH = {"name": "Dahoas/rm-static"}


@pytest.fixture
def checked(tmp_path):
    """Returns the jobs and the number of ranks of a dry run."""

    def run(gpus="8x80", **given):
        hardware = named(None, gpus)
        with environment_of(hardware):
            return dry_run(parameters(**given), hardware, register_pipelines()["full"], tmp_path)

    return run


@pytest.fixture
def plan():
    """Runs the command with `--check`."""
    metadata = bootstrap_project(CONF.parent)

    def run(*arguments):
        done = CliRunner().invoke(cli, ["rlhf", "plan", "--check", *arguments], obj=metadata)
        return done.exit_code, done.output.splitlines()

    return run


def test_a_line_for_each_stage(plan):
    before = dict(os.environ)
    sharded = "ppo.actor.deepspeed.zero_stage=3,split.sources=[{name: Dahoas/rm-static}]"
    code, lines = plan("--model=opt-1.3b", "--gpus=8x80", f"--params={sharded}")
    assert dict(os.environ) == before
    assert code == 0
    assert lines == [
        "base_model     1 process  job.json is valid",
        "source         1 process  job.json is valid",
        "split          1 process  job.json is valid",
        "sft            8 ranks    job.json is valid; DeepSpeed accepts sft",
        "reward_model   8 ranks    job.json is valid; DeepSpeed accepts reward_model",
        "ppo            8 ranks    job.json is valid; DeepSpeed accepts actor, reference, critic",
        "evaluate       8 ranks    job.json is valid",
    ]


@pytest.fixture
def without_deepspeed(monkeypatch):
    """Leave out the program that imports DeepSpeed."""
    monkeypatch.setattr(module, "_accepted", lambda jobs, *_: dict.fromkeys(jobs, ()))


def test_the_jobs_are_those_of_the_nodes(checked):
    srun = {"mode": "command", "nodes": 2, "command": "srun {command}", "processes": 8}
    jobs, ranks = checked("2x8x80", launch=srun)
    assert ranks == 16
    assert list(jobs) == [
        *("base_model", "source", "split", "sft", "reward_model", "ppo", "evaluate"),
    ]
    ppo = json.loads(jobs["ppo"].read_text())
    assert ppo["inputs"].keys() == {"prompts", "sft_model", "reward_model"}
    assert ppo["inputs"]["sft_model"].endswith("/export")
    assert "/sft/" in ppo["inputs"]["sft_model"]
    assert ppo["config"]["ppo"]["rollout_batch_size"] == 64
    # The newest commits on the hub are not known.
    assert json.loads(jobs["base_model"].read_text())["digests"] == {"commit": "0" * 40}


def test_an_environment_for_two_nodes_is_checked_on_this_machine(plan, without_deepspeed):
    code, lines = plan("--env=opt-30b-2x8x80", "--gpus=2x8x80", "--pipeline=dpo")
    assert code == 0
    assert [line for line in lines if "16 ranks" in line] == [
        "sft            16 ranks   job.json is valid",
        "dpo            16 ranks   job.json is valid",
        "reward_model   16 ranks   job.json is valid",
        "evaluate_dpo   16 ranks   job.json is valid",
    ]


def test_without_gpus_the_check_is_for_this_machine(plan, without_deepspeed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, lines = plan("--env=tiny", "--params=launch.processes=3,sft.batch_size=2")
    assert code == 1
    assert "  - sft.batch_size (--params): found 2, expected a multiple of 3 ranks " in "\n".join(
        lines
    )
    code, lines = plan("--env=tiny")
    assert (code, lines[3]) == (0, "sft            2 ranks    job.json is valid")


def test_four_bit_weights_need_neither_a_gpu_nor_their_library_here(checked):
    sft = {"lora": {"quantize": "nf4"}, "deepspeed": {"precision": "bf16"}}
    assert "sft" in checked("1x24", sft=sft)[0]


@pytest.mark.parametrize(
    ("gpus", "given", "message"),
    [
        (
            "3x80",
            {},
            "  - sft.batch_size: found 32, expected a multiple of 3 ranks (launch.processes). Fix: "
            "use 30 or 33",
        ),
        (
            "2x8x80",
            {"launch": {"processes": 8}},
            "launch: found 8 ranks with mode local and processes 8, expected 16: 8 on each of 2 "
            "nodes. Fix: set launch.processes to 8, and launch.mode to command with launch.nodes 2",
        ),
        (
            "8x80",
            {"split": {"sources": [HH], "max_prompt_tokens": 2000}},
            "  - ppo.sampling.max_response_tokens: found 256, expected at most 48: the model's "
            "2048 positions",
        ),
    ],
)
def test_faults_name_parameter_and_fix(checked, gpus, given, message):
    with pytest.raises(ConfigError) as refused:
        checked(gpus, **given)
    assert message in str(refused.value)


def test_a_job_that_reads_back_otherwise_is_refused(checked, monkeypatch):
    def altered(run):
        other = {name: block | {"revision": "other"} for name, block in run.config.items()}
        write_job(replace(run, config=other))

    monkeypatch.setattr(module, "write_job", altered)
    with pytest.raises(StageError, match="stage base_model: base_model: found other values in "):
        checked()


def test_an_error_of_a_node_names_its_stage(checked, monkeypatch):
    def fail(job, *_):
        raise PipelineError(f"{job.spec.name} fails")

    monkeypatch.setattr(module.Planner, "plan", lambda _, job: fail(job))
    with pytest.raises(PipelineError, match="stage base_model: base_model fails"):
        checked()


def test_settings_that_deepspeed_refuses_name_stage_and_engine(plan, monkeypatch):
    def answer(command, **_):
        Path(command[-1]).write_text('{"sft": {"sft": null}, "ppo": {"critic": "stage: bad"}}')
        return module.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module.subprocess, "run", answer)
    code, lines = plan("--env=tiny")
    assert code == 1
    message = r"Error: stage ppo: DeepSpeed [\d.]+ refuses the settings of critic: stage: bad. Fix"
    assert re.match(message, lines[0])


def test_the_program_fails(plan, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "false")
    code, lines = plan("--env=tiny")
    assert (code, lines) == (1, ["Error: the settings of DeepSpeed were not checked: code 1"])
