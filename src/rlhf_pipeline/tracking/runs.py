"""One parent MLflow run for a pipeline run, and below it one child run for each stage that is launched."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.stages.events import StageRun, Status
from rlhf_pipeline.stages.manifest import Manifest
from rlhf_pipeline.tracking.lineage import log_data_read, log_result
from rlhf_pipeline.tracking.store import EXPERIMENT, FINGERPRINT_TAG, connect, experiment_id, find_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"


class MlflowTracker:
    """Records stages in MLflow; a `StageListener`.

    MLflow is a copy of what the work directories hold, never the other way round. So a store that fails costs one
    warning and never a stage, and whatever a run misses (the store was down, is new, or the crash came before the
    metrics were sent) is filled in from disk the next time the stage is met.

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
        self._warned: set[str] = set()

    def start(self, run_name: str, tags: dict[str, str]) -> None:
        """Open the parent run."""
        self._name, self._tags = run_name, tags
        with self._tolerant(PIPELINE):
            self._connected()

    def end(self, status: Status) -> None:
        """Close the parent run with the pipeline's true status."""
        if self._parent is not None:
            with self._tolerant(PIPELINE):
                client, parent = self._connected()
                client.set_terminated(parent, status)

    def stage_started(self, run: StageRun) -> None:
        """Open the stage's child run; of a stage found finished, link the run that trained it."""
        self._children.pop(run.stage, None)
        self._warned.discard(run.stage)
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
        """Log new lines of the metrics file; nothing once the store has failed in this stage."""
        child = self._children.get(run.stage)
        if child is not None:
            with self._tolerant(run.stage):
                child.log(records)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Log the stage's result and its true status. After an outage, catch up from disk first."""
        if run.cached:
            return
        with self._tolerant(run.stage):
            child = self._children.pop(run.stage, None) or self._open(run)
            child.finish(status, metrics)
            if status == "FINISHED":
                log_result(child.client, child.run_id, run)

    def _connected(self) -> tuple[MlflowClient, str]:
        """Client and parent run, made at first need: a store that was down at the start may be back a stage later."""
        if self._client is None:
            self._client = connect(self._uri, self._project)
        if self._parent is None:
            experiment = experiment_id(self._client, EXPERIMENT)
            self._parent = self._client.create_run(experiment, run_name=self._name, tags=self._tags).info.run_id
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
            opened = client.get_run(unfinished)
        _log_parameters(client, opened, run)
        log_data_read(client, opened.info.run_id, run)
        child = _Child(client, opened.info.run_id, logged=_last_step(client, opened))
        child.log(records)
        child.logged = max(child.logged, child.step)
        return child

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Let a failing store cost one warning about `what`, and nothing else."""
        try:
            yield
        except Exception as error:  # drivers, HTTP clients and migrations each raise their own kinds
            _raise_interruption(error)
            self._children.pop(what, None)
            if what not in self._warned:
                self._warned.add(what)
                reason = without_secrets(str(error).partition("\n")[0])
                logger.warning(
                    "MLflow at %s does not record %s (%s: %s); training goes on, and metrics.jsonl has every number",
                    without_secrets(self._uri),
                    what,
                    type(error).__name__,
                    reason,
                )


@dataclass
class _Child:
    """A stage's open MLflow run."""

    client: MlflowClient
    run_id: str
    logged: int
    """The last step that MLflow had when the run was opened: a resumed program reports some steps again."""
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
            if record["step"] > self.logged
            for name, value in record["metrics"].items()
        ]
        self.client.log_batch(self.run_id, metrics=metrics)  # split into requests by the client
        if records:
            self.step, self.time_ms = records[-1]["step"], _milliseconds(records[-1])

    def finish(self, status: Status, metrics: dict[str, float], *, end_time: int | None = None) -> None:
        """Log the result at the last record's step and time, where a repeated value is one point; close the run."""
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        time_ms = self.time_ms or get_current_time_millis()
        points = [Metric(name, float(value), time_ms, self.step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=points)
        self.client.set_terminated(self.run_id, status, end_time)


def parameters(config: dict[str, Any], seed: int) -> dict[str, str]:
    """A stage's resolved configuration as MLflow parameters: {"ppo": {"lr": 1e-6}} is {"ppo.lr": "1e-06"}.

    Values other than strings are spelled as JSON, as in job.json. Characters that MLflow refuses in a name, which a
    user's own keys may hold, become underscores.
    """
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH

    flat = {**_flatten(config), "seed": seed}
    return {
        re.sub(r"[^\w.\- /:]", "_", name)[:MAX_ENTITY_KEY_LENGTH]: (
            value if isinstance(value, str) else json.dumps(value)
        )[:MAX_PARAM_VAL_LENGTH]
        for name, value in flat.items()
    }


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def _log_parameters(client: MlflowClient, opened: Run, run: StageRun) -> None:
    """Log what the run lacks. MLflow refuses to change a parameter; operational ones may differ between attempts."""
    from mlflow.entities import Param

    wanted = parameters(run.config, run.seed)
    missing = [Param(name, value) for name, value in wanted.items() if name not in opened.data.params]
    client.log_batch(opened.info.run_id, params=missing)


def _tags(run: StageRun) -> dict[str, str]:
    return {
        "rlhf.stage": run.stage,
        FINGERPRINT_TAG: run.fingerprint,
        "rlhf.directory": str(run.directory),
        **{f"rlhf.input.{name}": digest for name, digest in run.inputs.items()},
    }


def _last_step(client: MlflowClient, opened: Run) -> int:
    histories = (client.get_metric_history(opened.info.run_id, name) for name in opened.data.metrics)
    return max((point.step for history in histories for point in history), default=0)


def _read_records(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a program that was killed may have left half of one at the end."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _milliseconds(record: dict[str, Any]) -> int:
    return round(record["time"] * 1000)


def _raise_interruption(error: BaseException | None) -> None:
    """A signal that arrives amid a database call comes wrapped in MLflow's exception: give the user's wish back."""
    while error is not None:
        if isinstance(error, Interrupted):
            raise error
        error = error.__cause__ or error.__context__
