"""No program runs code that lies in the working folder under the name of a library."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.commands.export import _convert
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.job import Job, RunContext, StageSpec
from rlhf_pipeline.stages.run import StageRunner

NAMES = ("json.py", "signal.py", "torch.py", "transformers/__init__.py", "deepspeed/__init__.py")
CODE = "from pathlib import Path\nPath({path!r}).touch()\nraise SystemExit(9)\n"
PROGRAM = """
import json, signal, torch, deepspeed, transformers
from rlhf_pipeline.runtime.program import run_program

def main(job):
    job.export.mkdir(exist_ok=True)
    (job.export / "found").write_text(torch.__file__)
    return {}

if __name__ == "__main__":
    run_program(main)
"""


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """A working folder with modules of those names; they create this file."""
    file = tmp_path / "executed"
    for name in NAMES:
        module = tmp_path / "work" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(CODE.format(path=str(file)))
    monkeypatch.chdir(tmp_path / "work")
    return file


def test_the_modules_run_without_the_safe_path(executed):
    subprocess.run([sys.executable, "-m", "rlhf_pipeline.stages.processes"], check=False)
    assert executed.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "python_path",
    [
        *(pytest.param(path, marks=pytest.mark.long) for path in ("{program}", "{program}:")),
        ":{program}:",
    ],
)
def test_ranks(executed, tmp_path, monkeypatch, python_path):
    """An empty part of PYTHONPATH means the working folder."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "honest_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", python_path.format(program=tmp_path / "program"))
    spec = StageSpec("honest", "honest_program", libraries=())
    context = RunContext(tmp_path / "workspace", LaunchConfig(processes=2))
    found = StageRunner(context).run(Job(spec, {}, {}, 1))
    assert (found / "found").read_text().endswith("site-packages/torch/__init__.py")
    assert not executed.exists()


@pytest.mark.long
def test_programs_of_commands(executed, tmp_path):
    with pytest.raises(StageError, match="exported"):
        _convert(tmp_path / "nothing", str(tmp_path / "target"), {})
    assert not executed.exists()


def test_commands_start_python_without_the_working_folder():
    source = Path(__file__).parents[1] / "src" / "rlhf_pipeline" / "commands"
    texts = "".join(file.read_text() for file in source.glob("*.py"))
    options = re.findall(r"\[\*?\(?sys\.executable,\s+(\S+),", texts)
    assert len(options) > 2 and {*options} == {'"-P"'}
