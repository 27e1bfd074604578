"""Every preset passes the checks of a run on its GPUs, its plan fits, and DeepSpeed accepts its
settings. The environments in conf/ are what the table gives."""

import json
from pathlib import Path

import pytest
from deepspeed_settings import engine_settings, refusal

from rlhf_pipeline.checks import check
from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.commands.preset import files
from rlhf_pipeline.config_loader import LayeredConfigLoader
from rlhf_pipeline.presets.placement import STAGES
from rlhf_pipeline.presets.preset import HARDWARE, METHODS, find_preset, make_preset
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.models import MODELS, find_model
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
    plan = make_plan(parameters, [*STAGES], hardware=hardware)
    assert {name: fit.fits for name, fit in plan.fits.items()} == dict.fromkeys(STAGES, True)
    for name, fit in plan.fits.items():
        assert fit.memory.peak == preset.memory[name].peak
    blocks = check(parameters, gpus=hardware.ranks, elsewhere=True)
    assert rank_count(blocks["launch"], hardware.ranks) == hardware.world
    machine = {"hidden_size": find_model(preset.model).shape.hidden, "on_gpu": True}
    return {
        (json.dumps(settings), hardware.world)
        for stage in STAGES
        for settings in engine_settings(blocks[stage], blocks["sft"], **machine).values()
    }


def with_values(parameters, preset):
    """The parameters with those of a preset."""
    return changed(parameters, {name: value for name, (value, _) in preset.settings.items()})


def refusals(settings):
    return {refusal(json.loads(text), ranks) for text, ranks in settings}


@pytest.mark.parametrize("chosen", COMMITTED, ids="-".join)
def test_an_environment_in_conf_is_what_the_table_gives(chosen):
    preset = make_preset(*chosen)
    for name, text in files(preset, preset.name).items():
        assert (CONF / preset.name / name).read_text() == text, (
            "write it again: kedro rlhf preset ... --overwrite"
        )
    loader = LayeredConfigLoader(str(CONF), env=preset.name, **CONFIG_LOADER_ARGS)
    assert with_values(loader["parameters"], preset) == loader["parameters"]
    assert loader["globals"]["root"] == f"data/{preset.name}"
    assert refusals(settings_of(preset, loader["parameters"])) == {None}


@pytest.mark.long
def test_every_preset_of_the_table_is_accepted(capsys):
    given = {"base_model": {"path": "x/y"}, "split": {"sources": [{"name": "Dahoas/rm-static"}]}}
    base = LayeredConfigLoader(str(CONF), env="base", runtime_params=given, **CONFIG_LOADER_ARGS)[
        "parameters"
    ]
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
