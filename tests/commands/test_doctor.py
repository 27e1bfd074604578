"""`kedro rlhf doctor`: a line for each check, and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.commands.machine_checks import CHECKS

PROJECT = Path(__file__).parents[2]


def doctor(root, *options, python=(), **variables):
    """Run the command; return its exit code and its output."""
    done = subprocess.run(
        [
            *(sys.executable, *python, "-m", "kedro", "rlhf", "doctor", "--env=tiny"),
            f"--params=root={root}",
            *options,
        ],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src")} | variables,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_sound_machine_has_no_failure_and_torch_stays_out_of_the_driver(tmp_path):
    code, printed, log = doctor(tmp_path, python=("-X", "importtime"))
    assert code == 0, printed + log
    lines = printed.splitlines()
    assert lines[0].split() == ["check", "state", "found"]
    assert len([line for line in lines if " ok " in line or " warning " in line]) == len(CHECKS)
    imported = {line.rpartition("|")[2].strip() for line in log.splitlines()}
    assert "rlhf_pipeline.commands.machine_checks" in imported
    assert imported & {"torch", "transformers", "deepspeed"} == set()


@pytest.mark.long
def test_the_compiler_is_asked_for_by_the_parameters_that_need_it_on_a_gpu(tmp_path, nvidia_smi):
    nvidia_smi(1)
    (tmp_path / "vllm.py").touch()  # as if it were installed
    params = f"--params=root={tmp_path},ppo.generator=vllm,sft.deepspeed.offload_optimizer=true"
    variables = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0", "CXX": "false"}
    variables["PYTHONPATH"] = f"{PROJECT / 'src'}:{tmp_path}"
    code, printed, log = doctor(tmp_path, "--json", params, **variables)
    assert code == 1, printed + log
    (found,) = [each for each in json.loads(printed) if each["check"] == "compiler"]
    assert found["found"] == "missing: headers of Python or C++"
    assert "sft.deepspeed.offload_optimizer (true)" in found["fix"]
    assert 'ppo.generator ("vllm")' in found["fix"]
