import subprocess
import sys

import pytest

IMPORT = """
import gc, sys
import rlhf_pipeline.models
print([name for name in ("boto3", "sklearn", "scipy") if name in sys.modules], gc.isenabled())
import boto3
print(boto3.__name__)
"""


@pytest.mark.parametrize("before", [False, True])
def test_the_import_leaves_libraries_out_which_can_be_imported_later(before):
    """Only transformers that has found SciPy before gets it."""
    found = "from transformers.utils import is_scipy_available; is_scipy_available()\n" * before
    command = [sys.executable, "-c", found + IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{['scipy'] * before} True", "boto3"]
