"""What the import of the programs leaves out."""

import json
import subprocess
import sys

PROGRAMS = "training.sft training.reward_model training.ppo training.dpo evaluation.evaluate"


def test_programs_import_neither_mlflow_nor_peft_and_leave_no_trace():
    imports = "; ".join(f"import rlhf_pipeline.{name}" for name in PROGRAMS.split())
    code = (
        f"import json, sys, torch; compile = torch.compile; {imports}; "
        "print(json.dumps([[name in sys.modules for name in ('mlflow', 'pandas', 'peft')], "
        "torch.compile is compile])); import mlflow"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(found.stdout.splitlines()[-1]) == [[False, False, False], True]
