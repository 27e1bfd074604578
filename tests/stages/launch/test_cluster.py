"""Launches on several machines: their commands, and real ranks, all of them on this machine."""

import base64
import json
import os
import re
import socket
import subprocess
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from waiting import once, wait_until

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, Interrupted, StageError
from rlhf_pipeline.stages.job import Job, RunContext, StageSpec
from rlhf_pipeline.stages.launch import node_program as module
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import node_layout
from rlhf_pipeline.stages.run import StageRunner

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from rlhf_pipeline.errors import DataError, Interrupted
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import run_program

def main(job):
    folder, rank = Path(__file__).parent, os.environ["RANK"]
    (folder / f"seen-{rank}").write_text(
        " ".join(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))
    )
    asked = []
    signal.signal(signal.SIGTERM, lambda *arguments: asked.append(1))
    heartbeat.begin_phase("update", 3)
    while (folder / "hold").exists():
        if asked:
            (folder / "hold").unlink()
            raise Interrupted("ended by SIGTERM after step 3")
        time.sleep(0.05)
    if (folder / f"fail-{rank}").exists():
        raise DataError("ordered to fail")
    job.export.mkdir(exist_ok=True)
    return {}

if __name__ == "__main__":
    run_program(main)
"""
OWN = {"mode": "command", "nodes": 2, "processes": 1, "address": "127.0.0.1"}


class Toy:
    """A stage on two nodes, one rank each; `folder` contains the orders to its program."""

    def __init__(self, folder: Path, **launch: object) -> None:
        self.folder = folder
        (folder / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
        # The variable keeps `{node}` in a command that does not care on which machine it runs.
        defaults = {"command": "env TOY_NODE={node} {command}", "node_timeout_s": 5.0}
        self.config = LaunchConfig(**OWN | defaults | {"grace_s": 5.0} | launch)

    def run(self) -> Path:
        spec = StageSpec("toy", "toy_program", libraries=())
        return StageRunner(RunContext(self.folder / "ws", self.config)).run(Job(spec, {}, {}, 1))

    def seen(self, rank: int) -> list[str]:
        return (self.folder / f"seen-{rank}").read_text().split()

    def is_running(self) -> bool:
        """Whether both ranks are in their first phase."""
        files = [*self.folder.glob("ws/toy/*/heartbeats/rank*.json")]
        return [json.loads(file.read_text())["phase"] for file in files] == ["update", "update"]

    def rank(self, number: int) -> psutil.Process:
        (file,) = self.folder.glob(f"ws/toy/*/heartbeats/rank{number}.json")
        return psutil.Process(json.loads(file.read_text())["pid"])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes the stage; fields of `launch` may be given."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(module.__file__).parents[3]}")
    yield lambda **launch: Toy(tmp_path, **launch)

    def programs() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [p for p in found if f"{tmp_path}/ws/toy" in " ".join(p.info["cmdline"] or [])]

    wait_until(lambda: not programs())


@pytest.mark.slow
def test_a_command_starts_all_ranks(toy, tmp_path):
    """As srun does."""
    script = tmp_path / "both"
    script.write_text(
        "#!/bin/bash\n"
        'for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done; wait\n'
    )
    script.chmod(0o755)
    stage = toy(command=f"{script} {{command}}")
    stage.run()
    assert [stage.seen(rank) for rank in (0, 1)] == [["2", r, "127.0.0.1"] for r in "01"]


@pytest.mark.slow
def test_a_command_for_each_node_starts_its_ranks_and_one_that_fails_is_reported(toy):
    stage = toy()
    (stage.folder / "fail-1").touch()
    with pytest.raises(StageError, match="rank1: ordered to fail"):
        stage.run()
    assert [stage.seen(rank) for rank in (0, 1)] == [["2", "0", "127.0.0.1"]] * 2


@pytest.mark.slow
def test_a_rank_of_another_machine_that_falls_silent_is_named(toy, monkeypatch):
    stage = toy()
    (stage.folder / "hold").touch()
    monkeypatch.setattr("rlhf_pipeline.stages.launch.ranks.machine", lambda: "driver/1")
    start = time.monotonic()
    suspend = once(stage.is_running, lambda: stage.rank(1).suspend())
    with suspend, pytest.raises(StageError) as failure:
        stage.run()
    assert time.monotonic() - start < 60
    # Both ranks are on that machine, and one of them still reports.
    assert "rank 1 ended without a report in update of step 3" in str(failure.value)
    assert f"node {socket.gethostname()}" not in str(failure.value)


@pytest.mark.slow
def test_ranks_that_obey_a_scheduler_interrupt_the_stage(toy):
    """The machine may vanish soon: the run can be resumed."""
    stage = toy()
    (stage.folder / "hold").touch()
    terminate = once(stage.is_running, lambda: stage.rank(1).terminate())
    message = r"ended by SIGTERM to the ranks, after step 3\. Run the same command"
    with terminate, pytest.raises(Interrupted, match=message):
        stage.run()


def made(folder, **launch):
    three = {"nodes": 3, "processes": 2, "command": "srun {command}"}
    config = LaunchConfig(**OWN | three | launch)
    program = NodeProgram("sft", str(folder))
    return on_several_machines(program, config, node_layout(config, 0))


def test_a_command_runs_once_or_for_each_node(tmp_path):
    one = made(tmp_path, command="srun --nodes=3 {command}")
    assert one.command[:2] == ["srun", "--nodes=3"]
    assert one.command[-3:] == [str(tmp_path), one.pulse.launch, "30"]
    assert one.command[-4].endswith("/stages/launch/start_rank.py")
    each = made(tmp_path, command="kubectl exec pod-{node} -- {command}")
    assert each.command[:2] == ["bash", "-c"]
    commands = each.command[2].partition("{ {")[2].split(" & ")[:-1]
    assert [re.search(r"pod-\d", command)[0] for command in commands] == ["pod-0", "pod-1", "pod-2"]
    assert ["--node_rank=2" in command for command in commands] == [False, False, True]
    world = next(word for word in commands[0].split() if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {
        "node0": ["0", "1"], "node1": ["0", "1"], "node2": ["0", "1"],
    }  # fmt: skip


def test_commands_of_nodes_that_end_at_the_same_moment_all_count(tmp_path):
    program = made(tmp_path, command="true {node} {command}")
    codes = [subprocess.run(program.command, check=False).returncode for _ in range(50)]
    assert codes == [0] * 50


def test_the_first_command_of_a_node_that_fails_ends_the_others(tmp_path):
    program = made(tmp_path, command="sh -c 'test {node} = 1 && exit 7; sleep 60' {command}")
    start = time.monotonic()
    with module.started(program) as process:
        assert process.wait(30) == 7
    assert time.monotonic() - start < 30


def test_a_launcher_of_deepspeed_starts_the_ranks_of_a_hostfile(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hidden")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=8\nnode-1 slots=8\n")
    hostfile = {"mode": "hostfile", "hostfile": str(hosts), "processes": 4}
    program = made(tmp_path, **hostfile, launcher="slurm", launcher_args="--mpi=none")
    assert f"--hostfile={tmp_path}/heartbeats/hostfile" in program.command
    assert "--launcher=slurm" in program.command and "--force_multi" in program.command
    assert "--launcher_args=--kill-on-bad-exit=1 --mpi=none" in program.command
    environment = program.environment
    assert "MLFLOW_TRACKING_PASSWORD" not in environment
    assert environment["PYTHONSAFEPATH"] == "1"  # which DeepSpeed passes on
    assert environment["PDSH_SSH_ARGS_APPEND"] == (
        "-p 2222 -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10 "
        "-o ServerAliveCountMax=2"
    )
    monkeypatch.setattr(module, "started", lambda program: pytest.fail("reached"))
    with pytest.raises(pytest.fail.Exception), program.running():
        pass
    written = (tmp_path / "heartbeats" / "hostfile").read_text()
    assert written == "127.0.0.1 slots=4\nnode-1 slots=4\n"


def test_a_path_that_a_shell_would_change_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"root: found .*/a b, expected letters"):
        made(tmp_path / "a b")


def test_the_path_of_the_work_directory_holds_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made("ws").command[-3] == f"{tmp_path}/ws"


def test_an_address_that_other_machines_cannot_reach_is_refused(tmp_path, monkeypatch):
    """Debian gives the machine's own name the address 127.0.1.1."""
    with pytest.raises(ConfigError, match=r"launch\.address: found 192\.0\.2\.1, expected an addr"):
        made(tmp_path, address="192.0.2.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"found node-0, .*127\.0\.1\.1, which other machines"):
        made(tmp_path, address="node-0")


def test_nothing_but_the_ranks_listens(tmp_path):
    """Neither the driver nor anything that it makes opens a port."""
    before = psutil.Process().net_connections()
    program = made(tmp_path)
    with program.pulse.beating():
        assert psutil.Process().net_connections() == before
