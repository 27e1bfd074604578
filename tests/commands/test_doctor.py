"""`kedro rlhf doctor`: its checks on machines that other programs pretend, and the command."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from processes import descendants

from rlhf_pipeline.commands import doctor as machine
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB

Usage = namedtuple("Usage", "total used free")
TORCH = """
import sys, types
__version__, version = "2.13.0", types.SimpleNamespace(cuda="13.0")
class cuda:
    device_count = staticmethod(lambda: {count})
    is_available = staticmethod(lambda: {count} > 0)
    get_device_name = staticmethod(lambda index: "NVIDIA A100")
    nccl = types.SimpleNamespace(version=lambda: (2, 28, 9))
class distributed:
    is_nccl_available = staticmethod(lambda: {has_nccl})
def ones(size, device):
    {compute}
    return types.SimpleNamespace(sum=lambda: types.SimpleNamespace(item=lambda: size))
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Examines a machine by a check; arguments replace fields of the embedded default."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def check(name, **fields):
        default = {"root": tmp_path / "data", "launch": LaunchConfig(), "parameters": {}}
        default["check_run"] = lambda: None
        probe = name if callable(name) else machine.CHECKS[name]
        return machine.examine(str(name), probe, machine.Setup(**default | fields))

    return check


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Puts a module `torch` in front of the real one that sees so many GPUs."""

    def install(count, *, compute="pass", has_nccl=True):
        folder = tmp_path / "pretended"
        folder.mkdir(exist_ok=True)
        text = TORCH.format(count=count, compute=compute, has_nccl=has_nccl)
        (folder / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def test_a_broken_driver_is_a_failure_with_a_fix(check, nvidia_smi):
    nvidia_smi(None)
    found = check("gpu")
    assert (found.check, found.state) == ("gpu", "failure")
    assert "NVIDIA-SMI has failed" in found.found
    assert "repair the driver" in found.fix


def test_gpus_that_torch_can_use(check, nvidia_smi, torch):
    nvidia_smi(2)
    torch(2)
    assert check("gpu").found.startswith("2 x NVIDIA A100; torch 2.13.0, CUDA 13.0")


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        ({"count": 0}, "sees 0 of 2 GPUs with driver", "update the driver"),
        ({"count": 1}, "sees 1 of 2 GPUs with driver", "update the driver"),
        (
            {"count": 2, "compute": "raise RuntimeError('no kernel image is available')"},
            "torch fails: RuntimeError: no kernel image is available",
            "install the torch that fits the driver and the GPU",
        ),
    ],
)
def test_gpus_that_torch_cannot_use(check, nvidia_smi, torch, arguments, found, fix):
    nvidia_smi(2)
    torch(**arguments)
    finding = check("gpu")
    assert finding.state == "failure"
    assert found in finding.found
    assert fix in finding.fix


@pytest.mark.parametrize(
    "program, state, found, fix",
    [
        (
            "print(*['A100 in ' + each for each in sys.argv[1:]], sep=chr(10))",
            *("ok", "equal those of the CPU: A100 in bf16, A100 in fp32", ""),
        ),
        ("sys.exit('attention: found 2. Fix: set it')", "failure", "attention: found 2.", "set it"),
        ("pass", "failure", "torch sees no GPU", ""),
    ],
)
def test_kernels_are_compared_in_a_process_of_their_own(
    check, nvidia_smi, monkeypatch, tmp_path, program, state, found, fix
):
    nvidia_smi(1)
    (tmp_path / "stand_in.py").write_text(f"import sys\n{program}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine, "SELF_CHECK", "stand_in")
    settings = [{"precision": name} for name in ("fp32", None, "bf16")]
    row = check("kernels", parameters={"ppo": dict(zip("abc", settings, strict=True))})
    assert (row.check, row.state, row.found, row.fix) == ("kernels", state, found, fix)


def test_two_gpus_need_nccl(check, nvidia_smi, torch):
    nvidia_smi(2)
    torch(2, has_nccl=False)
    assert check("gpu").found == "torch has no NCCL"
    assert check("gpu").state == "failure"
    nvidia_smi(1)
    torch(1, has_nccl=False)
    assert check("gpu").state == "ok"


@pytest.mark.parametrize(
    ("free", "gpus", "state"),
    [
        (2 * GIB, 2, "ok"),
        (GIB // 16, 0, "ok"),
        (GIB // 16, 2, "failure"),  # Docker's default
        (GIB // 32, 0, "failure"),
    ],
)
def test_shared_memory_must_have_room_for_ranks_on_gpus(
    check, nvidia_smi, monkeypatch, free, gpus, state
):
    nvidia_smi(gpus)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4 * GIB, 0, free))
    found = check("shared memory")
    assert found.state == state
    assert ("--shm-size" in found.fix) == (state == "failure")


@pytest.mark.parametrize(
    ("free", "state"), [(20 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 2, "failure")]
)
def test_a_disk_that_is_almost_full(check, monkeypatch, free, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, free))
    found = check("disk")
    assert found.state == state
    assert found.found.startswith(f"{size_text(free)} free for")


@pytest.fixture
def nothing_installed(monkeypatch, nvidia_smi, tmp_path):
    """A machine with a GPU, and no program but nvidia-smi."""
    for name in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    nvidia_smi(1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return tmp_path / "bin"


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"sft": {"offload_optimizer": True}}, "sft.offload_optimizer (true)"),
        ({"ppo": {"generator": "vllm"}}, 'ppo.generator ("vllm")'),
        ({"dpo": {"kernels": "liger"}}, 'dpo.kernels ("liger")'),
    ],
)
def test_a_machine_without_a_compiler_needs_one_for_what_a_gpu_compiles(
    check, nothing_installed, parameters, named
):
    found = check("compiler")
    assert (found.state, found.fix) == ("ok", "")
    assert found.found.startswith("missing: a C++ compiler, ninja;")
    found = check("compiler", parameters=parameters)
    assert (found.state, found.found) == ("failure", "missing: a C++ compiler, ninja")
    assert found.fix.endswith(f"; or change {named}")


def test_other_parameters_with_the_same_value_need_no_compiler(check, nothing_installed):
    names = {"judges": ["compile"], "name": "compile", "generator": "transformers"}
    assert check("compiler", parameters={"evaluate": names}).state == "ok"


def test_neither_cudas_compiler_nor_an_activated_environment_is_needed(
    check, nothing_installed, monkeypatch
):
    """ninja lies beside the interpreter; the ranks find it there."""
    (nothing_installed / "ninja").touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CXX", shutil.which("g++", path=os.defpath))
    assert check("compiler", parameters={"ppo": {"generator": "vllm"}}).state == "ok"


@pytest.fixture
def launch(monkeypatch):
    """Makes the block `launch` of two nodes; their ranks run on this machine."""
    source = str(Path(machine.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))

    def make(command):
        place = {"address": "127.0.0.1", "nodes": 2, "processes": 1}
        return LaunchConfig(mode="command", command=command, **place)

    return make


def test_ranks_start_on_each_node(check, launch):
    found = check("nodes", launch=launch("env NODE={node} {command}"))
    assert (found.state, found.found) == ("ok", "2 ranks start on 2 machines")


def test_a_node_that_cannot_be_started_is_a_failure_with_the_output(check, launch):
    failing = launch("sh -c 'echo cannot resolve worker-1; exit 3' {command}")
    found = check("nodes", launch=failing)
    assert (found.check, found.state) == ("nodes", "failure")
    assert "found exit code 3" in found.found and "cannot resolve worker-1" in found.found


def test_ranks_that_do_not_start_are_reported_in_time_and_ended(check, launch, monkeypatch):
    monkeypatch.setattr(machine, "START_S", 0.5)
    hanging = launch("sh -c 'exec sleep 600' {command}")
    found = check("nodes", launch=hanging)
    assert "found ranks that do not start within 0.5 s" in found.found
    commands = [program.info["cmdline"] for program in descendants(os.getpid())]
    assert ["sleep", "600"] not in commands


def explained(_):
    raise ConfigError("place: found 1, expected 2. Fix: set 2 at s3://me:secret@host/file")


def unexpected(_):
    raise ZeroDivisionError("first line\nsecond line")


def test_an_error_is_a_failure_with_its_fix(check):
    found = check(explained)
    assert (found.found, found.fix) == (
        "place: found 1, expected 2.",
        "set 2 at s3://...@host/file",
    )
    found = check(unexpected)
    assert (found.state, found.found) == ("failure", "ZeroDivisionError: first line")
    assert found.fix == "repair what the message names"


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
    assert len([line for line in lines if " ok " in line or " warning " in line]) == len(
        machine.CHECKS
    )
    imported = {line.rpartition("|")[2].strip() for line in log.splitlines()}
    assert "rlhf_pipeline.stages.launch.node_program" in imported
    assert imported & {"torch", "transformers", "deepspeed"} == set()


def test_what_a_run_would_refuse_is_a_failure_with_the_same_fix(tmp_path):
    """A model of 500 billion weights, whose training needs more memory than any machine of ours."""
    sizes = {"hidden_size": 20480, "intermediate_size": 81920, "num_hidden_layers": 100}
    params = ",".join(f"base_model.architecture.{name}={size}" for name, size in sizes.items())
    code, printed, log = doctor(tmp_path, "--json", f"--params=root={tmp_path},{params}")
    assert code == 1 and printed, log
    (found,) = [each for each in json.loads(printed) if each["check"] == "run"]
    assert found["state"] == "failure"
    assert found["found"].startswith("invalid parameters:")
    assert "use more or larger GPUs, or a smaller model" in found["fix"]


@pytest.mark.long
@pytest.mark.parametrize("generator", ["vllm", "auto"])
def test_the_compiler_is_asked_for_by_the_parameters_that_need_it_on_a_gpu(
    tmp_path, nvidia_smi, generator
):
    nvidia_smi(1)
    (tmp_path / "vllm.py").touch()  # as if it were installed
    params = (
        f"--params=root={tmp_path},ppo.generator={generator},sft.deepspeed.offload_optimizer=true"
    )
    variables = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0", "CXX": "false"}
    variables["PYTHONPATH"] = f"{PROJECT / 'src'}:{tmp_path}"
    code, printed, log = doctor(tmp_path, "--json", params, **variables)
    assert code == 1, printed + log
    (found,) = [each for each in json.loads(printed) if each["check"] == "compiler"]
    assert found["found"] == "missing: headers of Python or C++"
    assert "sft.deepspeed.offload_optimizer (true)" in found["fix"]
    assert f'ppo.generator ("{generator}")' in found["fix"]


@pytest.mark.long
@pytest.mark.parametrize(("kernels", "state"), [("compile", "failure"), ("null", "ok")])
def test_kernels_of_torch_compile_need_the_compiler_without_a_gpu_too(tmp_path, kernels, state):
    params = f"--params=root={tmp_path},sft.deepspeed.kernels={kernels}"
    _, printed, log = doctor(tmp_path, "--json", params, DS_ACCELERATOR="cpu", CXX="false")
    assert printed, log
    (found,) = [each for each in json.loads(printed) if each["check"] == "compiler"]
    assert found["state"] == state
    assert ('sft.deepspeed.kernels ("compile")' in found["fix"]) is (state == "failure")
