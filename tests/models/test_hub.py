"""A base model from the hub: the branch's commit is resolved, loaded, and part of the recipe."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_hub import COMMITS, serving

from rlhf_pipeline.models.loading import load_policy

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys
from pathlib import Path
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.pipelines.preparation import base_model
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner

split = SplitConfig(sources=[{"name": "synthetic"}], max_prompt_tokens=8, max_response_tokens=8)
stages = StageRunner(RunContext(Path(sys.argv[1]), LaunchConfig(processes=1)))
for line in sys.stdin:
    try:
        print(base_model(BaseModelConfig(**json.loads(line)), split, 0, stages), flush=True)
    except PipelineError as error:
        print("error: " + str(error).replace(chr(10), " "), flush=True)
"""
"""Runs in another process: huggingface_hub reads the environment when it is imported."""


def fetch(endpoint, folder, *configurations):
    """Return the artifact or the error of each configuration."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "workspace")],
        input="\n".join(map(json.dumps, configurations)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_moved_branch_is_another_base_model(make_model, tmp_path):
    repository = tmp_path / "hub" / "lab" / "tiny"
    old, new = COMMITS["main"], "3" * 40
    for commit, seed in ((old, 1), (new, 2)):
        shutil.copytree(make_model("llama", seed=seed), repository / commit)
    with serving(tmp_path / "hub") as hub:
        first, again = fetch(
            hub.address, tmp_path, {"path": "lab/tiny"}, {"path": "lab/tiny", "revision": None}
        )
        hub.commits["main"] = new
        moved, pinned, missing = fetch(
            hub.address, tmp_path,
            {"path": "lab/tiny"}, {"path": "lab/tiny", "revision": old}, {"path": "lab/none"},
        )  # fmt: skip
    assert first == again != moved
    assert hub.revisions == {old, new}  # files are read by commit, never by branch
    for made, commit in ((first, old), (moved, new), (pinned, old)):
        found, expected = (
            load_policy(path, "fp32").state_dict() for path in (Path(made), repository / commit)
        )
        assert all(found[name].equal(value) for name, value in expected.items())
    assert missing.startswith(
        "error: base_model.path: the hub did not return the commit of 'lab/none' at its default "
    )
    nowhere = "http://127.0.0.1:9"
    (unreached,) = fetch(nowhere, tmp_path, {"path": "lab/tiny"})
    assert "check the spelling and the network, or set base_model.revision to a commit" in unreached
    assert fetch(nowhere, tmp_path, {"path": "lab/tiny", "revision": old}) == [pinned]
