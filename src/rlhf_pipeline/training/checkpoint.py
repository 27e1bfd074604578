"""Saving a model in the Hugging Face format, and keeping the best and the last of a stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import torch
from deepspeed import DeepSpeedEngine
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.models.token_contract import TokenContract
from rlhf_pipeline.stages.job import LaunchedJob
from rlhf_pipeline.training.engine import World
from rlhf_pipeline.training.sharding import whole_state_dict


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write safetensors, configuration, tokenizer, chat template and token contract, whole or not at all.

    All ranks call this together, the first one writes. `model` may be an engine.
    """
    module = model.module if isinstance(model, DeepSpeedEngine) else model
    saved = module.classifier if isinstance(module, TokenScores) else cast(PreTrainedModel, module)
    weights = whole_state_dict(saved)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    saved.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    TokenContract.of(tokenizer).write(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


class BestCheckpoint:
    """Keeps the best model so far in the work directory; the best becomes the stage's export.

    A `variant` is another model of the same stage: it is kept in, and exported to, a folder of that name.
    """

    def __init__(
        self, job: LaunchedJob, world: World, tokenizer: PreTrainedTokenizerBase, *, variant: str = ""
    ) -> None:
        self._directory = job.directory / "checkpoints" / variant
        self.export = job.export / variant
        self._world = world
        self._tokenizer = tokenizer
        self.merit: float | None = None
        self.metrics: dict[str, float] = {}

    def offer(self, model: nn.Module, merit: float, metrics: dict[str, float]) -> None:
        """Save the model if its merit is higher than that of all before; `metrics` are remembered with it.

        All ranks call this together, with the same merit."""
        if self.merit is None or merit > self.merit:
            self.merit, self.metrics = merit, metrics
            self._save(model, "best")

    @property
    def kept(self) -> str:
        """What training leaves behind if it fails now, in words."""
        if self.merit is None:
            return "No checkpoint is left: none had been evaluated."
        return (
            f"The best checkpoint, of step {self.metrics['step']:g}, is left in {(self._directory / 'best').resolve()}."
        )

    def finish(self, last: nn.Module) -> None:
        """Save the last model beside the best, and export the best. All ranks call this together."""
        self._save(last, "last")
        if self._world.rank == 0:
            shutil.copytree(self._directory / "best", self.export, dirs_exist_ok=True)
        self._world.barrier()

    def _save(self, model: nn.Module, name: str) -> None:
        save_model(model, self._tokenizer, self._directory / name)
