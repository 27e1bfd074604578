"""What a stage took on this machine, and what was forecast for it."""

import subprocess
import sys
from dataclasses import replace

import pytest
from made_by_hand import artifact

from rlhf_pipeline.runtime import usage
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.usage import Forecast, Usage, forecast_of, usage_of


@pytest.fixture
def made(tmp_path):
    """A finished SFT model."""
    return Manifest.read(
        artifact(tmp_path / "published", "sft", [{"loss": 1.0}], sft={"epochs": 2})
    )


def test_the_last_attempt_of_a_recipe_is_what_an_artifact_took(made, tmp_path):
    assert usage_of(tmp_path, made) is None
    for name, seconds in ((made.fingerprint[:16], 9.0), (f"{made.fingerprint[:16]}.10", 5.0)):
        (tmp_path / "sft" / name).mkdir(parents=True)
        Usage(seconds, 2**30, resumed=False).write(tmp_path / "sft" / name)
    assert usage_of(tmp_path, made) == Usage(5.0, 2**30, resumed=False)
    assert usage_of(tmp_path, replace(made, fingerprint="another")) is None


def test_a_forecast_is_for_these_parameters_on_this_machine(made, tmp_path, monkeypatch):
    forecast = Forecast("sft", made.config, made.ranks, (1.0, 2.0, 3.0), 5.0)
    forecast.write(tmp_path)
    found = forecast_of(tmp_path, made)
    assert found is not None and tuple(found.seconds) == (1.0, 2.0, 3.0)
    others = {"stage": "dpo"}, {"config": {"sft": {"epochs": 3}}}, {"ranks": made.ranks + 1}
    assert [forecast_of(tmp_path, replace(made, **other)) for other in others] == [None] * 3
    monkeypatch.setattr(usage, "processor", lambda: "another processor")
    assert forecast_of(tmp_path, made) is None


def test_the_peak_of_a_process_is_its_largest_memory():
    program = (
        "from rlhf_pipeline.runtime.heartbeat import peak_memory\n"
        "before = peak_memory()\n"
        "block = b'x' * (200 << 20)\n"
        "del block\n"
        "print(before, peak_memory())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 200 << 20 and after - before == pytest.approx(200 << 20, rel=0.1)
