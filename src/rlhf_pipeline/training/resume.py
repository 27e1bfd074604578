"""Saving what training needs to resume (`rlhf_pipeline.runtime.job`), and resuming from it."""

import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rlhf_pipeline.distributed.engine_state import bytes_needed, load_engine, save_engine
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import FileEntry
from rlhf_pipeline.runtime.files import put_in_place, require_space
from rlhf_pipeline.runtime.job import checkpoint_path, list_checkpoints, seal


@dataclass
class Checkpoints:
    """Saves and restores the state of one training program; obeys SIGTERM after a whole step."""

    directory: Path  # all ranks write the checkpoints there: machines share it
    world: World
    engines: Mapping[str, DeepSpeedEngine]  # by the model's name
    averages: Mapping[str, list[torch.Tensor]] = field(default_factory=dict)
    """Averages of their weights (`save_engine`), by the model's name."""
    keep: int = field(kw_only=True)  # number of checkpoints to keep

    def __post_init__(self) -> None:
        self._received_sigterm = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def restore(self, step: int | None) -> dict[str, Any]:
        """Load the checkpoint of a step; return the state of its training loop, {} without one."""
        if step is None:
            return {}
        checkpoint = checkpoint_path(self.directory, step)
        for name, engine in self.engines.items():
            load_engine(engine, checkpoint / name, average=self.averages.get(name))
        return dict(json.loads((checkpoint / "loop.json").read_text()))

    def step_ended(self, step: int, *, due: bool, loop: Mapping[str, Any]) -> bool:
        """Save a checkpoint if one is due or a rank received SIGTERM; obey SIGTERM after that.

        All ranks call this together, with the state of the training loop as JSON. Returns whether
        there is a checkpoint of this step. Raises Interrupted if a rank received SIGTERM, and
        StageError if the disk has too little space.
        """
        interrupted = self.world.any(self._received_sigterm)
        if due or interrupted:
            self.save(step, loop)
        if interrupted:
            # DeepSpeed's launcher kills the others 30 seconds after the first rank has ended, and
            # rank 0 may take longer to seal the checkpoint.
            self.world.barrier()
            raise Interrupted(
                f"ended by SIGTERM after step {step}. Run the same command again to resume"
            )
        return due

    def save(self, step: int, loop: Mapping[str, Any]) -> None:
        """Write a checkpoint, complete or not at all; remove the oldest ones beyond `keep`."""
        heartbeat.at("saving", step)
        final = checkpoint_path(self.directory, step)
        partial = final.with_name(final.name + ".partial")
        own: dict[str, FileEntry] = {}  # the files that this rank writes
        if self.world.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            needed = sum(
                bytes_needed(engine, self.averages.get(name))
                * (self.world.size if engine.zero_optimization_stage() else 1)
                for name, engine in self.engines.items()
            )
            require_space(self.directory, needed, f"the checkpoint of step {step}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name in self.engines:
                (partial / name).mkdir()
            (partial / "loop.json").write_text(json.dumps(loop))
            own["loop.json"] = FileEntry.of(partial / "loop.json")
        self.world.barrier()
        for name, engine in self.engines.items():
            files = save_engine(engine, partial / name, average=self.averages.get(name))
            own |= {f"{name}/{file}": entry for file, entry in files.items()}
        written = self.world.gather({name: asdict(entry) for name, entry in own.items()})
        if self.world.rank == 0:
            seal(partial, {name: FileEntry(**e) for files in written for name, e in files.items()})
            put_in_place(partial, final)
            # Later ones are damaged: training did not resume from them.
            saved = [path for path in list_checkpoints(self.directory) if path <= final]
            for old in saved[: -self.keep]:
                shutil.rmtree(old)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._received_sigterm = True
