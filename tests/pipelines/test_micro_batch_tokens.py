"""`micro_batch_tokens: auto` in real launches: the ranks, their resume and the manifest have a
number."""

import json
import os
import shutil

import pytest

from rlhf_pipeline.runtime.manifest import Manifest

pytestmark = pytest.mark.slow

FAILS_ONCE = """
import sys
from pathlib import Path

def fail(event, arguments):
    if event == "os.mkdir" and str(arguments[0]).endswith("step-00000002.partial"):
        if Path({flag!r}).exists():
            raise RuntimeError("failed once")

sys.addaudithook(fail)
"""


def test_an_interrupted_run_resumes_with_the_number_that_it_began_with(
    project, new_project, tmp_path, monkeypatch
):
    flag, own = tmp_path / "flag", new_project(tmp_path / "own")
    for stage in ("source", "base_model", "split"):
        folder = own.root / "07_workspace" / stage
        shutil.copytree(project.root / "07_workspace" / stage, folder)
    (tmp_path / "sitecustomize.py").write_text(FAILS_ONCE.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    params = "sft.checkpoint_every=1,sft.micro_batch_tokens=auto"
    until_sft = "--pipeline=full", "--to-nodes=sft"

    flag.touch()
    failure = own.kedro(*until_sft, params=params, check=False)
    assert "(this stage resumes after step 1)" in failure
    flag.unlink()
    (work,) = own.recipes("sft")
    begun = json.loads((work / "job.json").read_text())
    own.kedro(*until_sft, params=params)
    assert own.recipes("sft") == [work]
    resumed = json.loads((work / "job.json").read_text())
    assert (begun["resume_from"], resumed["resume_from"]) == (None, 1)
    assert begun["config"] == resumed["config"]
    model = Manifest.read(own.newest("06_models/sft_model"))
    assert model.config["sft"]["micro_batch_tokens"] == 1024  # it holds the 8 rows of a rank
