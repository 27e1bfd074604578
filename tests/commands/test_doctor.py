"""`kedro rlhf doctor`: a line for each check, and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stand_in_hub import serving

from rlhf_pipeline.commands.doctor import CHECKS

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
    assert "rlhf_pipeline.diagnosis.machine" in imported
    assert imported & {"torch", "transformers", "deepspeed"} == set()


def test_failures_are_json_with_fixes_and_an_exit_code(tmp_path):
    (tmp_path / "hub").mkdir()
    params = f"--params=root={tmp_path},base_model.path=nobody/nothing"
    with serving(tmp_path / "hub") as hub:
        code, printed, log = doctor(
            tmp_path,
            "--json",
            params,
            HF_ENDPOINT=hub.address,
            MLFLOW_TRACKING_URI="http://127.0.0.1:9",
        )
    assert code == 1, printed + log
    found = {each["check"]: each for each in json.loads(printed)}
    assert len(found) == len(CHECKS)
    assert [name for name, each in found.items() if each["state"] == "failure"] == [
        "base model",
        "tracking store",
    ]
    assert "nobody/nothing" in found["base model"]["found"]
    assert found["base model"]["fix"].startswith("check the spelling and the network")


def test_a_model_on_the_hub_is_found(tmp_path):
    model = tmp_path / "hub" / "owner" / "model" / ("1" * 40)
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    params = f"--params=root={tmp_path},base_model.path=owner/model"
    with serving(tmp_path / "hub") as hub:
        code, printed, log = doctor(tmp_path, "--json", params, HF_ENDPOINT=hub.address)
    assert code == 0, printed + log
    (found,) = [each for each in json.loads(printed) if each["check"] == "base model"]
    assert found["found"] == "owner/model at 11111111"


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
