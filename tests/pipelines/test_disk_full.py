"""A disk that fills up, in every stage: a real one in memory, a real `kedro run`, and a filler that takes the room away.

What must hold each time: the failure says in the stage's words that the disk is full, how full it is and what to do; what was
finished stays whole and nothing half made reads as finished; with room again the same command ends as if nothing had happened.
"""

import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from rlhf_pipeline.runtime.manifest import content_digest, verify

MADE_BY = {
    "base_model": "02_base_model/base_model", "split": "03_prepared/prepared_data", "sft": "06_models/sft_model",
    "reward_model": "06_models/reward_model", "ppo": "06_models/ppo_model", "evaluate": "08_reporting/evaluation",
}  # fmt: skip
FIRST_CHECKPOINT = "07_workspace/*/*/checkpoints/step-00000001/seal.json"


class Small:
    """The project on a small disk as it is before a stage, and the command that runs the stage."""

    def __init__(self, project, disk, stage: str, params: str = "") -> None:
        self.stage, self.node, self.params = (
            stage,
            "base_model" if stage == "source" else stage,
            params,
        )
        self.done, self.disk = project, disk
        self.here = type(project)(disk.path)
        self.here.uri = (
            f"sqlite:///{disk.path.parent}/mlflow.db"  # a full store has tests of its own
        )
        self.made = MADE_BY[self.node]
        self.earlier = list(MADE_BY.values())[: list(MADE_BY).index(self.node)]
        for path in self.earlier:
            shutil.copytree(
                project.newest(path),
                disk.path / path / "2026-01-01T00.00.00.000Z" / Path(path).name,
            )
        if stage in ("base_model", "split"):
            shutil.copytree(
                project.root / "07_workspace" / "source", disk.path / "07_workspace" / "source"
            )

    def run(self, *, check: bool) -> str:
        return self.here.kedro(f"--nodes={self.node}", params=self.params, check=check)

    def fails(self) -> str:
        """Run it to its failure, which must be told; what was finished is unharmed."""
        output = self.run(check=False)
        told = output[output.index("\nError: ") :]
        assert re.match(rf"\nError: stage {self.stage}\b", told), output
        assert re.search("No space left on device|MiB left; make room", told), output
        assert re.search(
            r"^  room     [\d.]+ of 8.0 MiB are left on the file system of ", told, re.MULTILINE
        ), output
        assert re.search(r"^  try .*`df -h`", told, re.MULTILINE) and re.search(
            r"^  again ", told, re.MULTILINE
        ), output
        for path in self.earlier:
            verify(self.here.newest(path))
        assert not list(self.disk.path.glob(f"{self.made}/*/*"))
        for manifest in self.disk.path.glob(f"07_workspace/{self.stage}/*/export/manifest.json"):
            verify(manifest.parent)
        return told

    def ends_as_if_nothing_had_happened(self) -> None:
        self.disk.make_room()
        self.run(check=True)
        verify(self.here.newest(self.made))
        assert content_digest(self.here.newest(self.made)) == content_digest(
            self.done.newest(self.made)
        )
        assert not list(self.disk.path.rglob("*.partial"))


@pytest.mark.slow
def test_when_a_result_is_published(project, disk):
    """The workspace lies on another disk, so files are copied; the stage itself is found finished there."""
    small = Small(project, disk, "ppo")
    (disk.path / "07_workspace").symlink_to(project.root / "07_workspace")
    disk.leave(100 * 2**10)
    told = small.fails()
    assert "stage ppo is finished in " in told and "and not published as " in told
    assert shutil.disk_usage(disk.path).free >= 80 * 2**10  # what was copied is removed again
    small.ends_as_if_nothing_had_happened()


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "kib", "told"),
    [
        ("source", 0, "No space"),
        ("source", 128, "Error writing bytes to file"),
        ("base_model", 128, "SafetensorError"),
        ("split", 200, "No space"),
        ("sft", 24, "No space"),
        ("sft", 64, "rank0: "),
        (
            "sft",
            128,
            r"the model for .*/best-0{7}\d takes 0.1 MiB, and .* has 0.1 MiB left; make room",
        ),
        ("reward_model", 320, "(the checkpoint of step|the model for) .* MiB left; make room"),
        ("ppo", 420, "(the checkpoint of step|the model for) .* MiB left; make room"),
        ("evaluate", 64, "No space"),
    ],
)
def test_from_the_beginning(project, disk, stage, kib, told):
    small = Small(project, disk, stage)
    disk.leave(kib * 2**10)
    assert re.search(told, small.fails())
    small.ends_as_if_nothing_had_happened()


@pytest.mark.long
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_after_the_first_checkpoint(project, disk, stage):
    """Nothing at all can be written any more: no metrics, no log, no checkpoint. It goes on from the one that stands."""
    small = Small(project, disk, stage, f"{stage}.checkpoint_every=1")

    def fill():
        while not list(disk.path.glob(FIRST_CHECKPOINT)):
            time.sleep(0.001)
        disk.leave(0)

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    told = small.fails()
    filling.join()
    assert "(this stage goes on after step " in told
    small.ends_as_if_nothing_had_happened()
    (log,) = disk.path.glob(f"07_workspace/{stage}/*/job.json")
    assert re.search(r'"resume_from": [1-9]', log.read_text())
