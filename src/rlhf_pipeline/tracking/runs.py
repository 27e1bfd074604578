"""One parent MLflow run for a pipeline run, and below it one child run for each stage that is launched."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.events import StageRun, Status
from rlhf_pipeline.tracking.lineage import log_data_read, log_result
from rlhf_pipeline.tracking.orphans import DRIVER_TAG, driver_tag, end_orphans, note_end
from rlhf_pipeline.tracking.parameters import cut, log_parameters
from rlhf_pipeline.tracking.store import (
    EXPERIMENT,
    FINGERPRINT_TAG,
    connect,
    experiment_id,
    find_run,
    patience,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"
RETRY_S = 60.0
"""Seconds after which a store that has failed is tried again in the midst of a stage."""
TAG_LENGTH = 5000
"""Characters of a tag's value that every version of MLflow takes."""


class MlflowTracker:
    """Records stages in MLflow; a `StageListener`.

    MLflow is a copy of what the work directories hold, never the other way round. So a store that fails costs one
    warning and never a stage. Whatever a run misses is filled in from disk: after an outage as soon as the store answers
    again, and what this pipeline run could not send (or the store is new, or the crash came before the metrics were sent)
    by the next one that meets the stage. Runs that nobody ended are ended by the next pipeline run, see `orphans`.

    A recipe has one child run, whatever number of attempts it takes: an unfinished run of the same fingerprint is
    continued, and a stage found finished is linked from the parent by the tag `rlhf.cached.<stage>`.
    """

    def __init__(self, uri: str, project: Path) -> None:
        self._uri = uri
        self._project = project
        self._name = "pipeline"
        self._tags: dict[str, str] = {}
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._children: dict[str, _Child] = {}
        self._run_ids: dict[str, str] = {}
        self._unsent: dict[str, tuple[StageRun, Status, dict[str, float]]] = {}
        self._failed_at: float | None = None

    def start(self, run_name: str, tags: dict[str, str]) -> None:
        """Open the parent run."""
        self._name, self._tags = run_name, tags
        with self._tolerant(PIPELINE):
            self._connected()

    def end(self, status: Status) -> None:
        """Close the parent run with the pipeline's true status."""
        self.catch_up()
        if self._parent is not None:
            with self._tolerant(PIPELINE, self._parent, status):
                client, parent = self._connected()
                client.set_terminated(parent, status)

    def catch_up(self) -> None:
        """Send the stages that ended while the store was out of reach."""
        for run, status, metrics in list(self._unsent.values()):
            with self._tolerant(run.stage):
                self._close(run, status, metrics)
            if self._failed_at is not None:
                return

    def stage_started(self, run: StageRun) -> None:
        """Open the stage's child run; of a stage found finished, link the run that trained it."""
        self._children.pop(run.stage, None)
        with self._tolerant(run.stage):
            if not run.cached:
                self._children[run.stage] = self._open(run)
                return
            client, parent = self._connected()
            trained = find_run(client, run.fingerprint)
            if trained is None:
                child = self._open(run)
                child.finish("FINISHED", Manifest.read(run.export).metrics, end_time=child.time_ms)
                trained = child.run_id
            else:
                client.set_tag(parent, f"rlhf.cached.{run.stage}", trained)
            log_result(client, trained, run)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Log new lines of the metrics file; once the store has failed, try again every `RETRY_S`."""
        child = self._children.get(run.stage)
        if child is not None:
            with self._tolerant(run.stage):
                child.log(records)
        elif self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S:
            with self._tolerant(run.stage):
                self._children[run.stage] = self._open(run)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Log the stage's result and its true status. After an outage, catch up from disk first."""
        if run.cached:
            return
        self._unsent[run.fingerprint] = run, status, metrics
        with self._tolerant(run.stage, self._run_ids.get(run.fingerprint), status):
            self._close(run, status, metrics)

    def _close(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        child = self._children.pop(run.stage, None) or self._open(run)
        child.finish(status, metrics)
        if status == "FINISHED":
            log_result(child.client, child.run_id, run)
        del self._unsent[run.fingerprint]

    def _connected(self) -> tuple[MlflowClient, str]:
        """Client and parent run, made at first need: a store that was down at the start may be back a stage later."""
        if self._client is None:
            self._client = connect(self._uri, self._project)
        if self._parent is None:
            experiment = experiment_id(self._client, EXPERIMENT)
            tags = {DRIVER_TAG: driver_tag()} | {
                key: cut(value, TAG_LENGTH) for key, value in self._tags.items()
            }
            self._parent = self._client.create_run(
                experiment, run_name=self._name, tags=tags
            ).info.run_id
            end_orphans(self._client, self._project, experiment)
        return self._client, self._parent

    def _open(self, run: StageRun) -> _Child:
        """Continue the recipe's unfinished run, or create one; either way, bring it up to what the disk holds."""
        client, parent = self._connected()
        records = _read_records(run.metrics_file)
        unfinished = find_run(client, run.fingerprint, finished=False)
        if unfinished is None:
            began = _milliseconds(records[0]) if records else None
            experiment = experiment_id(client, EXPERIMENT)
            tags = {"mlflow.parentRunId": parent, **_tags(run)}
            opened = client.create_run(experiment, start_time=began, tags=tags, run_name=run.stage)
        else:
            client.update_run(unfinished, status="RUNNING")
            client.set_tag(unfinished, "mlflow.parentRunId", parent)
            client.set_tag(unfinished, DRIVER_TAG, driver_tag())
            opened = client.get_run(unfinished)
        self._run_ids[run.fingerprint] = opened.info.run_id
        log_parameters(client, opened, run)
        log_data_read(client, opened.info.run_id, run)
        child = _Child(client, opened.info.run_id, logged=_last_steps(client, opened))
        child.log(records)
        return child

    @contextmanager
    def _tolerant(
        self, what: str, run_id: str | None = None, status: Status | None = None
    ) -> Iterator[None]:
        """Let a failing store cost one warning an outage, and some seconds; remember the status that a run ends with."""
        down = self._failed_at is not None
        try:
            with patience(again=down):
                yield
            self._failed_at = None
        except (
            Exception
        ) as error:  # drivers, HTTP clients and migrations each raise their own kinds
            _raise_interruption(error)
            self._failed_at = time.monotonic()
            self._children.pop(what, None)
            if run_id is not None and status is not None:
                note_end(self._project, run_id, status, round(time.time() * 1000))
            if not down:
                self._warn(
                    f"does not record {what} ({_root(error)}); training goes on, metrics.jsonl has every number, and what is "
                    "missing is sent when it answers again, at the latest by the next `kedro run` of the same stages"
                )
        else:
            if down:
                self._warn("records again")

    def _warn(self, what: str) -> None:
        logger.warning(without_secrets(f"MLflow at {self._uri} {what}"))


@dataclass
class _Child:
    """A stage's open MLflow run."""

    client: MlflowClient
    run_id: str
    logged: dict[str, int]
    """The last step that MLflow has of each metric: a resumed program reports some steps again, and an outage may have come
    in the middle of a record."""
    step: int = 0
    """The newest record's step."""
    time_ms: int | None = None
    """The newest record's time, in milliseconds since 1970."""

    def log(self, records: list[dict[str, Any]]) -> None:
        """Send records with their own step and time, except those that MLflow has."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), _milliseconds(record), record["step"])
            for record in records
            for name, value in record["metrics"].items()
            if record["step"] > self.logged.get(name, 0)
        ]
        self.client.log_batch(self.run_id, metrics=metrics)  # split into requests by the client
        self.logged |= {metric.key: metric.step for metric in metrics}
        if records:
            self.step, self.time_ms = records[-1]["step"], _milliseconds(records[-1])

    def finish(
        self, status: Status, metrics: dict[str, float], *, end_time: int | None = None
    ) -> None:
        """Log the result at the last record's step and time, where a repeated value is one point; close the run.

        Training exports the best model, whose metrics are those of an earlier step: they go by names of their own."""
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        time_ms = self.time_ms or get_current_time_millis()
        prefix = "best/" if "step" in metrics else ""
        points = [
            Metric(prefix + name, float(value), time_ms, self.step)
            for name, value in metrics.items()
        ]
        self.client.log_batch(self.run_id, metrics=points)
        self.client.set_terminated(self.run_id, status, end_time)


def _tags(run: StageRun) -> dict[str, str]:
    return {
        "rlhf.stage": run.stage,
        DRIVER_TAG: driver_tag(),
        FINGERPRINT_TAG: run.fingerprint,
        "rlhf.directory": str(run.directory),
        **{f"rlhf.input.{name}": digest for name, digest in run.inputs.items()},
    }


def _last_steps(client: MlflowClient, opened: Run) -> dict[str, int]:
    histories = {
        name: client.get_metric_history(opened.info.run_id, name) for name in opened.data.metrics
    }
    return {name: max(point.step for point in history) for name, history in histories.items()}


def _read_records(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a program that was killed may have left half of one at the end."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _milliseconds(record: dict[str, Any]) -> int:
    return round(record["time"] * 1000)


def _raise_interruption(error: Exception) -> None:
    """A signal that arrives amid a database call comes wrapped in MLflow's exception: give the user's wish back."""
    for cause in _causes(error):
        if isinstance(cause, Interrupted):
            raise cause


def _root(error: Exception) -> str:
    """What began it, in a line: "connection refused" says more than what libraries make of it."""
    *_, root = _causes(error)
    return f"{type(root).__name__}: {str(root).partition(chr(10))[0]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
