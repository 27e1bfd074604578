"""Real training on two nodes: network namespaces with addresses and folders of their own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import KEDRO, PROJECT, Nodes, missing
from waiting import HANGS_S, wait_until

REASON = missing()
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"
SOURCE = Path(__file__).parents[3] / "src"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(REASON is not None, reason=f"no nodes: {REASON}"),
]
LONGER = {"sft.epochs": 3, "sft.checkpoint_every": 3, "sft.evaluations": 1}
"""Long enough to be killed in the middle."""


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    made.remove()


def metrics(root: Path, stage: str) -> list[dict[str, float]]:
    """The metrics of each record of a stage."""
    (file,) = root.glob(f"07_workspace/{stage}/*/metrics.jsonl")
    return [json.loads(line)["metrics"] for line in file.read_text().splitlines()]


def first_losses(root: Path, stage: str) -> dict[str, float]:
    """The losses of the first step of a stage, by the name of the metric."""
    step = metrics(root, stage)[0]
    return {name: value for name, value in step.items() if name.endswith("/loss")}


def run_all(nodes: Nodes, *arguments: str, **options: object) -> list[int]:
    """Run to the end on all nodes; return the exit codes."""
    return [run.wait(HANGS_S) for run in nodes.start_runs("--env=tiny", *arguments, **options)]


def test_two_nodes_train_as_one_node_with_two_ranks(nodes, project):
    """The recipe of the first stage is the same, so each reuses the result of the other."""
    assert run_all(nodes, "--to-nodes=ppo", private=True) == [0, 0], nodes.output(0).read_text()
    assert "node 1 (" in nodes.output(0).read_text()  # it received files
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
    assert not (nodes.folder / "root1" / "08_reporting").exists()


@pytest.mark.parametrize("end", ["kill", "unplug"])
def test_the_end_of_a_node_ends_the_stage_everywhere_and_is_resumed(nodes, end):
    options = {"private": True, "launch.node_timeout_s": 5, **LONGER}
    runs = nodes.start_runs("--env=tiny", "--to-nodes=sft", **options)
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/checkpoints/step-*6")])
    getattr(nodes, end)(1)
    start = time.monotonic()
    assert runs[0].wait(60) == 1
    assert time.monotonic() - start < 60
    message = nodes.output(0).read_text()
    assert "node 1 (" in message and f"{nodes.addresses[1]}, rank 1) is lost: " in message
    assert "resumes after step" in message
    wait_until(lambda: not nodes.processes(1))
    assert runs[1].wait(10) != 0
    if end == "unplug":
        nodes.plug(1)

    assert run_all(nodes, "--nodes=sft", **options) == [0, 0], nodes.output(0).read_text()
    assert "resuming from step" in nodes.output(0).read_text()


def test_a_signal_to_another_node_lets_all_ranks_save_a_checkpoint(nodes):
    """As a scheduler sends it before it takes one machine away."""
    options = {"private": True, **LONGER}
    runs = nodes.start_runs("--env=tiny", "--to-nodes=sft", **options)
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/checkpoints/step-*6")])
    runs[1].terminate()
    assert [run.wait(60) for run in runs] == [130, 1]
    message = nodes.output(0).read_text()
    assert f"{nodes.addresses[1]}, rank 1) received SIGTERM. Run the same command again" in message
    steps = len(metrics(nodes.root, "sft"))
    (checkpoint,) = nodes.root.glob(f"07_workspace/sft/*/checkpoints/step-*{steps}")
    assert checkpoint.is_dir()  # so no step is lost, though every third step has a checkpoint


def test_another_number_of_nodes_resumes(nodes):
    runs = nodes.start_runs("--env=tiny", "--to-nodes=sft", **LONGER)
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/checkpoints/step-*6")])
    nodes.kill(1)
    assert runs[0].wait(60) == 1

    alone = {"numbers": [0], "launch.mode": "local", "launch.continue_from": 2, **LONGER}
    assert run_all(nodes, "--nodes=sft", **alone) == [0], nodes.output(0).read_text()
    assert "resuming from step" in nodes.output(0).read_text()


def ends_well(nodes: Nodes, runs: list) -> None:
    """Wait until runs have ended without error on two nodes."""
    codes = [run.wait(HANGS_S) for run in runs]
    shown = "\n".join(nodes.output(number).read_text() for number in (0, 1))
    assert codes == [0] * len(runs), shown
    (manifest,) = nodes.root.glob("07_workspace/sft/*/export/manifest.json")
    assert json.loads(manifest.read_text())["ranks"] == 2
    assert next(nodes.root.rglob("heartbeats"), None) is None
    assert [*nodes.folder.rglob("program-node1.log")]


def test_torchrun_starts_the_nodes(nodes):
    def prefix(number):
        places = f"--nnodes=2 --node_rank={number} --nproc_per_node=1 --no_python"
        address = f"--master_addr={nodes.addresses[0]} --master_port=29400"
        return [sys.executable, "-m", "torch.distributed.run", *places.split(), *address.split()]

    runs = nodes.start_runs("--env=tiny", "--to-nodes=sft", prefix=prefix, environment={})
    ends_well(nodes, runs)


def test_deepspeed_without_ssh_starts_the_nodes(nodes, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address} slots=1\n" for address in nodes.addresses))

    def prefix(number):
        options = f"--no_ssh --node_rank={number} --hostfile={hosts} --no_python --no_local_rank"
        address = f"--master_addr={nodes.addresses[0]}"
        runner = [sys.executable, "-m", "deepspeed.launcher.runner"]
        return [*runner, *options.split(), address]

    cpu = {"DS_ACCELERATOR": "cpu"}  # DeepSpeed shows each process the GPU of its slot
    runs = nodes.start_runs("--env=tiny", "--to-nodes=sft", prefix=prefix, environment=cpu)
    ends_well(nodes, runs)


@pytest.mark.skipif(
    shutil.which("sshd", path=SBIN) is None or shutil.which("pdsh") is None,
    reason="needs sshd (openssh-server) and pdsh",
)
def test_a_hostfile_starts_agents_by_ssh(nodes, tmp_path):
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = (
        f"-o HostKey={tmp_path}/host -o AuthorizedKeysFile={tmp_path}/user.pub -o UsePAM=no "
        "-o StrictModes=no -o PermitRootLogin=yes -o PidFile=none"
    )
    sshd = [str(shutil.which("sshd", path=SBIN)), "-D", "-e", "-f", "/dev/null", *server.split()]
    nodes.start(1, sshd, private=True)
    client = tmp_path / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F /dev/null -i {tmp_path}/user "
        '-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
    )
    client.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address} slots=1\n" for address in nodes.addresses))
    parameters = {"launch.mode": "hostfile", "launch.hostfile": hosts, "launch.processes": "null"}
    path = {"PATH": f"{client.parent}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    ends_well(
        nodes,
        nodes.start_runs(
            "--env=tiny", "--to-nodes=sft", numbers=[0], environment=path, **parameters
        ),
    )


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


def test_slurm_starts_the_nodes(nodes, slurm):
    step = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    arguments = ("--env=tiny", "--to-nodes=sft")
    ends_well(
        nodes,
        nodes.start_runs(*arguments, numbers=[0], prefix=lambda number: step, environment=slurm),
    )


def test_a_job_of_slurm_resumes_after_a_signal(nodes, slurm, tmp_path):
    """The script of docs/cluster.md puts itself back into the queue, and finishes."""
    page = (PROJECT / "docs" / "cluster.md").read_text()
    text = page[page.index("#!/bin/bash") : page.index("```", page.index("#!/bin/bash"))]
    settings = {"root": nodes.root, "launch.processes": 1, **LONGER}
    params = "".join(f",{name}={value}" for name, value in settings.items())
    for documented, here in {
        "--nodes=4": "--nodes=2",
        "#SBATCH --gpus-per-node=8\n": "",  # this SLURM knows no GPUs
        "--cpus-per-task=64": "--cpus-per-task=1",
        "kedro run --pipeline=full": f"{KEDRO} run --env=tiny --to-nodes=sft",
        "launch.grace_s=500": f"launch.grace_s=60{params}",
    }.items():
        assert documented in text
        text = text.replace(documented, here)
    script, output = tmp_path / "rlhf.sbatch", tmp_path / "job.out"
    script.write_text(text)
    assert nodes.start(0, ["sbatch", f"--output={output}", str(script)], slurm).wait() == 0
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/checkpoints/step-*6")])
    assert nodes.start(0, ["scancel", "--signal=TERM", "1"], slurm).wait() == 0
    wait_until(lambda: "received SIGTERM" in (text := output.read_text()) or "ended by" in text)
    wait_until(lambda: [*nodes.root.glob("07_workspace/sft/*/export/manifest.json")])
    assert "resuming from step" in output.read_text()


def test_a_command_of_slurm_starts_the_agents(nodes, slurm):
    parameters = {
        "launch.mode": "command",
        "launch.nodes": 2,
        "launch.command": "srun --nodes=1 --ntasks=1 --nodelist=node-1 {command}",
    }
    ends_well(
        nodes,
        nodes.start_runs(
            "--env=tiny",
            "--to-nodes=sft",
            numbers=[0],
            prefix=lambda number: ["salloc", "--nodes=2"],
            environment=slurm,
            **parameters,
        ),
    )
