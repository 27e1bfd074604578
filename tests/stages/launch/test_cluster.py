"""Agents of other nodes: real processes on this machine that run a program without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import psutil
import pytest
from ports import reserved_port
from waiting import once, wait_until

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, Interrupted, StageError
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import Job, StageSpec
from rlhf_pipeline.stages.launch import agent, remote_node
from rlhf_pipeline.stages.launch import cluster as module
from rlhf_pipeline.stages.launch.cluster import Cluster, starting_commands
from rlhf_pipeline.stages.launch.layout import Layout
from rlhf_pipeline.stages.launch.link import TOKEN
from rlhf_pipeline.stages.launch.node_program import NodeProgram
from rlhf_pipeline.stages.run import StageRunner

AGENT = "rlhf_pipeline.stages.launch.agent"

PROGRAM = """
import os, sys, time
from pathlib import Path
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import run_program

def main(job):
    folder, rank = Path(__file__).parent, os.environ["RANK"]
    (folder / f"seen-{rank}").write_text(
        " ".join(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))
    )
    heartbeat.at("update", 3)
    while (folder / "hold").exists():
        time.sleep(0.05)
    if (folder / f"fail-{rank}").exists():
        raise DataError("ordered to fail")
    job.export.mkdir(exist_ok=True)
    return {}

if (Path(__file__).parent / "late").exists() and os.environ["RANK"] == "1":
    time.sleep(5)
if (Path(__file__).parent / "broken").exists() and os.environ["RANK"] == "1":
    sys.exit("no such library")
if __name__ == "__main__":
    run_program(main)
"""


@pytest.fixture
def port():
    with reserved_port() as found:
        return found


class Toy:
    """A stage on two nodes, one rank each; `folder` contains the orders to its program."""

    def __init__(self, folder: Path, port: int, **launch: object) -> None:
        self.folder = folder
        (folder / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
        defaults = {
            "mode": "command",
            "nodes": 2,
            "command": "{command}",
            "processes": 1,
            "address": "127.0.0.1",
            "port": port,
            "node_timeout_s": 5.0,
            "start_timeout_s": 60.0,
            "grace_s": 5.0,
        }
        self.config = LaunchConfig(**defaults | launch)
        self.cluster = Cluster(self.config)

    def run(self) -> Path:
        spec = StageSpec("toy", "toy_program", libraries=())
        context = RunContext(self.folder / "ws", self.config, cluster=self.cluster)
        return StageRunner(context).run(Job(spec, {}, {}, 1))

    def seen(self, rank: int) -> list[str]:
        return (self.folder / f"seen-{rank}").read_text().split()

    def agents(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [each for each in children if AGENT in each.cmdline()]


def runs(folder: Path) -> bool:
    """Whether both ranks are in their first phase."""
    files = [*folder.glob("ws/toy/*/heartbeats/rank*.json")]
    return [json.loads(file.read_text())["phase"] for file in files] == ["update", "update"]


@pytest.fixture
def toy(tmp_path, port, monkeypatch):
    """Makes the stage; fields of `launch` may be given."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(module.__file__).parents[3]}")
    made = []

    def make(**launch):
        made.append(Toy(tmp_path, port, **launch))
        return made[-1]

    yield make
    for each in made:
        each.cluster.close(0)


@pytest.mark.slow
def test_the_agents_serve_all_stages_of_a_run(toy):
    stage = toy()
    assert stage.agents() == []  # until a stage needs them
    stage.run()
    assert [stage.seen(rank) for rank in (0, 1)] == [["2", "0", "127.0.0.1"]] * 2
    (agent,) = stage.agents()
    (stage.folder / "toy_program.py").write_text(textwrap.dedent(PROGRAM) + "\nAGAIN = 1\n")
    stage.cluster.nodes()
    assert stage.agents() == [agent]
    stage.cluster.close(0)
    assert agent.wait(10) in (0, None)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_failing_rank_of_another_node_is_reported(toy, late):
    """Also after rank 0 has finished, and DeepSpeed's launcher on its node."""
    stage = toy()
    (stage.folder / "fail-1").touch()
    if late:
        (stage.folder / "late").touch()
    with pytest.raises(StageError) as failure:
        stage.run()
    assert "rank1: ordered to fail" in str(failure.value)


@pytest.mark.slow
def test_a_program_that_cannot_start_on_another_node_is_reported_with_its_log(toy):
    stage = toy()
    (stage.folder / "broken").touch()
    (stage.folder / "hold").touch()
    with pytest.raises(StageError) as failure:
        stage.run()
    message = str(failure.value)
    assert "node 1 (" in message and "DeepSpeed's launcher ended with exit code 1" in message
    assert "no such library" in message


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_a_killed_agent_or_rank_ends_the_stage_with_its_name(toy, victim):
    stage = toy()
    (stage.folder / "hold").touch()

    def kill():
        if victim == "agent":
            stage.agents()[0].kill()
        else:
            (file,) = stage.folder.glob("ws/toy/*/heartbeats/rank1.json")
            rank = psutil.Process(json.loads(file.read_text())["pid"])
            rank.parent().suspend()  # DeepSpeed's launcher, which takes the exit status away
            rank.kill()

    start = time.monotonic()
    with once(lambda: runs(stage.folder), kill), pytest.raises(StageError) as failure:
        stage.run()
    assert time.monotonic() - start < 60
    expected = {
        "agent": "127.0.0.1, rank 1) is lost: the connection was closed",
        "rank": "rank 1 was ended by SIGKILL in update of step 3",
    }
    assert expected[victim] in str(failure.value)
    wait_until(lambda: not _processes("toy_program"))


@pytest.mark.slow
def test_a_signal_to_an_agent_interrupts_the_stage(toy):
    """The node may vanish soon: all ranks save, and the run can be resumed."""
    stage = toy()
    (stage.folder / "hold").touch()

    def interrupt():
        stage.agents()[0].send_signal(signal.SIGINT)

    with once(lambda: runs(stage.folder), interrupt), pytest.raises(Interrupted) as end:
        stage.run()
    assert ", 127.0.0.1, rank 1) received SIGINT. Run the same command again" in str(end.value)
    stage.cluster.close(1)
    wait_until(lambda: not _processes("toy_program") and not stage.agents())


@pytest.mark.slow
def test_a_shared_file_system_is_neither_read_nor_copied(toy, monkeypatch):
    """Large inputs would take minutes."""
    monkeypatch.setattr(remote_node, "_files", lambda run: pytest.fail("files are listed"))
    toy().run()


def test_an_agent_that_fails_is_reported_with_the_reason(toy, monkeypatch, tmp_path):
    """This process is the agent: it cannot create the work directory."""
    monkeypatch.setenv(TOKEN, "secret")
    (tmp_path / "file").touch()
    stage = toy(command=f"{sys.executable} -c pass {{command}}")
    with ThreadPoolExecutor(1) as pool:
        address = ("127.0.0.1", stage.config.port)
        link = pool.submit(agent._connect, address, "secret", 30.0, 30.0).result()
        link.send("hello", number=1, **module.description())
        (node,) = stage.cluster.nodes()
        obeying = pool.submit(agent.obey_and_report, link)
        program = NodeProgram("toy_program", str(tmp_path / "file" / "below"), ranks=(1, 1), node=1)
        node.start(program)
        wait_until(lambda: node.lost)
        assert str(node.lost).endswith(f"Not a directory: '{tmp_path}/file/below/program.log'")
        with pytest.raises(StageError, match="Not a directory"):
            obeying.result()
        with pytest.raises(StageError, match=r"node 1 \(.* is lost: .*Not a directory"):
            node.measure()


def test_a_port_serves_one_run(toy, port):
    stage = toy()
    with pytest.raises(ConfigError, match=rf"port {port} \(launch\.port\), .*already in use"):
        Cluster(stage.config)


def test_a_name_of_the_loopback_is_refused(port, monkeypatch):
    """Debian gives the machine's own name the address 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    config = LaunchConfig(mode="command", command="{command}", nodes=2, address="node-0", port=port)
    with pytest.raises(ConfigError, match=r"found node-0, port .*127\.0\.1\.1, which other mac"):
        Cluster(config)


def test_a_slow_check_of_the_code_is_no_difference_of_the_clocks(toy, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    stage = toy(command=f"{sys.executable} -c pass {{command}}")
    hello = module.description()
    slow = hello | {"time": hello["time"] + 60.0}
    monkeypatch.setattr(module, "description", lambda: slow)  # as if it took a minute
    with socket.create_connection(("127.0.0.1", stage.config.port)) as connection:
        link = module.Link(connection, "secret", driver=False, timeout_s=30.0)
        link.send("hello", number=1, **hello)
        assert len(stage.cluster.nodes()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_the_end_of_the_driver_ends_the_other_nodes(port, tmp_path):
    """By SIGKILL: it can tell nobody."""
    (tmp_path / "hold").touch()
    code = f"import test_cluster as t; t.Toy(t.Path({str(tmp_path)!r}), {port}).run()"
    here = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(here)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as driver:
        wait_until(lambda: driver.poll() is not None or runs(tmp_path))
        driver.kill()
    wait_until(lambda: not _processes("toy_program") and not _processes(AGENT))


def _processes(name: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if name in " ".join(each.info["cmdline"] or [])]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"code": "0" * 64}, "code: found 000000000000, expected"),
        ({"python": "3.8"}, "python: found 3.8, expected"),
        ({"gpus": 4}, "found 4 GPUs for 1 ranks; the driver's node has 0"),
        ({"time": 0.0}, "found a clock that differs by"),
        ({"number": 7}, "found number 7, expected one from 1 to 1"),
    ],
)
def test_a_node_that_differs_is_refused(toy, monkeypatch, changed, message):
    """The agent here is this process, which describes itself in another way."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN, "secret")
    stage = toy(command=f"{sys.executable} -c pass {{command}}")
    hello = module.description() | {"number": 1} | changed
    with socket.create_connection(("127.0.0.1", stage.config.port)) as connection:
        link = module.Link(connection, "secret", driver=False, timeout_s=30.0)
        link.send("hello", **hello)
        assert message in link.expect("refused")["reason"]
        with pytest.raises(StageError, match=r"Fix: |expected one from"):
            stage.cluster.nodes()


def test_a_command_that_fails_is_shown_without_the_secret(toy):
    stage = toy(command="sh -c 'echo cannot reach $0; exit 3' {command}")
    with pytest.raises(StageError) as failure:
        stage.cluster.nodes()
    message = str(failure.value)
    assert "found exit code 3 of the command that starts the other nodes" in message
    assert f"cannot reach {sys.executable}" in message
    assert stage.cluster._token not in message


def test_a_node_that_does_not_come_is_missed(toy):
    stage = toy(command="sh -c 'sleep 60' {command}", start_timeout_s=0.5)
    with pytest.raises(StageError, match=r"found 0 of 1 other nodes connected after 0\.5 s"):
        stage.cluster.nodes()


def test_an_address_of_another_machine_is_refused(port):
    config = LaunchConfig(
        mode="command", command="{command}", nodes=2, address="192.0.2.1", port=port
    )
    with pytest.raises(ConfigError, match=r"launch\.address: found 192\.0\.2\.1, port "):
        Cluster(config)


def test_a_scheduler_needs_a_secret(monkeypatch, port):
    for name, value in {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match=rf"{TOKEN}: found nothing"):
        Cluster(LaunchConfig(mode="rank_env", port=port))


def test_commands_start_each_node_or_all_at_once():
    layout = Layout((8, 8, 8), "node-0", hosts=("node-0", "node-1", "node-2"))
    one = LaunchConfig(mode="command", nodes=3, command="srun --nodes=2 {command}")
    ((command, _),) = starting_commands(one, layout, [AGENT, "--driver=node-0:29511"], StringIO())
    assert command == [
        "srun", "--nodes=2", sys.executable, "-P", "-m", AGENT, "--driver=node-0:29511"
    ]  # fmt: skip
    each = LaunchConfig(mode="command", nodes=3, command="kubectl exec pod-{node} -- {command}")
    commands = [command for command, _ in starting_commands(each, layout, [AGENT], StringIO())]
    assert [command[2] for command in commands] == ["pod-1", "pod-2"]
    assert [command[-1] for command in commands] == ["--node=1", "--node=2"]


def test_deepspeed_starts_one_agent_on_each_other_host(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hidden")
    layout = Layout((8, 8, 8), "node-0", hosts=("node-0", "node-1", "node-2"))
    config = LaunchConfig(mode="hostfile", hostfile="hosts", launcher="openmpi")
    with (tmp_path / "hosts").open("w") as hosts:
        ((command, environment),) = starting_commands(config, layout, [AGENT], hosts)
        assert Path(hosts.name).read_text() == "node-1 slots=1\nnode-2 slots=1\n"
    assert f"--hostfile={hosts.name}" in command
    assert "--launcher=openmpi" in command and "--force_multi" in command
    assert "MLFLOW_TRACKING_PASSWORD" not in environment
    assert environment["PYTHONSAFEPATH"] == "1"  # which DeepSpeed passes on


def test_the_agent_imports_neither_kedro_nor_torch():
    code = f"import sys, {AGENT}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"kedro", "torch", "mlflow", "transformers"}.isdisjoint(found.stdout.split())
