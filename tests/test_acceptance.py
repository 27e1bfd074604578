"""benchmarks/acceptance.py: its runs fit eight GPUs, and its limits refuse."""

import os
import subprocess
import sys
from math import nextafter
from pathlib import Path

import pytest

from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.run.checks import check
from rlhf_pipeline.run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.hardware import named

PROJECT = Path(__file__).parents[1]
SCRIPT = PROJECT / "benchmarks" / "acceptance.py"
NAMES = ("ppo", "grpo", "speed", "dpo")


@pytest.fixture
def acceptance(benchmark):
    return benchmark("acceptance")


def test_every_acceptance_test_is_tested(acceptance):
    assert tuple(acceptance.TESTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_run_fits_eight_gpus_of_80_gb(acceptance, name):
    test = acceptance.TESTS[name]
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env=test.env, **CONFIG_LOADER_ARGS)
    given = changed(loader["parameters"], {"base_model.path": test.model} | test.params)
    stages = [test.policy, *(["evaluate"] if "evaluate" in test.last else [])]
    plan = make_plan(given, stages, hardware=named(None, "8x80"))
    assert {stage: fit.fits for stage, fit in plan.fits.items()} == dict.fromkeys(stages, True)
    blocks = check(given, gpus=8, elsewhere=True)
    assert blocks["sft"] is blocks["reward_model"] is None
    assert given["base_model"]["path"].endswith("-Instruct")


@pytest.mark.parametrize("name", NAMES)
def test_each_limit_refuses_a_figure_just_beyond_it(acceptance, name):
    expected = acceptance.TESTS[name].expected
    good = {what: nextafter(low, high) for what, (low, high) in expected.items()}
    assert acceptance.faults(good, expected) == []
    for what, limits in expected.items():
        for limit in limits:
            (fault,) = acceptance.faults(good | {what: limit}, expected)
            assert fault.startswith(f"{what}: found {limit}, expected above {limits[0]}")
    missing = acceptance.faults({}, expected)
    assert [fault.partition(",")[0] for fault in missing] == [f"{w}: found none" for w in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "missed"),
    [
        pytest.param(
            "ppo",
            ["last reward", "accuracy after", "lower end of the gain"],
            marks=pytest.mark.long,
        ),
        pytest.param("grpo", ["accuracy after", "lower end of the gain"], marks=pytest.mark.long),
        ("dpo", []),  # `speed` would depend on what else this machine does
    ],
)
def test_a_rehearsal_finds_every_figure_and_misses_what_needs_learning(name, missed):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--rehearse", "--tests", name],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == bool(missed), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")]
    faults = [line for line in lines if "expected" in line]
    assert [line.removeprefix(f"{name}: ").partition(": found ")[0] for line in faults] == missed
    assert all(": found none" not in line for line in faults)
