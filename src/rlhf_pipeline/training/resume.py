"""Saving all that training needs to go on, and going on from it; `stages.checkpoints` says what lies where."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from rlhf_pipeline.distributed.engine_state import bytes_needed, load_engine, save_engine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.checkpoint_files import checkpoint_path, list_checkpoints, seal
from rlhf_pipeline.runtime.disk_space import require_space


class Checkpoints:
    """Saves and restores one training program; remembers a signal to end until the step is over."""

    def __init__(
        self,
        directory: Path,
        world: World,
        engines: Mapping[str, DeepSpeedEngine],
        averages: Mapping[str, list[torch.Tensor]] | None = None,
        *,
        keep: int,
    ) -> None:
        """Start to watch for SIGTERM.

        Args:
            directory: where checkpoints lie, shared by all ranks.
            world: the ranks.
            engines: who trains, by name.
            averages: averages of their weights, see `save_engine`.
            keep: how many checkpoints stand at once.
        """
        self._directory = directory
        self._world = world
        self._engines = dict(engines)
        self._averages = dict(averages or {})
        self._keep = keep
        self._asked_to_end = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def restore(self, step: int | None) -> dict[str, Any]:
        """Load the checkpoint of a step; return its loop. Without a step, nothing is loaded, and the loop is empty."""
        if step is None:
            return {}
        checkpoint = checkpoint_path(self._directory, step)
        for name, engine in self._engines.items():
            load_engine(engine, checkpoint / name, average=self._averages.get(name))
        return dict(json.loads((checkpoint / "loop.json").read_text()))

    def step_ended(self, step: int, *, due: bool, loop: Mapping[str, Any]) -> None:
        """Save if it is time or a signal came; then obey the signal. All ranks call this together.

        Raises:
            Interrupted: a rank was asked to end.
            StageError: the disk has no room.
        """
        asked = self._world.any(self._asked_to_end)
        if due or asked:
            self.save(step, loop)
        if asked:
            raise Interrupted(
                f"ended by SIGTERM after step {step}; run the same command again to go on from there"
            )

    def save(self, step: int, loop: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all, and remove those that are too old."""
        heartbeat.at("saving", step)
        final = checkpoint_path(self._directory, step)
        partial = final.with_name(final.name + ".partial")
        if self._world.rank == 0:
            self._require_room(step)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name in self._engines:
                (partial / name).mkdir()
            (partial / "loop.json").write_text(json.dumps(loop))
        self._world.barrier()
        for name, engine in self._engines.items():
            save_engine(engine, partial / name, average=self._averages.get(name))
            heartbeat.tick()
        self._world.barrier()
        if self._world.rank == 0:
            seal(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in list_checkpoints(self._directory)[: -self._keep]:
                shutil.rmtree(old)

    def _require_room(self, step: int) -> None:
        needed = sum(
            bytes_needed(engine, self._averages.get(name))
            * (self._world.size if engine.zero_optimization_stage() else 1)
            for name, engine in self._engines.items()
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        what = f"the checkpoint of step {step}"
        require_space(self._directory, needed, what, ": it goes on from the checkpoint before")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True
