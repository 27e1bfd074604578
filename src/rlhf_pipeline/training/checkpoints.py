"""What a training keeps in its work directory: checkpoints to resume from, and the best models.

`rlhf_pipeline.runtime.job` has the layout of a checkpoint.
"""

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine_state import bytes_needed, load_engine, save_engine
from rlhf_pipeline.distributed.model_files import save_adapter, save_model
from rlhf_pipeline.distributed.products import use_onednn, uses_onednn
from rlhf_pipeline.distributed.weights import check_frozen, trained_digest
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.errors import ArtifactError, Interrupted
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.loading import DTYPES
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import put_in_place, require_space
from rlhf_pipeline.runtime.job import LaunchedJob, checkpoint_path, list_checkpoints, seal
from rlhf_pipeline.runtime.manifest import FileEntry, copy_folder, folder_digest


@dataclass
class Checkpoints:
    """Saves and restores the state of one training program; obeys SIGTERM after a whole step."""

    directory: Path  # all ranks write the checkpoints there: machines share it
    world: World
    engines: Mapping[str, DeepSpeedEngine]  # by the model's name
    averages: Mapping[str, list[Tensor]] = field(default_factory=dict)
    """Averages of their weights (`save_engine`), by the model's name."""
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)  # no bit of them may change
    keep: int = field(kw_only=True)  # number of checkpoints to keep

    def __post_init__(self) -> None:
        self._received_sigterm, self._frozen = False, dict[str, int]()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_received_sigterm", True))
        check_frozen({**self.engines, **self.frozen}, self.world, self._frozen)
        digests = {name: trained_digest(each, self.world) for name, each in self.engines.items()}
        self.known: dict[str, Any] = digests  # of start and steps, see `require_learned`

    def restore(self, step: int | None) -> dict[str, Any]:
        """Load the checkpoint of a step; return the state of its training loop, {} without one."""
        if step is None:
            return {}
        checkpoint = checkpoint_path(self.directory, step)
        for name, engine in self.engines.items():
            load_engine(engine, checkpoint / name, average=self.averages.get(name))
        loop = dict(json.loads((checkpoint / "loop.json").read_text()))
        self.known = loop.pop("known")
        use_onednn(loop.pop("onednn"))  # the rest is computed as the beginning was, bit for bit
        return loop

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
        heartbeat.begin_phase("saving", step)
        check_frozen({**self.engines, **self.frozen}, self.world, self._frozen)
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
            own_part = {"known": self.known, "onednn": uses_onednn()}
            (partial / "loop.json").write_text(json.dumps({**loop, **own_part}))
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


@dataclass
class EvaluatedModel:
    """A model that was evaluated."""

    step: int
    selection_score: float  # higher is better
    metrics: dict[str, float]  # the metrics of its step
    digest: str = ""  # of the saved folder, known to the first rank


@dataclass
class BestModels:
    """Keeps the best models so far in the work directory and exports the best one.

    The folder of a model is named after its step: `checkpoints/best-00000012`. With LoRA, the
    folders contain adapters, and the export contains a whole model, merged in fp32.
    """

    job: LaunchedJob
    world: World
    tokenizer: PreTrainedTokenizerBase
    config: TrainedModelConfig
    load: Callable[..., nn.Module]  # reads the weights that training started from
    variant: str = ""  # another model of the same stage: a subfolder of checkpoints and export
    keep: int = 1

    def __post_init__(self) -> None:
        self._directory = self.job.checkpoints / self.variant
        self.export = self.job.export / self.variant
        self._ranking: list[EvaluatedModel] = []

    @property
    def best(self) -> EvaluatedModel | None:
        return self._ranking[0] if self._ranking else None

    def offer(
        self, model: nn.Module, step: int, selection_score: float, metrics: dict[str, float]
    ) -> None:
        """Save the model if it is among the best; of two equal scores, the earlier one is better.

        All ranks call this together, with the same score.
        """
        offered = EvaluatedModel(step, selection_score, metrics)
        ranking = [*self._ranking, offered]
        ranking = sorted(ranking, key=lambda each: -each.selection_score)[: self.keep]
        if offered in ranking:
            folder = self._folder(offered)
            self._save(model, folder)
            if self.world.rank == 0:
                offered.digest = folder_digest(folder)
            self._ranking = ranking

    def forget_the_rest(self) -> None:
        """Remove the models that better ones have replaced.

        Call this only after a checkpoint that contains the new ranking, or after the end: training
        that resumes from an earlier checkpoint still needs the earlier models.
        """
        if self.world.rank == 0:
            kept = set(map(self._folder, self._ranking))
            for folder in set(self._directory.glob("best-*")) - kept:
                shutil.rmtree(folder)

    def state(self) -> list[dict[str, Any]]:
        """The ranking as JSON, for `restored`; the models themselves stay in the work directory."""
        return [asdict(model) for model in self._ranking]

    def restored(self, state: list[dict[str, Any]]) -> None:
        self._ranking = [EvaluatedModel(**model) for model in state]

    @property
    def kept(self) -> str:
        """A sentence on which model remains if training fails now."""
        if self.best is None:
            return "No model was evaluated, so none is kept."
        folder = self._folder(self.best).resolve()
        return f"The best model, of step {self.best.step}, is kept in {folder}."

    def finish(self) -> dict[str, float]:
        """Export the best model; return its step and metrics.

        All ranks call this together, after an offer. Raises ArtifactError if the saved best model
        has changed, for example after an interruption.
        """
        assert self.best is not None, "no model was offered"
        if self.world.rank == 0:
            self._export(self.best)
        self.forget_the_rest()
        self.world.barrier()
        return {"step": self.best.step} | self.best.metrics

    def _folder(self, model: EvaluatedModel) -> Path:
        return self._directory / f"best-{model.step:08d}"

    def _save(self, model: nn.Module, folder: Path) -> None:
        heartbeat.begin_phase("saving")
        if self.config.lora is None:
            save_model(model, self.tokenizer, folder)
        else:
            # The input that the model was loaded from: unlike a path, its name holds anywhere.
            path = Path(network_of(model).name_or_path)
            base = next(key for key, source in self.job.inputs.items() if source == path)
            save_adapter(model, base, folder)

    def _export(self, best: EvaluatedModel) -> None:
        folder, lora = self._folder(best), self.config.lora
        found = copy_folder(folder, self.export) if lora is None else folder_digest(folder)
        if found != best.digest:
            shutil.rmtree(self.export, ignore_errors=True)
            raise ArtifactError(
                f"{folder}: the best model has changed since step {best.step}. Fix: "
                f"remove {folder.parent} and run the same command again; the stage starts anew"
            )
        if lora is not None:
            from rlhf_pipeline.models.lora import merged

            # Loaded again: in the engine, the base may be in bf16, and here only a shard of it.
            model = merged(self.load("fp32"), lora, folder)
            model = model.to(DTYPES[self.config.deepspeed.precision])
            save_model(model, self.tokenizer, self.export)
            if not lora.train_rest:
                shutil.copytree(folder, self.export / "adapter")
