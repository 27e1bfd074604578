import subprocess
import sys

IMPORT = """
import gc, sys
import rlhf_pipeline.models.lean_transformers
print([name for name in ("boto3", "sklearn", "scipy") if name in sys.modules], gc.isenabled())
import boto3
print(boto3.__name__)
"""


def test_the_import_leaves_libraries_out_which_can_be_imported_later():
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] True", "boto3"]


def test_transformers_that_has_found_scipy_before_gets_it():
    before = "from transformers.utils import is_scipy_available; print(is_scipy_available())\n"
    command = [sys.executable, "-c", before + IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "['scipy'] True", "boto3"]
