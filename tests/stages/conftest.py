"""The stage `drill`: its program starts in half a second and can be held, failed or killed."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError, StageError
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.runtime.program import write_manifest
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.job import Job, RunContext, StageListener, StageSpec
from rlhf_pipeline.stages.run import StageRunner


class DrillConfig(Block):
    """Parameters of the stage."""

    value: int = 1
    keep_best: int = operational(1)


SPEC = StageSpec("drill", "drill_program", distributed=False)

PROGRAM = """
import json, subprocess, sys, time
from pathlib import Path
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime.program import run_program

def main(job):
    orders = Path(__file__).parent
    launches = orders / "launches"
    number = len(launches.read_text().split()) + 1 if launches.exists() else 1
    launches.write_text("x " * number)
    if (orders / "measure").exists():
        with job.metrics_file.open("a") as file:
            for step in (1, 2, 3):
                record = {"step": step, "total_steps": 3, "time": 0.0, "metrics": {"loss": 1.0}}
                file.write(json.dumps(record) + "\\n")
    if (orders / "fail").exists():
        raise DataError("ordered to fail")
    if (orders / "crash").exists():
        raise RuntimeError("the cause")
    if (orders / "child").exists():
        sleep = "import time; time.sleep(900)"
        subprocess.Popen([sys.executable, "-c", sleep, str(orders / "child")]).wait()
    while (orders / "hold").exists():
        time.sleep(0.05)
    job.export.mkdir()
    (job.export / "result").write_text(f"launch {number}")
    (job.export / "trusts").write_text(str(job.trust_remote_code))
    return {"loss": 0.25} if (orders / "measure").exists() else {}

if __name__ == "__main__":
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
    """The stage in a workspace below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "drill_program.py").write_text(PROGRAM)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(Path(run.__file__).parents[2])])

    def job(self, value: int = 1, keep_best: int = 1, **fields: object) -> Job:
        """The stage with its parameters; `fields` are fields of `Job`."""
        config = {"drill": DrillConfig(value=value, keep_best=keep_best)}
        return Job(SPEC, config, **{"inputs": {}, "seed": 1} | fields)

    def context(
        self,
        force: Collection[str] = (),
        trust: bool = False,
        listener: StageListener | None = None,
        **launch: object,
    ) -> RunContext:
        """One run of the pipeline; `launch` are parameters of that block."""
        return RunContext(
            workspace=self.root / "workspace",
            launch=LaunchConfig(**launch),
            forced=frozenset(force),
            trust_remote_code=trust,
            listener=listener or StageListener(),
        )

    def run(
        self, value: int = 1, inputs: dict[str, Path] | None = None, keep_best: int = 1,
        **context: object,
    ) -> Path:  # fmt: skip
        """Run the stage in this process, as the only stage of a run; return its export."""
        job = self.job(value, keep_best, inputs=inputs or {})
        return StageRunner(self.context(**context)).run(job)

    def fail(self, **context: object) -> Path:
        """Run the stage, whose program fails; return a directory of its attempts."""
        self.order("fail")
        with pytest.raises(StageError, match="ordered to fail"):
            self.run(**context)
        self.order("fail", given=False)
        return next((self.root / "workspace" / "drill").iterdir())

    def run_elsewhere(self) -> subprocess.Popen:
        """Run the stage in another process."""
        command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(self.root)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def launches(self) -> int:
        """How often the program was started."""
        file = self.root / "launches"
        return len(file.read_text().split()) if file.exists() else 0

    def order(self, name: str, *, given: bool = True) -> None:
        """Give or withdraw an order: hold, fail, crash, measure, child."""
        (self.root / name).touch() if given else (self.root / name).unlink()


class Recorder(StageListener):
    """A listener that records what it hears."""

    def __init__(self) -> None:
        self.heard = []

    def stage_started(self, run):
        self.run = run
        self.heard.append(("started", run.cached))

    def stage_metrics(self, run, records):
        self.heard += [("metrics", record["step"]) for record in records]

    def stage_ended(self, run, status, metrics):
        self.heard.append((status, metrics))


@pytest.fixture
def recorder():
    """A listener that records what it hears."""
    return Recorder()


@pytest.fixture
def drill(tmp_path, monkeypatch):
    """The stage `drill` in an empty workspace."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.syspath_prepend(tmp_path)
    return Drill(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch):
    """The program of `drill` runs in the driver, as the processes of a launch take a second.

    Launches are real in `test_run.py`, `test_full_disk.py` and `cache/test_workspace.py`.
    """

    def launch(spec, stage_run, context):
        job = LaunchedJob.read(stage_run.directory / "job.json")
        try:
            write_manifest(job, runpy.run_module(spec.program)["main"](job))
        except PipelineError as error:
            raise StageError(f"stage {job.stage}: {error}") from error

    monkeypatch.setattr(run, "launch", launch)


@pytest.fixture
def make_work(tmp_path):
    """Creates work directories as stages leave them, without running a stage."""

    def make(stage, key, *, suffix="", content="data", inputs=None, finished=True, checkpoint=None):
        directory = tmp_path / "workspace" / stage / f"{key.ljust(16, '0')}{suffix}"
        export = directory / "export"
        export.mkdir(parents=True)
        (export / "weights").write_text(content)
        (directory / "job.json").write_text(json.dumps({"digests": inputs or {}}))
        if checkpoint is not None:
            (directory / "checkpoints" / f"step-{checkpoint:08d}").mkdir(parents=True)
        if finished:
            rest = {}, inputs or {}, {}, {}, file_entries(export)
            Manifest(stage, key.ljust(64, "0"), 1, *rest).write(export)
        return directory

    return make
