"""Every preset passes the plan and the dry run.

The dry run: valid parameters, valid jobs, settings that DeepSpeed accepts.
And the environments in conf/ are what the table gives.
"""

import functools
import json
from pathlib import Path

import pytest

from rlhf_pipeline.commands.check import dry_run, environment_of
from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.commands.preset import files
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.config_loader import LayeredConfigLoader
from rlhf_pipeline.distributed.dry_run import engine_settings, refusal
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.presets.preset import HARDWARE, METHODS, find_preset, make_preset
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.models import MODELS, find_model
from rlhf_pipeline.stages.cache import fingerprint

COMMITTED = (
    ("llama-3-8b", "1x80", "lora"),
    ("opt-13b", "8x80", "full"),
    ("opt-30b", "2x8x80", "full"),
)
"""The presets in conf/: one GPU, one machine, several machines."""
CONF = Path(__file__).parents[2] / "conf"
PLANNED = ("sft", "reward_model", "ppo", "dpo", "evaluate")
STAGES = {
    *("base_model", "source", "split", "sft", "reward_model"),
    *("ppo", "evaluate", "dpo", "evaluate_dpo"),
}


@pytest.fixture
def settings_of(tmp_path, monkeypatch):
    """Returns the distinct DeepSpeed settings of a preset with their ranks, after a dry run."""
    code = functools.cache(fingerprint.code_digests)  # the same for all presets
    monkeypatch.setattr(fingerprint, "code_digests", code)
    pipelines = register_pipelines()
    pipeline = pipelines["full"] + pipelines["dpo"]

    def run(preset, parameters):
        model = find_model(preset.model)
        plan = make_plan(parameters, STAGES, gpus=preset.gpus)
        assert {name: fit.fits for name, fit in plan.fits.items()} == dict.fromkeys(PLANNED, True)
        for name, fit in plan.fits.items():
            assert fit.memory.peak == preset.memory[name].peak
        with environment_of(preset.hardware):
            jobs, ranks = dry_run(parameters, preset.hardware, pipeline, tmp_path / preset.name)
        assert jobs.keys() == STAGES
        read = {name: LaunchedJob.read(path) for name, path in jobs.items()}
        companion = read["sft"].block("sft", SFTConfig)
        machine = {"hidden_size": model.shape.hidden, "on_gpu": True}
        assert ranks == preset.hardware.world
        return {
            (json.dumps(settings), ranks)
            for job in read.values()
            for settings in engine_settings(job, companion, **machine).values()
        }

    return run


def with_values(parameters, preset):
    """The parameters with those of a preset."""
    return changed(parameters, {name: value for name, (value, _) in preset.settings.items()})


def refusals(settings):
    return {refusal(json.loads(text), ranks) for text, ranks in settings}


@pytest.mark.parametrize("chosen", COMMITTED, ids="-".join)
def test_an_environment_in_conf_is_what_the_table_gives(chosen, settings_of):
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
def test_every_preset_of_the_table_passes_the_dry_run(settings_of, capsys):
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
