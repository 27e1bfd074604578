"""Finished policies: tiny random models with the files that a training stage writes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def publish():
    """Turns the folder of a model into an artifact of a stage; returns the folder."""
    from rlhf_pipeline.runtime.manifest import Manifest, file_entries

    def publish(folder: Path, stage: str = "ppo") -> Path:
        files = file_entries(folder)
        Manifest(stage, f"{stage:0<64}", 7, {}, {}, {"torch": "2"}, {}, files).write(folder)
        return folder

    return publish


@pytest.fixture(scope="session")
def published(make_model, publish):
    """A policy that PPO could have made: a Llama of 128 positions and 288 tokens, 12 rows more."""
    return publish(make_model("llama", vocabulary=300))


@pytest.fixture(scope="session")
def other_published(make_model, publish):
    """Another one, of SFT."""
    return publish(make_model("llama", seed=1), "sft")
