"""A rank checks its machine before it becomes its program."""

import json
import os
import subprocess
import sys

import pytest

from rlhf_pipeline.runtime.program import RENDEZVOUS
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.launch import start_rank

SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS RLHF_PULSE RLHF_RENDEZVOUS".split()
print(json.dumps([sys.argv[1], os.getcwd(), *(os.environ.get(name) for name in names)]))
"""
OTHERS = [name for names in start_rank.NUMBERS for name in names]


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    settings = {"WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "PYTHONPATH": str(tmp_path)}
    return {
        "program": "show", "folder": "/usr", "defaults": {"OMP_NUM_THREADS": "3"},
        "settings": settings, "installation": start_rank.installation(),
    }  # fmt: skip


@pytest.fixture
def start(tmp_path, plan):
    """Starts a rank with the variables of a launcher; returns how it ended."""

    def run(*, launch=None, **variables):
        inherited = {name: value for name, value in os.environ.items() if name not in OTHERS}
        inherited.pop("OMP_NUM_THREADS", None)
        pulse = Pulse(tmp_path, 60, plan)
        with pulse.beating():
            command = [start_rank.__file__, str(tmp_path), launch or pulse.launch, "2"]
            environment = inherited | {RENDEZVOUS: "/the/drivers"} | variables
            done = subprocess.run(
                [sys.executable, "-P", *command], env=environment, capture_output=True, text=True
            )
        return done, pulse.launch

    return run


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "9", "LOCAL_RANK": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "9", "MPI_LOCALRANKID": "1", "PMI_SIZE": "16"},
        {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "16"},
    ],
)
def test_every_launcher_numbers_the_ranks(start, tmp_path, variables):
    done, launch = start(**variables)
    assert json.loads(done.stdout) == [
        str(tmp_path / "job.json"), "/usr", "9", "1", "16", "10.0.0.1", "3", f"{launch} 2", None,
    ]  # fmt: skip


def test_a_rank_without_a_number_says_which_variables_it_needs(start):
    done, _ = start()
    assert done.returncode == 1 and "cannot start: found no number of this rank" in done.stderr
    assert "SLURM_PROCID and SLURM_LOCALID" in done.stderr


def test_a_machine_without_the_drivers_files_is_named_with_the_fix(start, tmp_path):
    """A folder with an earlier copy of the files is not the driver's."""
    done, _ = start(launch="another", RANK="0", LOCAL_RANK="0")
    assert done.returncode == 1
    assert f"does not see the driver's files in {tmp_path}. Fix: set root to" in done.stderr
    assert not (tmp_path / "errors").exists()


@pytest.mark.parametrize(("name", "value"), [("code", "0" * 12), ("torch", "1.0")])
def test_a_machine_with_another_installation_reports_it(start, plan, tmp_path, name, value):
    plan["installation"][name] = value
    done, _ = start(RANK="9", LOCAL_RANK="0")
    assert done.returncode == 1 and done.stdout == ""
    (report,) = (tmp_path / "errors").glob("*-rank9.txt")
    assert f": {name}: found " in report.read_text()
    assert f", expected {value} as on the driver's machine. Fix: install" in report.read_text()


def test_too_few_ranks_are_refused(start, tmp_path):
    done, _ = start(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 1
    assert "found 2 ranks, expected 16. Fix: let launch.command start {command}" in done.stderr
