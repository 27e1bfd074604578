"""What starts without torch, and what imports leave out."""

import base64
import json
import os
import subprocess
import sys

import pytest

from rlhf_pipeline.stages.launch.node_program import NODE_LAUNCHER

BY_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK", "_MLFLOW_TELEMETRY_SESSION_ID"}
"""Variables that `import deepspeed` sets, in the launcher and again in each rank."""

PROGRAM = """
import json, os, pathlib, sys
report = pathlib.Path(__file__).with_name(f"rank{os.environ['RANK']}.json")
report.write_text(json.dumps({"arguments": sys.argv[1:], **os.environ}))
"""


@pytest.fixture
def launched(tmp_path):
    """Launches two ranks; returns the launcher's exit code, and each rank's environment."""
    (tmp_path / "program.py").write_text(PROGRAM)
    world = base64.urlsafe_b64encode(json.dumps({"localhost": ["3", "GPU-a"]}).encode()).decode()

    def launch(module, *options, program="program"):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, *options, "-m", module, f"--world_info={world}"]
        command += ["--master_port=3001", "--no_local_rank", "--module", program, "a", "b"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        ranks = []
        for report in sorted(tmp_path.glob("rank*.json")):
            found = json.loads(report.read_text())
            ranks.append({name: found[name] for name in found.keys() - BY_IMPORTS})
            report.unlink()
        return done.returncode, ranks, done.stderr + done.stdout

    return launch


def test_without_torch_the_ranks_get_the_same_environment_and_arguments(launched):
    code, ranks, imports = launched(NODE_LAUNCHER, "-X", "importtime")
    assert "deepspeed.launcher.launch" in imports and " torch" not in imports
    expected_code, expected, _ = launched("deepspeed.launcher.launch")
    assert code == expected_code == 0
    assert ranks == expected
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"3,GPU-a"}


def test_a_launcher_that_needs_further_names_gets_deepspeed_itself(launched, tmp_path):
    (tmp_path / "later_version.py").write_text(
        "import sys\n"
        "from rlhf_pipeline.distributed import node_launcher\n"
        "replace = node_launcher._replace_packages\n"
        "def without_logger():\n"
        "    replace()\n"
        "    del sys.modules['deepspeed.utils'].logger\n"
        "node_launcher._replace_packages = without_logger\n"
        "node_launcher.main()\n"
    )
    code, ranks, _ = launched("later_version")
    assert code == 0
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]


def test_a_failed_rank_gives_exit_code_1(launched):
    code, _, log = launched(NODE_LAUNCHER, program="missing_program")
    assert code == 1
    assert "exits with return code = 1" in log


PROGRAMS = "training.sft training.reward_model training.ppo training.dpo evaluation.evaluate"


@pytest.mark.long
def test_programs_import_neither_mlflow_nor_peft_and_leave_no_trace():
    imports = "; ".join(f"import rlhf_pipeline.{name}" for name in PROGRAMS.split())
    code = (
        f"import json, sys, torch; compile = torch.compile; {imports}; "
        "print(json.dumps([[name in sys.modules for name in ('mlflow', 'pandas', 'peft')], "
        "torch.compile is compile])); import mlflow"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(found.stdout.splitlines()[-1]) == [[False, False, False], True]
