"""Every preset passes the checks of a run on its GPUs, its plan fits, and DeepSpeed accepts its
settings. The environments in conf/ are what the table gives."""

import json
from pathlib import Path

import pytest
import yaml
from deepspeed_settings import engine_settings, refusal

from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.models import MODELS, find_model
from rlhf_pipeline.sizing.presets import HARDWARE, METHODS, as_yaml, find_preset, make_preset
from rlhf_pipeline.stages.launch.resources import rank_count

COMMITTED = (
    ("llama-3-8b", "1x80", "lora"),
    ("opt-13b", "8x80", "full"),
    ("opt-30b", "2x8x80", "full"),
)
"""The presets in conf/: one GPU, one machine, several machines."""
CONF = Path(__file__).parents[2] / "conf"


def settings_of(preset, parameters):
    """The distinct DeepSpeed settings of a preset, with their ranks, after all checks."""
    hardware = preset.hardware
    stages = [*preset.memory]
    plan = make_plan(parameters, stages, hardware=hardware)
    assert {name: fit.fits for name, fit in plan.fits.items()} == dict.fromkeys(stages, True)
    for name, fit in plan.fits.items():
        assert fit.memory.peak == preset.memory[name].peak
    blocks = check(parameters, gpus=hardware.ranks, elsewhere=True)
    assert rank_count(blocks["launch"], hardware.ranks) == hardware.world
    machine = {"hidden_size": find_model(preset.model).shape.hidden, "on_gpu": True}
    trained = blocks["sft"] or blocks["reward_model"] or blocks["grpo"].actor
    return {
        (json.dumps(settings), hardware.world)
        for stage in stages
        for settings in engine_settings(blocks[stage], trained, **machine).values()
    }


def base_parameters():
    """The parameters of a project with a model and data of its own."""
    given = {"base_model": {"path": "x/y"}, "split": {"sources": [{"name": "Dahoas/rm-static"}]}}
    loader = LayeredConfigLoader(str(CONF), env="base", runtime_params=given, **CONFIG_LOADER_ARGS)
    return loader["parameters"]


def with_values(parameters, preset):
    """The parameters with those of a preset."""
    return changed(parameters, {name: value for name, (value, _) in preset.settings.items()})


def refusals(settings):
    return {refusal(json.loads(text), ranks) for text, ranks in settings}


@pytest.mark.parametrize("chosen", COMMITTED, ids="-".join)
def test_an_environment_in_conf_is_what_the_table_gives(chosen):
    preset = make_preset(*chosen)
    assert (CONF / preset.name / "parameters.yml").read_text() == as_yaml(preset, preset.name), (
        "write it again: kedro rlhf preset ... --overwrite"
    )
    loader = LayeredConfigLoader(str(CONF), env=preset.name, **CONFIG_LOADER_ARGS)
    assert with_values(loader["parameters"], preset) == loader["parameters"]
    assert loader["globals"]["root"] == f"data/{preset.name}"
    assert refusals(settings_of(preset, loader["parameters"])) == {None}


@pytest.mark.parametrize(
    ("chosen", "instruct", "trained", "left_out"),
    [
        (("qwen2.5-7b", "1x80", "lora", "grpo"), True, ["grpo"], ["sft", "reward_model", "ppo"]),
        (("qwen2.5-7b", "8x80", "full", "dpo"), True, ["reward_model", "dpo"], ["sft", "ppo"]),
        (("qwen3-8b", "8x80", "full", "grpo"), False, ["sft", "grpo"], ["reward_model", "ppo"]),
        (("mistral-7b", "1x80", "lora", "kto"), False, ["sft", "reward_model", "kto"], ["ppo"]),
        (("llama-3-8b", "8x80", "full", "full"), True, ["reward_model", "ppo"], ["sft"]),
        (("opt-1.3b", "3x80", "full", "grpo"), False, ["sft", "grpo"], ["reward_model", "ppo"]),
    ],
)  # fmt: skip
def test_a_preset_of_a_road_has_its_stages_alone(chosen, instruct, trained, left_out):
    preset = make_preset(*chosen, instruct=instruct)
    parameters = with_values(base_parameters(), preset)
    assert [name for name in ("sft", "reward_model", "ppo") if parameters[name] is None] == left_out
    assert set(trained) <= set(preset.memory)
    assert yaml.safe_load(as_yaml(preset, preset.name)) == preset.parameters
    assert max(map(len, as_yaml(preset, preset.name).splitlines())) <= 100
    assert refusals(settings_of(preset, parameters)) == {None}


@pytest.mark.long
def test_every_preset_of_the_table_is_accepted(capsys):
    base = base_parameters()
    found = (
        find_preset(model, gpus, method)
        for model in MODELS
        for gpus in HARDWARE
        for method in METHODS
    )
    presets = [preset for preset in found if preset is not None]
    settings = set()
    for preset in presets:
        settings |= settings_of(preset, with_values(base, preset))
    assert refusals(settings) == {None}
    distinct = {text for text, _ in settings}
    with capsys.disabled():
        print(f"\n{len(presets)} presets, {len(distinct)} distinct settings of DeepSpeed")
    assert len(presets) > 700
    assert len(distinct) > 50
