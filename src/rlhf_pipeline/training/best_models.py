"""Saving a model in the Hugging Face format, and keeping the best and the last of a stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.training import LoRAConfig, TrainedModelConfig
from rlhf_pipeline.distributed.model_files import save_adapter, save_model, unwrapped
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import DTYPES
from rlhf_pipeline.models.lora import merged
from rlhf_pipeline.models.scalar_head import pretrained
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import folder_digest

_BEST = "best-"


@dataclass(frozen=True)
class Evaluated:
    """A model that was evaluated."""

    step: int
    merit: float
    """Higher is better."""
    metrics: dict[str, float]
    """Those of its step."""
    digest: str = ""
    """Of what was saved, known to the first rank: training may be interrupted before it is exported."""


class BestModels:
    """Keeps the best models so far in the work directory, as `best-00000012` by their steps; the best becomes the stage's
    export.

    A `variant` is another model of the same stage: it is kept in, and exported to, a folder of that name. With LoRA it is
    adapters that are kept, and a whole model that is exported: `load`'s weights with the best adapters added, in fp32.

    Args:
        job: says where.
        world: the ranks.
        tokenizer: goes with the model.
        config: block of the model.
        load: reads what the model was at its start, see `train_engine`.
        variant: folder.
        keep: how many stand at once.
    """

    def __init__(
        self,
        job: LaunchedJob,
        world: World,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainedModelConfig,
        load: Callable[..., nn.Module],
        *,
        variant: str = "",
        keep: int = 1,
    ) -> None:
        self._inputs = job.inputs
        self._directory = job.directory / "checkpoints" / variant
        self.export = job.export / variant
        self._world = world
        self._tokenizer = tokenizer
        self._config = config
        self._load = load
        self._keep = keep
        self._ranking: list[Evaluated] = []

    @property
    def best(self) -> Evaluated | None:
        """The best so far; None before the first offer."""
        return self._ranking[0] if self._ranking else None

    def offer(self, model: nn.Module, step: int, merit: float, metrics: dict[str, float]) -> None:
        """Save the model if it is among the best; of equals the earlier one is better.

        All ranks call this together, with the same merit."""
        offered = Evaluated(step, merit, metrics)
        ranking = sorted([*self._ranking, offered], key=lambda model: model.merit, reverse=True)[
            : self._keep
        ]
        if offered in ranking:
            folder = self._folder(offered)
            self._save(model, folder.name)
            saved = replace(offered, digest=folder_digest(folder) if self._world.rank == 0 else "")
            self._ranking = [saved if model == offered else model for model in ranking]

    def forget_the_rest(self) -> None:
        """Remove models that are no longer among the best.

        Not before a checkpoint to go on from has their successors: one that has not would miss them."""
        if self._world.rank == 0:
            kept = {self._folder(model) for model in self._ranking}
            for folder in set(self._directory.glob(f"{_BEST}*")) - kept:
                shutil.rmtree(folder)

    def state(self) -> list[dict[str, Any]]:
        """What `restored` takes, as JSON: the models themselves lie in the work directory."""
        return [asdict(model) for model in self._ranking]

    def restored(self, state: list[dict[str, Any]]) -> None:
        """Stand where `state` was taken."""
        self._ranking = [Evaluated(**model) for model in state]

    @property
    def kept(self) -> str:
        """What training leaves behind if it fails now, in words."""
        if self.best is None:
            return "No checkpoint is left: none had been evaluated."
        return f"The best checkpoint, of step {self.best.step}, is left in {self._folder(self.best).resolve()}."

    def finish(self, last: nn.Module) -> dict[str, float]:
        """Save the last model beside the best, and export the best; returns the step and the metrics of the best.

        All ranks call this together.

        Raises:
            ArtifactError: the best is not what was saved.
            ValueError: none was ever offered.
        """
        if self.best is None:
            raise ValueError("no model was offered")
        self._save(last, "last")
        if self._world.rank == 0:
            folder = self._folder(self.best)
            if folder_digest(folder) != self.best.digest:
                raise ArtifactError(
                    f"{folder} was changed after step {self.best.step}, the best; remove {folder.parent} and run the same "
                    "command again: the stage starts from its beginning"
                )
            if self._config.lora is None:
                shutil.copytree(folder, self.export, dirs_exist_ok=True)
            else:
                self._export_merged(self._config.lora, folder)
        self._world.barrier()
        return {"step": self.best.step} | self.best.metrics

    def _folder(self, model: Evaluated) -> Path:
        return self._directory / f"{_BEST}{model.step:08d}"

    def _save(self, model: nn.Module, name: str) -> None:
        heartbeat.at("saving")
        if self._config.lora is None:
            save_model(model, self._tokenizer, self._directory / name)
        else:
            save_adapter(model, self._base(model), self._directory / name)

    def _export_merged(self, lora: LoRAConfig, best: Path) -> None:
        """Not from the engine: in bf16, merging would round the base, and this rank need not have all of it."""
        model = merged(self._load("fp32"), lora, best).to(DTYPES[self._config.deepspeed.precision])
        save_model(model, self._tokenizer, self.export)
        if not lora.train_rest:
            shutil.copytree(best, self.export / "adapter")

    def _base(self, model: nn.Module) -> str:
        """Name of the input that the model was read from: unlike its path, it means the same on every machine."""
        path = Path(pretrained(unwrapped(model)).name_or_path)
        return next(name for name, source in self._inputs.items() if source == path)
