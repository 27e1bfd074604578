"""The training loop of SFT, reward model, DPO and KTO."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from rlhf_pipeline.config.training import SupervisedConfig, evaluation_steps
from rlhf_pipeline.distributed.batches import Rows, load_rows, micro_batches, own_share, step_rows
from rlhf_pipeline.distributed.engine import store_settings, train_engine
from rlhf_pipeline.distributed.optimizer_step import Loss, Sums, add_sums, grad_norm, optimizer_step
from rlhf_pipeline.distributed.weights import require_learned
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.training.checkpoints import BestModels, Checkpoints
from rlhf_pipeline.training.step_log import (
    DivergenceGuard,
    StepLog,
    stability_advice,
)

BLOCK = 1024  # held-out rows of a rank that are in memory together


@dataclass(frozen=True)
class Batch:
    """Rows of answers: one each, or two to compare; single ones may have a label."""

    answers: Sequences  # those of row i are at size * i, size * i + 1, ...
    size: int = 1  # answers of a row
    is_good: Tensor | None = None  # (N,) bool: the label

    def __len__(self) -> int:
        return len(self.answers) // self.size

    @property
    def lengths(self) -> Tensor:
        """(N, size, 2) tokens of prompt and response in the answers of each row."""
        return self.answers.lengths.view(-1, self.size, 2)

    def rows(self, index: Tensor) -> "Batch":
        places = self.size * index[:, None] + torch.arange(self.size)
        labels = None if self.is_good is None else self.is_good[index]
        return replace(self, answers=self.answers.rows(places.flatten()), is_good=labels)

    def to(self, device: torch.device) -> "Batch":
        labels = None if self.is_good is None else self.is_good.to(device, non_blocking=True)
        return replace(self, answers=self.answers.to(device), is_good=labels)


class Task(Protocol):
    """The differences between the supervised stages: each has a subclass."""

    @property
    def name(self) -> str:
        """Prefix of the training metrics."""

    def collate(self, rows: dict[str, list[Any]]) -> Batch:
        """Columns of a prepared table as a batch."""

    def weight(self, batch: Batch) -> Tensor:
        """The number of terms of the loss: by default, of rows."""
        return torch.tensor(len(batch), dtype=torch.float64)

    def at_step(self, setup: "Setup", table: Rows, rows: np.ndarray, /) -> "Task":
        """The task with what its loss has to know of all rows of a step or of an evaluation.

        All ranks call it together, before the micro batches; `rows` are those of all ranks.
        """
        return self

    def loss(self, model: nn.Module, batch: Batch, terms: Tensor, /) -> tuple[Tensor, Sums]:
        """Loss of a micro batch, and its contribution to the metrics as additive sums.

        The sum of the loss is divided by `terms`, those of the whole step on all ranks.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from sums over all micro batches and ranks; names without prefix."""


@dataclass(frozen=True)
class Setup:
    """What the steps and evaluations of a supervised stage work with."""

    engine: DeepSpeedEngine
    task: Task
    config: SupervisedConfig
    training: Rows
    validation: Rows
    world: World
    seed: int


def train(
    job: LaunchedJob,
    config: SupervisedConfig,
    task: Task,
    load: Callable[..., nn.Module],
    world: World,
    *,
    start: str,
    rows: str,
    read: Callable[[Path], Rows] = Rows.read,
) -> dict[str, float]:
    """Train the model on prepared rows; export the evaluated model with the lowest held-out loss.

    Args:
        load: loads the model from a folder, for example `load_policy`.
        start: the input that training starts from; its tokenizer is saved with each model.
        rows: the input with `train.arrow` and `validation.arrow`.

    Returns the metrics of the exported model's step. Raises Interrupted after a signal, with the
    checkpoint of the last step, and StageError if a metric of a step, its gradient norm included,
    is not finite, or if nothing was learned.
    """
    start_model, trust = job.inputs[start], job.trust_remote_code
    load = partial(load, start_model, trust_remote_code=trust)
    tokenizer = load_tokenizer(start_model, trust_remote_code=trust)
    training, validation = (
        load_rows(job.inputs[rows] / f"{part}.arrow", world, read)
        for part in ("train", "validation")
    )
    steps = optimizer_steps(config, training.num_rows)
    engine = train_engine(load, config, steps)
    store_settings({task.name: engine}, job)
    setup = Setup(engine, task, config, training, validation, world, job.seed)
    best = BestModels(job, world, tokenizer, config, load, keep=config.keep_best)
    reference: nn.Module | None = getattr(task, "reference", None)
    frozen, keep = {} if reference is None else {"reference": reference}, config.keep_last
    checkpoints = Checkpoints(job.checkpoints, world, {task.name: engine}, {}, frozen, keep=keep)
    if loop := checkpoints.restore(job.resume_from):
        best.restored(loop["best"])
    writer = MetricsFile(job.metrics_file, steps, rank=world.rank, resumed_from=job.resume_from)
    advice = stability_advice(f"{task.name}.", config)
    guard = DivergenceGuard(world, writer, best, lambda metric: advice)
    evaluated = evaluation_steps(steps, config.evaluations)
    done = job.resume_from or 0
    if config.evaluate_at_start and not done:
        log = StepLog(0, guard)
        log.add(as_validation(evaluate(setup)))
        log.write(due=True)
    for step in range(done + 1, steps + 1):
        heartbeat.begin_phase("update", step)
        log = StepLog(step, guard)
        log.add(train_step(setup, step, log))
        checkpoints.known.setdefault("loss", log.metrics[f"{task.name}/loss"])
        if step in evaluated:
            held_out = evaluate(setup)
            log.add(as_validation(held_out))
            best.offer(engine, step, -held_out["loss"], dict(log.metrics))
        log.write(due=step in evaluated or step % config.log_every == 0)
        due = config.checkpoint_due(step, last=steps, evaluated=step in evaluated)
        if checkpoints.step_ended(step, due=due, loop={"best": best.state()}):
            best.forget_the_rest()
    require_learned(engine, world, checkpoints.known, task.name)
    first = step_rows(training.num_rows, config.batch_size, 0, job.seed)
    again = evaluate(replace(setup, validation=Rows.of(pa.table(training.columns(first)))))
    losses = {"before": checkpoints.known["loss"], "after": again["loss"]}
    return best.finish() | {f"learned/loss_{when}": loss for when, loss in losses.items()}


def optimizer_steps(config: SupervisedConfig, rows: int) -> int:
    """Optimizer steps in `config.epochs` passes over the rows; at least one."""
    return max(1, int(config.epochs * rows) // config.batch_size)


def train_step(setup: Setup, step: int, log: StepLog | None = None) -> dict[str, float]:
    """Take one optimizer step on a global batch; return its metrics."""
    engine, task, config, world = setup.engine, setup.task, setup.config, setup.world
    rows = step_rows(setup.training.num_rows, config.batch_size, step - 1, setup.seed)
    setup = replace(setup, task=task.at_step(setup, setup.training, rows))
    batch = task.collate(setup.training.columns(own_share(rows, world)))
    if log is not None:
        log.saw(rows=batch.answers.response_ids)
    terms = world.sum(task.weight(batch))
    learning_rate = engine.get_lr()[0]
    sums = optimizer_step(engine, world, micro_batch_losses(setup, batch, terms))
    norm = grad_norm(engine)
    totals = world.sums(sums, equal={} if norm is None else {"grad_norm": norm})
    metrics = {f"{task.name}/{name}": value for name, value in task.metrics(totals).items()}
    metrics["optim/lr"] = learning_rate
    if norm is not None:
        metrics["optim/grad_norm"] = totals["grad_norm"]
    return metrics


def micro_batch_losses(setup: Setup, batch: Batch, terms: Tensor) -> list[Loss]:
    """The losses of a batch, one for each micro batch."""

    def loss(index: Tensor) -> tuple[Tensor, Sums]:
        return setup.task.loss(setup.engine, batch.rows(index).to(setup.world.device), terms)

    tokens = setup.config.micro_batch_tokens
    (groups,) = micro_batches([batch.lengths], tokens, setup.engine, setup.world)
    return [partial(loss, index) for index in groups]


@torch.no_grad()
def evaluate(setup: Setup) -> dict[str, float]:
    """Held-out metrics over all rows; the ranks divide the rows."""
    heartbeat.begin_phase("evaluation")
    setup.engine.eval()
    everything = np.arange(setup.validation.num_rows)
    setup = replace(setup, task=setup.task.at_step(setup, setup.validation, everything))
    sums: Sums = {}
    for loss, counts in held_out_losses(setup):
        found = loss()[1]
        sums = add_sums(sums, found) if counts else sums
        heartbeat.report_progress()
    setup.engine.train()
    return setup.task.metrics(setup.world.sums(sums))


def as_validation(held_out: dict[str, float]) -> dict[str, float]:
    """Held-out metrics under their names in `metrics.jsonl`."""
    return {f"validation/{name}": value for name, value in held_out.items()}


def held_out_losses(setup: Setup) -> Iterator[tuple[Loss, bool]]:
    """The losses of the held-out rows, one for each micro batch, and whether they count.

    ZeRO-3 needs all ranks in every forward pass. Therefore rows that do not fill all ranks come
    last: a rank without such a row computes another one, which does not count.
    """
    validation, world = setup.validation, setup.world
    rest = validation.num_rows % world.size
    even = validation.num_rows - rest
    own = own_share(np.arange(even), world)
    blocks = [(own[start : start + BLOCK], True) for start in range(0, len(own), BLOCK)]
    if rest:
        is_own = world.rank < rest
        blocks.append((np.array([even + world.rank if is_own else 0]), is_own))
    # The losses are not used, so what divides them does not matter.
    one = torch.ones((), device=world.device)
    for rows, counts in blocks:
        batch = setup.task.collate(validation.columns(rows))
        for loss in micro_batch_losses(setup, batch, one):
            yield loss, counts
