"""Run programs, look at those that they started, and at what they import."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict

import psutil


def completed(
    *command: object, folder: object = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a folder, with further variables of the environment."""
    settings = {"env": os.environ | variables, "capture_output": True, "text": True}
    return subprocess.run([str(part) for part in command], cwd=folder, **settings)


def kedro(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a command of Kedro."""
    return completed(sys.executable, "-m", "kedro", *arguments, **options)


def descendants(pid: int) -> list[psutil.Process]:
    """Return a process's descendants, each with ``cmdline`` and ``environ`` in ``info``.

    A program that ends meanwhile is left out. One that has ended and awaits its parent (a zombie)
    has neither a command line nor an environment: both are empty.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.info = process.as_dict(["cmdline", "environ"], ad_value=())
            found.append(process)
    return found


LIST_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("", *sys.modules, file=sys.stderr))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def imported(
    module: str, *arguments: str, **options
) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Run `python -m module ...`; return the modules that are imported at its end, and the rest."""
    command = [sys.executable, "-c", LIST_MODULES, module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    done.stderr, _, modules = done.stderr.rstrip().rpartition("\n ")
    return set(modules.split()), done


def job_file(job) -> str:
    """Write the job.json of a `LaunchedJob` into its folder; return its path."""
    fields = asdict(job)
    file = fields.pop("directory") / "job.json"
    file.write_text(json.dumps(fields, default=str))
    return str(file)
