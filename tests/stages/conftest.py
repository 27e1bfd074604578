"""A stage whose program is told by files what to do: it costs half a second, and can be held, failed or killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages import job, run
from rlhf_pipeline.stages.job import Job, Program


class DrillConfig(Block):
    """What the stage's recipe holds."""

    value: int = 1


PROGRAM = """
import time
from pathlib import Path
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.stages.job import PROGRAMS, Program
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.stages.trust import trusts_remote_code

def main(job):
    orders = Path(__file__).parent
    launches = orders / "launches"
    number = len(launches.read_text().split()) + 1 if launches.exists() else 1
    launches.write_text("x " * number)
    if (orders / "fail").exists():
        raise DataError("told to fail")
    while (orders / "hold").exists():
        time.sleep(0.05)
    job.export.mkdir()
    (job.export / "result").write_text(f"launch {number}")
    (job.export / "trusts").write_text(str(trusts_remote_code()))
    return {}

PROGRAMS["drill"] = Program("drill_program", distributed=False)
run_program(main)
"""

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest
print(conftest.Drill(Path(sys.argv[2])).run(), flush=True)
"""


class Drill:
    """The stage, and its orders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "drill_program.py").write_text(PROGRAM)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(Path(run.__file__).parents[2])])
        job.PROGRAMS["drill"] = Program("drill_program", distributed=False)

    def run(self, value: int = 1, inputs: dict[str, Path] | None = None, **launch: object) -> Path:
        """Run the stage in this process; return its export."""
        drill_job = Job("drill", {"drill": DrillConfig(value=value)}, inputs or {}, 1)
        return run.run_stage(drill_job, LaunchConfig(**launch), self.root / "workspace")

    def elsewhere(self) -> subprocess.Popen:
        """Run the stage in another process."""
        command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(self.root)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def launches(self) -> int:
        """How often the program was started."""
        file = self.root / "launches"
        return len(file.read_text().split()) if file.exists() else 0

    def order(self, name: str, *, given: bool = True) -> None:
        """Give or take back an order: hold, fail."""
        (self.root / name).touch() if given else (self.root / name).unlink()


@pytest.fixture
def drill(tmp_path, monkeypatch):
    """The stage `drill` in an empty workspace."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(job, "PROGRAMS", dict(job.PROGRAMS))
    monkeypatch.setattr("rlhf_pipeline.stages.cache.forcing.PROGRAMS", job.PROGRAMS)
    monkeypatch.setattr("rlhf_pipeline.stages.cache.cleaning.PROGRAMS", job.PROGRAMS)
    return Drill(tmp_path)


@pytest.fixture
def make_work(tmp_path):
    """Makes work directories as stages leave them, without running any."""

    def make(stage, key, *, suffix="", content="data", inputs=None, finished=True, checkpoint=None):
        directory = tmp_path / "workspace" / stage / f"{key.ljust(16, '0')}{suffix}"
        (directory / "export").mkdir(parents=True)
        (directory / "job.json").write_text(json.dumps({"digests": inputs or {}}))
        (directory / "export" / "weights").write_text(content)
        if checkpoint is not None:
            (directory / "checkpoints" / f"step-{checkpoint:08d}").mkdir(parents=True)
        if finished:
            files = file_entries(directory / "export")
            Manifest(stage, key.ljust(64, "0"), 1, {}, inputs or {}, {}, {}, files).write(
                directory / "export"
            )
        return directory

    return make
