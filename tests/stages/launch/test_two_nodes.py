"""Real training on two nodes: network namespaces with addresses and folders of their own."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from nodes import KEDRO, PROJECT, SBIN, Nodes, missing, missing_ssh, programs, ssh_servers
from waiting import HANGS_S, wait_until

REASON = missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(REASON is not None, reason=f"no nodes: {REASON}"),
]
LONGER = {"sft.epochs": 3, "sft.checkpoint_every": 3, "sft.evaluations": 1, "inputs": "newest"}
"""Long enough to be killed in the middle."""
SOON = {"launch.node_timeout_s": 10, **LONGER}
CHECKPOINT = "07_workspace/sft/*/checkpoints/step-*6"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A workspace with the data and the base model."""
    made = Nodes(tmp_path_factory.mktemp("prepared"))
    run = made.start_run("--env=tiny", "--to-nodes=split", **{"launch.mode": "local"})
    assert run.wait(HANGS_S) == 0, made.output(0).read_text()
    made.remove()
    return made.root


@pytest.fixture
def nodes(tmp_path, prepared):
    made = Nodes(tmp_path)
    shutil.copytree(prepared, made.root, symlinks=True, dirs_exist_ok=True)
    yield made
    made.remove()


@pytest.fixture
def ssh(nodes):
    """Servers on both nodes, and the variables and parameters with which DeepSpeed uses them."""
    if (reason := missing_ssh()) is not None:
        pytest.skip(reason)
    return ssh_servers(nodes)


def metrics(root: Path, stage: str) -> list[dict[str, float]]:
    """The metrics of each record of a stage."""
    (file,) = root.glob(f"07_workspace/{stage}/*/metrics.jsonl")
    return [json.loads(line)["metrics"] for line in file.read_text().splitlines()]


def first_losses(root: Path, stage: str) -> dict[str, float]:
    """The losses of the first step of a stage, by the name of the metric."""
    step = metrics(root, stage)[0]
    return {name: value for name, value in step.items() if name.endswith("/loss")}


def ends_well(nodes: Nodes, run: subprocess.Popen[bytes]) -> str:
    """Wait until a run has ended without error on two nodes; return its output."""
    code, shown = run.wait(HANGS_S), nodes.output(0).read_text()
    assert code == 0, shown
    (manifest,) = nodes.root.glob("07_workspace/sft/*/export/manifest.json")
    assert json.loads(manifest.read_text())["ranks"] == 2
    return shown


def test_two_nodes_train_as_one_node_with_two_ranks(nodes, project):
    """The recipe of the first stage is the same, so each reuses the result of the other."""
    run = nodes.start_run("--env=tiny", "--to-nodes=ppo")
    assert run.wait(HANGS_S) == 0, nodes.output(0).read_text()
    for stage, count in {"sft": 1, "reward_model": 1, "ppo": 2}.items():
        expected, found = (first_losses(each.root, stage) for each in (project, nodes))
        assert len(expected) == count and found == pytest.approx(expected, abs=1e-5)
        largest = max(abs(found[name] - expected[name]) for name in expected)
        print(f"{stage}: the losses of the first step differ by at most {largest:.1e}")
        (run,) = (nodes.root / "07_workspace" / stage).glob("*[0-9a-f]")
        assert json.loads((run / "export" / "manifest.json").read_text())["ranks"] == 2
    # Later stages read weights that may differ in the last bit.
    one, two = (
        {path.name for path in each.root.glob("07_workspace/sft/*")} for each in (project, nodes)
    )
    assert two <= one


@pytest.mark.parametrize("end", ["kill", "unplug"])
def test_the_end_of_a_node_ends_the_stage_everywhere_and_is_resumed(nodes, ssh, end):
    run = nodes.start_run("--env=tiny", "--nodes=sft", **SOON, **ssh)
    wait_until(lambda: run.poll() is not None or [*nodes.root.glob(CHECKPOINT)])
    getattr(nodes, end)(1)
    assert run.wait(60) == 1
    message = nodes.output(0).read_text()
    assert f"node {nodes.addresses[1]} is lost: its ssh connection failed or was cut" in message
    assert "resumes after step" in message
    wait_until(lambda: not programs(nodes))
    nodes.plug(1)

    alone = {"launch.mode": "local", "launch.continue_from": 2, "launch.processes": 1, **LONGER}
    again = nodes.start_run("--env=tiny", "--nodes=sft", **alone)  # another number of machines
    assert again.wait(HANGS_S) == 0, nodes.output(0).read_text()
    assert "resuming from step" in nodes.output(0).read_text()


def test_a_node_that_falls_silent_is_named_and_the_same_command_resumes(nodes):
    """No launcher tells: the commands of the nodes are not connected."""
    command = f"{nodes.enter} {{node}} setsid --wait {{command}}; sleep 600"
    options = {"launch.command": command, **SOON}
    run = nodes.start_run("--env=tiny", "--nodes=sft", **options)
    wait_until(lambda: run.poll() is not None or [*nodes.root.glob(CHECKPOINT)])
    start = time.monotonic()
    nodes.kill(1)
    assert run.wait(60) == 1
    message = nodes.output(0).read_text()
    assert "node node-1 (rank 1) is lost: it has been silent for 10 s" in message
    assert time.monotonic() - start < 60
    wait_until(lambda: not programs(nodes))
    assert "resuming from step" in ends_well(
        nodes, nodes.start_run("--env=tiny", "--nodes=sft", **SOON)
    )


def test_the_end_of_the_driver_ends_the_ranks_of_other_nodes(nodes):
    """By SIGKILL: it can tell nobody."""
    run = nodes.start_run("--env=tiny", "--nodes=sft", **SOON)
    wait_until(lambda: run.poll() is not None or [*nodes.root.glob(CHECKPOINT)])
    start = time.monotonic()
    nodes.kill(0)  # with the guard, so nothing but the pulse tells node 1
    assert run.wait(60) != 0
    wait_until(lambda: not programs(nodes))
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("receiver", ["driver", "rank 1"])
def test_a_signal_lets_all_ranks_save_a_checkpoint(nodes, receiver):
    """As a scheduler sends it before it takes one machine away."""
    run = nodes.start_run("--env=tiny", "--nodes=sft", **LONGER)
    wait_until(lambda: run.poll() is not None or [*nodes.root.glob(CHECKPOINT)])
    if receiver == "driver":
        run.terminate()
    else:
        (file,) = nodes.root.glob("07_workspace/sft/*/heartbeats/rank1.json")
        psutil.Process(json.loads(file.read_text())["pid"]).terminate()
    assert run.wait(60) == 130
    assert "Run the same command again to resume" in nodes.output(0).read_text()
    steps = len(metrics(nodes.root, "sft"))
    (checkpoint,) = nodes.root.glob(f"07_workspace/sft/*/checkpoints/step-*{steps}")
    assert checkpoint.is_dir()  # so no step is lost, though every third step has a checkpoint
    wait_until(lambda: not programs(nodes))


def test_a_folder_that_is_not_shared_is_refused_before_a_model_is_loaded(nodes):
    nodes.separate(1)
    run = nodes.start_run("--env=tiny", "--nodes=sft", **SOON)
    assert run.wait(HANGS_S) == 1
    message = nodes.output(0).read_text()
    assert "node-1 does not see the driver's files in" in message
    assert "Fix: set root to a folder on a file system that all machines share" in message
    wait_until(lambda: not programs(nodes))


def test_a_hostfile_starts_the_ranks_by_ssh(nodes, ssh):
    ends_well(nodes, nodes.start_run("--env=tiny", "--nodes=sft", inputs="newest", **ssh))


@pytest.fixture
def slurm(nodes, tmp_path):
    """A SLURM of a controller and two nodes; returns the variable that names its settings."""
    needed = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scontrol")
    path = f"{os.environ['PATH']}:{SBIN}"
    missing_programs = [name for name in needed if shutil.which(name, path=path) is None]
    if missing_programs:
        pytest.skip(f"needs {', '.join(missing_programs)} (slurm-wlm)")
    key, settings = tmp_path / "munge.key", tmp_path / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    hosts = zip(nodes.hosts, nodes.addresses, strict=True)
    settings.write_text(
        f"ClusterName=test\nSlurmctldHost=node-0({nodes.addresses[0]})\nSlurmUser=root\n"
        f"AuthType=auth/munge\nAuthInfo=socket={tmp_path}/munge.socket,cred_expire=5\nCredType=cred/munge\n"
        f"StateSaveLocation={tmp_path}/state\nSlurmdSpoolDir={tmp_path}/spool-%n\n"
        f"SlurmctldPidFile={tmp_path}/ctl.pid\nSlurmdPidFile={tmp_path}/slurmd-%n.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n"
        "SwitchType=switch/none\nReturnToService=2\n"
        + "".join(f"NodeName={host} NodeAddr={address} CPUs=2\n" for host, address in hosts)
        + "PartitionName=all Nodes=node-0,node-1 Default=YES State=UP\n"
    )
    cgroups = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={tmp_path}/cgroup\n"
    (tmp_path / "cgroup.conf").write_text(cgroups)
    for name in ("state", "spool-node-0", "spool-node-1"):
        (tmp_path / name).mkdir()
    files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{option}={tmp_path / name}" for option, name in files.items()]
    variables = {"SLURM_CONF": str(settings), "PATH": path}
    munge = [str(shutil.which("munged", path=path)), "--foreground", "--force", *options]
    with subprocess.Popen(munge, stderr=subprocess.DEVNULL) as munged:
        nodes.start(0, ["slurmctld", "-D"], variables)
        for number in (0, 1):
            nodes.start(number, ["slurmd", "-D"], variables)
        wait_until(lambda: "slurmd started" in nodes.output(1).read_text())
        yield variables
        munged.kill()


def test_a_job_of_slurm_resumes_after_a_signal(nodes, slurm, tmp_path):
    """The script of docs/cluster.md puts itself back into the queue, and finishes."""
    page = (PROJECT / "docs" / "cluster.md").read_text()
    text = page[page.index("#!/bin/bash") : page.index("```", page.index("#!/bin/bash"))]
    settings = {"root": nodes.root, "launch.processes": 1, **LONGER}
    params = "".join(f",{name}={value}" for name, value in settings.items())
    for documented, here in {
        "--nodes=4": "--nodes=2",
        "#SBATCH --gpus-per-node=8\n": "",  # this SLURM knows no GPUs
        "--ntasks-per-node=8": "--ntasks-per-node=1",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "kedro run --pipeline=full": f"{KEDRO} run --env=tiny --nodes=sft",
        "launch.grace_s=500": f"launch.grace_s=60{params}",
    }.items():
        assert documented in text
        text = text.replace(documented, here)
    script, output = tmp_path / "rlhf.sbatch", tmp_path / "job.out"
    script.write_text(text)
    assert nodes.start(0, ["sbatch", f"--output={output}", str(script)], slurm).wait() == 0
    wait_until(lambda: [*nodes.root.glob(CHECKPOINT)])
    assert nodes.start(0, ["scancel", "--signal=TERM", "--batch", "1"], slurm).wait() == 0
    wait_until(lambda: "ended by" in output.read_text())
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/export/manifest.json")])
    assert "resuming from step" in output.read_text()
