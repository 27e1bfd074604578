"""A full disk in every stage: a real file system in memory, filled up during a real `kedro run`.

Each time the message contains the stage, the full disk, its free space and the fix; finished
artifacts stay intact, and unfinished ones are not taken for finished. With space again, the same
command gives the same result as a run that was never interrupted.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from rank_fixtures import pause_before_checkpoint
from waiting import once

from rlhf_pipeline.runtime.manifest import content_digest, verify

MADE_BY = {
    "base_model": "02_base_model/base_model",
    "split": "03_split/split",
    "sft": "06_models/sft_model",
    "reward_model": "06_models/reward_model",
    "ppo": "06_models/ppo_model",
    "evaluate": "08_reporting/evaluation",
}
FIRST_CHECKPOINT = "07_workspace/*/*/checkpoints/step-00000001/seal.json"


class Small:
    """The project on a small disk, with the results of all stages before `stage`."""

    def __init__(self, project, disk, stage: str, params: str = "") -> None:
        self.stage, self.params = stage, params
        self.node = "base_model" if stage == "source" else stage
        self.done, self.disk = project, disk
        self.here = type(project)(disk.path)
        self.here.uri = f"sqlite:///{disk.path.parent}/mlflow.db"  # which is not full
        self.made = MADE_BY[self.node]
        self.earlier = list(MADE_BY.values())[: list(MADE_BY).index(self.node)]
        for path in self.earlier:
            version = disk.path / path / "2026-01-01T00.00.00.000Z"
            shutil.copytree(project.newest(path), version / Path(path).name)
        if stage in ("base_model", "split"):
            source = Path("07_workspace", "source")
            shutil.copytree(project.root / source, disk.path / source)

    def fails(self) -> str:
        """Run the stage until it fails; return the message."""
        output = self.here.kedro(f"--nodes={self.node}", params=self.params, check=False)
        message = output[re.search("^Error: ", output, re.MULTILINE).start() :]
        assert re.match(rf"Error: stage {self.stage}\b", message), output
        for pattern in (
            "No space left on device|MiB free",
            r"^  space    [\d.]+ of 8.0 MiB are free on the file system of ",
            "^  fix .*Free some space: check with `df -h`",
            "^  again ",
        ):
            assert re.search(pattern, message, re.MULTILINE), output
        for path in self.earlier:
            verify(self.here.newest(path))
        assert not list(self.disk.path.glob(f"{self.made}/*/*"))
        for manifest in self.disk.path.glob(f"07_workspace/{self.stage}/*/export/manifest.json"):
            verify(manifest.parent)
        return message

    def succeeds_with_space(self) -> None:
        self.disk.make_room()
        self.here.kedro(f"--nodes={self.node}", params=self.params)
        made, whole = self.here.newest(self.made), self.done.newest(self.made)
        verify(made)
        assert content_digest(made) == content_digest(whole)
        assert not list(self.disk.path.rglob("*.partial"))


@pytest.mark.slow
def test_while_a_result_is_published(project, disk):
    """The workspace is on another disk, so files are copied; the finished stage is reused."""
    small = Small(project, disk, "ppo")
    (disk.path / "07_workspace").symlink_to(project.root / "07_workspace")
    disk.leave(100 * 2**10)
    message = small.fails()
    assert "stage ppo is finished in " in message and "but not published as " in message
    assert shutil.disk_usage(disk.path).free >= 80 * 2**10  # the copy is removed
    small.succeeds_with_space()


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "kib", "message"),
    [
        ("source", 0, "No space"),
        ("source", 128, "No space"),
        ("base_model", 128, "SafetensorError"),
        ("split", 200, "No space"),
        ("sft", 24, "No space"),
        ("sft", 64, "rank0: "),
        ("sft", 128, r"the model for .*/best-0{7}\d needs 0.1 MiB, .* has 0.1 MiB free"),
        ("reward_model", 320, "(the checkpoint of step|the model for) .* MiB free"),
        ("ppo", 420, "(the checkpoint of step|the model for) .* MiB free"),
        ("evaluate", 64, "No space"),
    ],
)  # fmt: skip
def test_from_the_beginning(project, disk, stage, kib, message):
    small = Small(project, disk, stage)
    disk.leave(kib * 2**10)
    assert re.search(message, small.fails())
    small.succeeds_with_space()


@pytest.mark.long
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_after_the_first_checkpoint(project, disk, stage, tmp_path, monkeypatch):
    """No file can be written any more, not even a log; the stage resumes from the checkpoint."""
    small = Small(project, disk, stage, f"{stage}.checkpoint_every=1")
    pause = tmp_path / "pause"
    pause.touch()
    pause_before_checkpoint(2, tmp_path, pause)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def fill():
        try:
            if any(disk.path.glob(FIRST_CHECKPOINT)):
                disk.leave(0)
        finally:
            pause.unlink()

    with once(lambda: any(disk.path.glob(FIRST_CHECKPOINT)), fill):
        message = small.fails()
    assert "(this stage resumes after step 1)" in message
    small.succeeds_with_space()
    (log,) = disk.path.glob(f"07_workspace/{stage}/*/job.json")
    assert json.loads(log.read_text())["resume_from"] == 1
