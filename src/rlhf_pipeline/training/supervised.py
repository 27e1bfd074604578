"""What SFT, reward modelling and DPO share: passes over a fixed data set, held-out evaluation, best checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.training import SupervisedConfig
from rlhf_pipeline.distributed.batches import columns, load_rows, own_share, step_rows
from rlhf_pipeline.distributed.deepspeed_config import store_settings
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.metrics_writer import MetricsWriter
from rlhf_pipeline.distributed.optimizer_step import fp16_metrics, grad_norm, optimizer_step
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.sequences import micro_batches
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.best_models import BestModels
from rlhf_pipeline.training.divergence import Watch, steadier
from rlhf_pipeline.training.resume import Checkpoints

Sums = dict[str, Tensor]


class Batch(Protocol):
    """Rows that are trained on together: `Demonstrations` or `Pairs`."""

    @property
    def lengths(self) -> Tensor:
        """(N,) tokens of each row."""

    def rows(self, index: Tensor) -> Self:
        """The chosen rows."""

    def to(self, device: torch.device) -> Self:
        """The same rows on another device."""


class Task(Protocol):
    """What distinguishes one supervised stage from another."""

    @property
    def name(self) -> str:
        """Prefix of the training metrics."""

    def collate(self, rows: dict[str, list[Any]]) -> Batch:
        """Columns of a prepared table as a batch."""

    def weight(self, batch: Any) -> Tensor:
        """What the loss of a batch is divided by, summed over all ranks: tokens or pairs."""

    def loss(self, model: nn.Module, batch: Any, normalizer: Tensor) -> tuple[Tensor, Sums]:
        """Loss of a micro batch, and its contribution to the metrics as additive sums."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from sums over all micro batches and ranks; names without prefix."""

    def merit(self, metrics: dict[str, float]) -> float:
        """How good a model with these held-out metrics is; higher is better."""


def train(
    job: LaunchedJob,
    config: SupervisedConfig,
    task: Task,
    load: Callable[..., nn.Module],
    world: World,
    *,
    rows: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float]:
    """Train the model on prepared rows, and export the evaluated checkpoint of the highest merit.

    Args:
        job: where metrics and checkpoints go, and the seed.
        config: the stage's parameters.
        task: what is learned.
        load: reads the model that training starts from, see `train_engine`.
        world: the ranks.
        rows: folder with `train.arrow` and `validation.arrow`.
        tokenizer: stored with each checkpoint.

    Returns:
        The metrics of the exported checkpoint's step.
    """
    training, validation = (
        load_rows(rows / "train.arrow", world),
        load_rows(rows / "validation.arrow", world),
    )
    steps = optimizer_steps(config, training.num_rows)
    engine = train_engine(load, config, steps)
    store_settings({task.name: engine.config}, job)
    best = BestModels(job, world, tokenizer, config, load, keep=config.keep_best)
    checkpoints = Checkpoints(job.checkpoints, world, {task.name: engine}, keep=config.keep_last)
    loop = checkpoints.restore(job.resume_from)
    if loop:
        best.restored(loop["best"])
    writer = MetricsWriter(job.metrics_file, world, steps, resumed_from=job.resume_from)
    fit(
        engine, task, config, training=training, validation=validation,
        world=world, seed=job.seed, writer=writer, best=best, checkpoints=checkpoints, done=job.resume_from or 0,
    )  # fmt: skip
    return best.finish(engine)


def optimizer_steps(config: SupervisedConfig, rows: int) -> int:
    """Optimizer steps in `config.epochs` passes over so many rows; at least one."""
    return max(1, int(config.epochs * rows) // config.batch_size)


def fit(
    engine: DeepSpeedEngine,
    task: Task,
    config: SupervisedConfig,
    *,
    training: pa.Table,
    validation: pa.Table,
    world: World,
    seed: int,
    writer: MetricsWriter,
    best: BestModels,
    checkpoints: Checkpoints,
    done: int = 0,
) -> None:
    """Train for the configured passes but the first `done` steps; evaluate on the way and offer each evaluated model to
    `best`.

    Raises:
        Interrupted: the program was asked to end, after a step and with a checkpoint of it.
        StageError: a metric of some step, its gradient norm included, is not finite.
    """
    watch = Watch(world, writer, best, lambda metric: steadier(f"{task.name}.", config))
    total = optimizer_steps(config, training.num_rows)
    evaluated = {round(total * (i + 1) / config.evaluations) for i in range(config.evaluations)}
    for step in range(done + 1, total + 1):
        heartbeat.at("update", step)
        start = time.monotonic()
        rows = own_share(step_rows(training.num_rows, config.batch_size, step - 1, seed), world)
        batch = task.collate(columns(training, rows))
        normalizer = world.sum(task.weight(batch)).to(world.device)
        learning_rate = engine.get_lr()[0]
        totals = train_step(engine, world, task, batch, normalizer, config.micro_batch_size_per_gpu)
        norm = grad_norm(engine)
        if norm is not None:  # equal on all ranks; it comes to the host with the sums
            totals["grad_norm"] = torch.as_tensor(norm, device=world.device) / world.size
        sums = world.sums(totals)
        metrics = {f"{task.name}/{name}": value for name, value in task.metrics(sums).items()}
        metrics |= {"optim/lr": learning_rate} | (
            {} if norm is None else {"optim/grad_norm": sums["grad_norm"]}
        )
        metrics |= {f"optim/{name}": value for name, value in fp16_metrics(engine).items()}
        watch.require_finite(step, metrics)
        if step in evaluated:
            held_out = evaluate(engine, task, validation, world, config.micro_batch_size_per_gpu)
            metrics |= {f"validation/{name}": value for name, value in held_out.items()}
            watch.require_finite(step, metrics)
            best.offer(engine, step, task.merit(held_out), metrics)
        if step in evaluated or step % config.log_every == 0:
            writer.write(step, metrics | {"time/step_s": time.monotonic() - start})
        due = step in evaluated or config.checkpoint_due(step)
        checkpoints.step_ended(step, due=due, loop={"best": best.state()})
        best.forget_the_rest()


def train_step(
    engine: DeepSpeedEngine,
    world: World,
    task: Task,
    batch: Batch,
    normalizer: Tensor,
    micro_batch_size: int,
) -> Sums:
    """One optimizer step on this rank's share of a global batch; return the sums of its metrics."""
    total: Sums = {}

    def loss(index: Tensor) -> Tensor:
        value, sums = task.loss(engine, batch.rows(index).to(world.device), normalizer)
        _add(total, sums)
        return value

    optimizer_step(
        engine,
        world,
        [partial(loss, index) for index in micro_batches(batch.lengths, micro_batch_size)],
    )
    return total


@torch.no_grad()
def evaluate(
    engine: DeepSpeedEngine, task: Task, rows: pa.Table, world: World, micro_batch_size: int
) -> dict[str, float]:
    """Held-out metrics over all rows, shared out among the ranks."""
    heartbeat.at("evaluation")
    engine.eval()
    batch = task.collate(columns(rows, own_share(np.arange(rows.num_rows), world)))
    total: Sums = {}
    normalizer = torch.ones((), device=world.device)  # the sums count; the loss itself is not used
    own = list(micro_batches(batch.lengths, micro_batch_size))
    most = math.ceil(
        math.ceil(rows.num_rows / world.size) / micro_batch_size
    )  # micro batches of the rank with most rows
    for number in range(most):
        # With one row fewer than others have, a rank may lack a micro batch. At ZeRO-3 they need it to take part in that
        # forward pass all the same, with any rows.
        sums = task.loss(engine, batch.rows(own[number % len(own)]).to(world.device), normalizer)[1]
        if number < len(own):
            _add(total, sums)
        heartbeat.tick()
    engine.train()
    return task.metrics(world.sums(total))


def _add(total: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        total[name] = total.get(name, 0) + value.detach().double()
