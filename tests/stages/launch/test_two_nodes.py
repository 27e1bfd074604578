"""Real training on two nodes: network namespaces with addresses and folders of their own."""

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
from nodes import Nodes, missing, missing_ssh, programs, ssh_servers
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


def train(nodes, **options):
    """Start the stage `sft`; return when it has a checkpoint, or has ended."""
    run = nodes.start_run("--env=tiny", "--nodes=sft", **options)
    wait_until(lambda: run.poll() is not None or [*nodes.root.glob(CHECKPOINT)])
    return run


def resume(nodes, **options):
    again = nodes.start_run("--env=tiny", "--nodes=sft", **options)
    assert again.wait(HANGS_S) == 0, nodes.output(0).read_text()
    assert "resuming from step" in nodes.output(0).read_text()


def metrics(root: Path, stage: str) -> list[dict[str, float]]:
    """The metrics of each record of a stage."""
    (file,) = root.glob(f"07_workspace/{stage}/*/metrics.jsonl")
    return [json.loads(line)["metrics"] for line in file.read_text().splitlines()]


def first_losses(root: Path, stage: str) -> dict[str, float]:
    step = metrics(root, stage)[0]
    return {name: value for name, value in step.items() if name.endswith("/loss")}


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
    """A hostfile starts the ranks, by ssh."""
    run = train(nodes, **SOON, **ssh)
    getattr(nodes, end)(1)
    assert run.wait(60) == 1
    message = nodes.output(0).read_text()
    assert f"node {nodes.addresses[1]} is lost: its ssh connection failed or was cut" in message
    assert "resumes after step" in message
    wait_until(lambda: not programs(nodes))
    nodes.plug(1)

    alone = {"launch.mode": "local", "launch.continue_from": 2, "launch.processes": 1, **LONGER}
    resume(nodes, **alone)  # another number of machines


def test_a_node_that_falls_silent_is_named_and_the_same_command_resumes(nodes):
    """No launcher tells: the commands of the nodes are not connected."""
    command = f"{nodes.enter} {{node}} setsid --wait {{command}}; sleep 600"
    run = train(nodes, **{"launch.command": command, **SOON})
    start = time.monotonic()
    nodes.kill(1)
    assert run.wait(60) == 1
    message = nodes.output(0).read_text()
    assert "node node-1 (rank 1) is lost: it has been silent for 10 s" in message
    assert time.monotonic() - start < 60
    wait_until(lambda: not programs(nodes))
    resume(nodes, **SOON)
    (manifest,) = nodes.root.glob("07_workspace/sft/*/export/manifest.json")
    assert json.loads(manifest.read_text())["ranks"] == 2


def test_the_end_of_the_driver_ends_the_ranks_of_other_nodes(nodes):
    """By SIGKILL: it can tell nobody."""
    run = train(nodes, **SOON)
    start = time.monotonic()
    nodes.kill(0)  # with the guard, so nothing but the pulse tells node 1
    assert run.wait(60) != 0
    wait_until(lambda: not programs(nodes))
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("receiver", ["driver", "rank 1"])
def test_a_signal_lets_all_ranks_save_a_checkpoint(nodes, receiver):
    """As a scheduler sends it before it takes one machine away."""
    run = train(nodes, **LONGER)
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
