"""Interrupted training that resumes: real launches on two ranks, real signals.

The ranks pause at a known point until the signal has taken effect, however fast the machine is.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import warm
from processes import descendants
from rank_fixtures import as_artifact, pause_before_checkpoint
from tiny_jobs import logged
from waiting import wait_until

import rlhf_pipeline
from rlhf_pipeline.distributed.products import use_onednn, uses_onednn
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import Interrupted, StageError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import checkpoint_path, list_checkpoints, newest_valid_step, seal
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.runtime.metrics_file import answers_in, read_json_lines, truncate_after
from rlhf_pipeline.training.checkpoints import Checkpoints

SOURCE = Path(rlhf_pipeline.__file__).parents[1]
DRIVER = """
import json, sys
from pathlib import Path
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

stage, config, inputs, workspace, launch = (json.loads(argument) for argument in sys.argv[1:])
spec = stage_specs()[stage]
blocks = {stage: spec.blocks[stage].model_validate(config)}
job = Job(spec, blocks, {name: Path(path) for name, path in inputs.items()}, 1)
StageRunner(RunContext(Path(workspace), LaunchConfig(**launch))).run(job)
"""

PAUSING_REWARD = """
import time
from pathlib import Path

calls = 0

def reward(prompts, responses):
    global calls
    calls += 1
    while calls > {rounds} and Path({pause!r}).exists():
        time.sleep(0.01)
    if calls % {rounds}:
        return [0.0] * len(responses)
    return [-len(response) / 10 for response in responses]
"""
"""Pauses from the second step on while a file exists. With two rounds a step, the first has equal
scores, so that the second one replaces all prompts."""

PAUSING_WORLD = """
import time
from pathlib import Path

class World:
    def __init__(self, seed):
        self.turns = 2 + seed % 2

    def reset(self, task):
        return [{{"role": "user", "content": "go"}}]

    def step(self, answer):
        while {pause}.exists() and any({folder}.glob("*/ppo/*/checkpoints/step-00000001")):
            Path({inside!r}).touch()
            time.sleep(0.01)
        self.turns -= 1
        return [{{"role": "user", "content": "on"}}], len(answer) % 3, self.turns == 0
"""
"""Pauses in an episode of the second step."""

MODEL = {"optimizer": {"learning_rate": 1e-3}}
SFT = MODEL | {"epochs": 2, "batch_size": 4, "micro_batch_tokens": 32, "evaluations": 2}
PPO = {
    "steps": 3, "rollout_batch_size": 8, "minibatch_size": 4, "micro_batch_tokens": 64,
    "ppo_epochs": 2, "evaluations": 1, "sampling": {"max_response_tokens": 6}, "actor": MODEL,
    "critic": MODEL,
}  # fmt: skip


GROUPS = {
    "advantage": "rloo", "critic": None, "responses_per_prompt": 2, "policy_loss": "cispo",
    "equal_groups": "resample", "maximum_resamples": 1, "curriculum": {"passes": 1},
}  # fmt: skip


class Training:
    """A recipe that can pause, and its runs in several workspaces."""

    def __init__(self, stage: str, config: dict, inputs: dict[str, Path], folder: Path) -> None:
        self.stage, self.inputs, self.folder = stage, inputs, folder
        self.config = config | {"checkpoint_every": 1}
        self.pause, self.driver = folder / "pause", folder / "driver.py"
        self.driver.write_text(DRIVER)
        self.environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}

    def command(self, workspace: str, launch: dict[str, int]) -> list[str]:
        """What starts a driver, as users start it."""
        inputs = {name: str(path) for name, path in self.inputs.items()}
        values = self.stage, self.config, inputs, str(self.folder / workspace), launch
        return [sys.executable, str(self.driver), *map(json.dumps, values)]

    def finish(self, workspace: str, **launch: int) -> Path:
        """Run to the end; return the work directory."""
        code, output = warm.output_of(self.command(workspace, launch), self.environment)
        assert code == 0, output
        return self.directory(workspace)

    def interrupt(self, workspace: str, after: int, end) -> Path:
        """End training that pauses after the checkpoint of a step; return the work directory."""
        self.pause.touch()
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        driver = subprocess.Popen(self.command(workspace, {}), env=self.environment, **output)
        checkpoint = f"{workspace}/{self.stage}/*/checkpoints/step-{after:08d}"
        wait_until(lambda: any(self.folder.glob(checkpoint)) or driver.poll() is not None)
        assert driver.poll() is None, driver.stdout.read()
        programs = descendants(driver.pid)
        ranks = [process for process in programs if "RANK" in process.info["environ"]]
        end(driver, os.getpgid(ranks[0].pid), self.pause)
        wait_until(lambda: not any(map(is_running, programs)))
        assert driver.wait() != 0
        self.pause.unlink(missing_ok=True)
        return self.directory(workspace)

    def directory(self, workspace: str) -> Path:
        (directory,) = (self.folder / workspace / self.stage).iterdir()
        return directory


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_group(driver, group, pause):
    os.killpg(group, signal.SIGKILL)


def kill_driver(driver, group, pause):
    driver.kill()


def terminate_driver(driver, group, pause):
    """The ranks finish their step and save, so their pause ends when they have the signal."""
    driver.terminate()
    for line in driver.stdout:
        if "the ranks finish their step and write a checkpoint" in line:
            break
    ranks = psutil.Process(group).children()  # of DeepSpeed's launcher
    wait_until(lambda: not any(has_pending_sigterm(rank.pid) for rank in ranks))
    pause.unlink()


def has_pending_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(params=[{}])
def ppo(ppo_inputs, tmp_path, request):
    """PPO that pauses in its second step."""
    reward, pause = tmp_path / "reward.py", tmp_path / "pause"
    rounds = 2 if request.param else 1
    reward.write_text(PAUSING_REWARD.format(pause=str(pause), rounds=rounds))
    config = PPO | request.param | {"rewards": [f"{reward}:reward"]}
    return Training("ppo", config, ppo_inputs | {"rewards.0": reward}, tmp_path)


@pytest.fixture
def make_sft(sft_inputs, tmp_path):
    """Makes SFT of eight steps that pauses before it writes the checkpoint of a step."""

    def make(step: int) -> Training:
        pause_before_checkpoint(step, tmp_path, tmp_path / "pause")
        model = as_artifact(sft_inputs["base_model"])
        return Training("sft", SFT, sft_inputs | {"base_model": model}, tmp_path)

    return make


def resumed_from(directory: Path) -> int:
    return json.loads((directory / "job.json").read_text())["resume_from"]


def require_equal(directory: Path, uninterrupted: Path) -> None:
    """The same recipe, weights, metrics and files, bit for bit."""
    assert directory.name == uninterrupted.name
    assert content_digest(directory / "export") == content_digest(uninterrupted / "export")
    assert logged(directory) == logged(uninterrupted)
    works = directory, uninterrupted
    found, expected = (read_json_lines(work / "metrics.jsonl") for work in works)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    answers = answers_in(found)
    assert answers == answers_in(expected)
    assert len(answers) == (3 if "ppo" in directory.parts else 0)
    assert not any((work / "checkpoints").exists() for work in works)  # what is finished stays


@pytest.mark.slow
@pytest.mark.parametrize(
    "ppo",
    [
        pytest.param({}, id="gae"),
        # `tests/strict/test_programs.py` resumes resampled groups in the same processes.
        pytest.param(GROUPS, id="resampled groups", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_resumed_ppo_equals_uninterrupted_ppo_after_its_driver_was_killed(ppo):
    directory = ppo.interrupt("interrupted", 1, kill_driver)
    assert not (directory / "export" / "manifest.json").exists()
    assert ppo.finish("interrupted") == directory
    assert resumed_from(directory) == 1
    require_equal(directory, ppo.finish("uninterrupted"))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_ppo_resumes_from_the_midst_of_an_episode(ppo_inputs, tmp_path, zero_stage):
    """At stage 3 each layer is gathered at each token, although the ranks have other episodes."""
    world, inside, pause = (tmp_path / name for name in ("world.py", "inside", "pause"))
    places = {"pause": f"Path({str(pause)!r})", "folder": f"Path({str(tmp_path)!r})"}
    world.write_text(PAUSING_WORLD.format(**places, inside=str(inside)))
    shutil.copy(Path(__file__).parents[1] / "ends.py", tmp_path)
    config = PPO | {
        "environment": f"{world}:World", "generator": "ends:Ends", "max_turn_tokens": 5,
        "max_prompt_tokens": 40, "sampling": {"max_response_tokens": 60}, "max_turns": 4,
        "rewards": [{"environment": "reward"}], "maximum_logprob_gap": None,
        "sampler_correction": None, "gather_for_generation": zero_stage == 1,
    }  # fmt: skip
    own = MODEL | {"deepspeed": {"zero_stage": zero_stage}}
    config |= {"actor": own, "critic": own}
    training = Training("ppo", config, ppo_inputs | {"code.environment": world}, tmp_path)

    def kill_within(driver, group, pause):
        wait_until(inside.exists)
        os.killpg(group, signal.SIGKILL)

    directory = training.interrupt("interrupted", 1, kill_within)
    assert training.finish("interrupted") == directory
    assert resumed_from(directory) == 1
    require_equal(directory, training.finish("uninterrupted"))
    turns = [line["rollout/turns"] for line in logged(directory)]
    assert all(2 <= found <= 3 for found in turns) and len({*turns}) > 1


@pytest.mark.long
def test_ppo_obeys_sigterm_after_the_step_in_whose_rollout_it_came(ppo):
    directory = ppo.interrupt("interrupted", 1, terminate_driver)
    saved = [path.name for path in list_checkpoints(directory / "checkpoints")]
    assert saved == ["step-00000001", "step-00000002"]
    assert len(logged(directory)) == 2
    ppo.finish("interrupted")
    assert resumed_from(directory) == 2


@pytest.mark.long
@pytest.mark.parametrize(("end", "after"), [(kill_group, 3), (terminate_driver, 2)])
def test_resumed_sft_equals_uninterrupted_sft(make_sft, end, after):
    sft = make_sft(after + 1)
    directory = sft.interrupt("interrupted", after, end)
    assert not (directory / "export" / "manifest.json").exists()
    assert sft.finish("interrupted") == directory
    latest = after if end is kill_group else after + 2  # SIGTERM lets the ranks finish a step
    assert after <= resumed_from(directory) <= latest
    require_equal(directory, sft.finish("uninterrupted"))


@pytest.mark.long
def test_another_number_of_ranks_resumes(make_sft):
    """Two ranks are interrupted and one resumes, on the same rows: equal losses up to rounding.

    Adam amplifies the rounding.
    """
    sft = make_sft(3)
    sft.interrupt("interrupted", 2, terminate_driver)
    directory = sft.finish("interrupted", processes=1, continue_from=2)
    uninterrupted = sft.finish("uninterrupted")
    assert resumed_from(directory) >= 2
    assert Manifest.read(directory / "export").ranks == 1
    assert Manifest.read(uninterrupted / "export").ranks == 2
    for found, expected in zip(logged(directory), logged(uninterrupted), strict=True):
        assert found["sft/loss"] == pytest.approx(expected["sft/loss"], rel=1e-4)


def make_checkpoint(directory: Path, step: int) -> Path:
    checkpoint = checkpoint_path(directory, step)
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "rank0.safetensors").write_bytes(bytes(100))
    (checkpoint / "loop.json").write_text("{}")
    seal(checkpoint, file_entries(checkpoint))
    return checkpoint


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("actor/rank0.safetensors", bytes(50) + b"\x01" + bytes(49)),
        ("actor/rank0.safetensors", bytes(99)),
        ("loop.json", None),
        ("seal.json", None),
        ("seal.json", b"[1, 2"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_an_earlier_one_used(tmp_path, caplog, file, content):
    make_checkpoint(tmp_path, 2)
    newest = make_checkpoint(tmp_path, 10)
    assert newest_valid_step(tmp_path) == 10
    (newest / file).unlink()
    if content is not None:
        (newest / file).write_bytes(content)
    assert newest_valid_step(tmp_path) == 2
    assert str(newest) in caplog.text and "skipping a damaged checkpoint" in caplog.text


def test_a_partial_checkpoint_is_ignored(tmp_path):
    make_checkpoint(tmp_path, 4).rename(tmp_path / "step-00000004.partial")
    assert newest_valid_step(tmp_path) is None and list_checkpoints(tmp_path) == []


def test_resuming_removes_later_lines_and_half_a_line_of_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 2')
    truncate_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_two_checkpoints_are_kept_and_a_full_disk_fails_before_writing(
    world, tmp_path, monkeypatch
):
    checkpoints = Checkpoints(tmp_path, world, {}, keep=2)
    for step in (1, 2, 3):
        checkpoints.step_ended(step, due=True, loop={"kl_coef": 0.5})
    checkpoints.step_ended(4, due=False, loop={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert checkpoints.restore(3) == {"kl_coef": 0.5} and checkpoints.restore(None) == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=-1))
    with pytest.raises(StageError, match=r"the checkpoint of step 5 needs 0 MiB, .* MiB free"):
        checkpoints.save(5, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("at_first", [False, True])
def test_products_of_a_resumed_training_are_those_of_its_beginning(world, tmp_path, at_first):
    checkpoints = Checkpoints(tmp_path, world, {}, keep=1)
    use_onednn(at_first)
    checkpoints.save(1, {})
    use_onednn(not at_first)  # what another processor prefers
    checkpoints.restore(1)
    assert uses_onednn() == at_first


def test_a_later_checkpoint_that_is_damaged_does_not_displace_a_new_one(world, tmp_path):
    make_checkpoint(tmp_path, 900)
    (make_checkpoint(tmp_path, 1000) / "loop.json").unlink()
    checkpoints = Checkpoints(tmp_path, world, {}, keep=1)
    checkpoints.save(950, {})
    assert newest_valid_step(tmp_path) == 950
    checkpoints.save(1000, {})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00001000"]
    assert newest_valid_step(tmp_path) == 1000


def test_sigterm_ends_no_rank_before_a_checkpoint_is_sealed(world, tmp_path, monkeypatch):
    """DeepSpeed's launcher kills the other ranks 30 seconds after the first one has ended."""
    sealed_at_barrier = []
    checkpoints = Checkpoints(tmp_path, world, {}, keep=2)
    monkeypatch.setattr(
        World, "barrier", lambda self: sealed_at_barrier.append(newest_valid_step(tmp_path))
    )
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"after step 7\. Run the same command again"):
        checkpoints.step_ended(7, due=False, loop={})
    assert sealed_at_barrier[-1] == newest_valid_step(tmp_path) == 7


def test_the_seal_of_a_checkpoint_is_progress(tmp_path):
    heartbeat.begin_phase("saving", 2)
    make_checkpoint(tmp_path, 2)
    assert heartbeat._here.pieces == 2  # files
