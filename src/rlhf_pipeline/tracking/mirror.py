"""The MLflow runs of a pipeline run: one parent, and a child for each stage that is launched.

The work directories are the source of truth, MLflow is a copy of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import Interrupted, as_typed, causes, without_secrets
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.stages.job import StageListener, StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import store
from rlhf_pipeline.tracking.child_run import DESCRIPTION_TAG, TAG_LENGTH, ChildRun, truncate

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"
EVERY_S, RETRY_S = 10.0, 60.0
"""Seconds between attempts while a stage runs, and after a failure."""


class MlflowTracker(StageListener):
    """Reconciles work directories with their runs in MLflow: when a stage starts, every few
    seconds, and when it ends.

    A store that fails costs one warning and never a stage: the next `reconcile` sends what is
    missing, at the latest in the next pipeline run that runs or reuses the stage. That run also
    closes the runs of killed drivers.

    A recipe has one child run over all its attempts: an unfinished run of the same fingerprint is
    resumed. A reused stage is linked from the parent by the tag `rlhf.cached.<stage>`.
    """

    def __init__(self, uri: str, project: Path) -> None:
        self._uri, self._project = uri, project
        self.describe("pipeline", {})
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._end: tuple[Status, str] | None = None  # of the parent, and its description
        self._stages: dict[str, ChildRun] = {}  # by fingerprint
        self._unsent: dict[tuple[str, str], Callable[[MlflowClient, str], None]] = {
            (PIPELINE, ""): self._reconcile_parent
        }
        """What sends it, by its name in messages and its fingerprint."""
        self._failed, self._attempted_at = False, 0.0

    def describe(
        self, run_name: str, tags: dict[str, str], params: dict[str, str] | None = None
    ) -> None:
        """Describe the parent run, which the first stage opens: no earlier failure leaves a run."""
        self._name, self._tags, self._params = run_name, tags, params or {}

    def end(self, status: Status, summary: str = "") -> None:
        """Close the parent run. `summary` is its description: the verdict, or why it failed."""
        if self._parent is None and not self._stages:
            return
        self._end = status, summary
        self._unsent = {(PIPELINE, ""): self._reconcile_parent} | self._unsent
        self.reconcile()
        # The next run sends a finished stage from disk, with the metrics that the store lacks.
        for stage in self._stages.values():
            if stage.end and stage.end[0] != "FINISHED" and not stage.closed:
                store.save_end(self._project, stage.run_id, stage.end[0])
        if (PIPELINE, "") in self._unsent:
            store.save_end(self._project, self._parent, status)

    def stage_started(self, run: StageRun) -> None:
        """Open the child run of the stage; a reused one is linked when it ends."""
        self._stages[run.fingerprint] = ChildRun(run)
        if not run.cached:
            self._mark(run)
            self.reconcile()

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """The next `reconcile` sends the new records from the work directory."""
        self._mark(run)

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        """Reconcile every few seconds."""
        if time.monotonic() - self._attempted_at > (RETRY_S if self._failed else EVERY_S):
            self.reconcile()

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Send the result and the real status of the stage, after any records that are missing."""
        stage = self._stages[run.fingerprint]
        stage.run, stage.end = run, (status, metrics)
        self._mark(run)
        self.reconcile()

    def log_page(self, fingerprint: str, page: str) -> None:
        """Log the page of an evaluation as an artifact of the evaluation's run."""
        stage = self._stages.get(fingerprint)

        def log(client: MlflowClient, parent: str) -> None:
            if stage is not None:
                stage.reconcile(client, parent)  # which an outage may have held back
            run_id = stage.run_id if stage is not None else store.find_run(client, fingerprint)
            if run_id is not None:
                client.log_text(run_id, page, "evaluation.html")

        self._unsent["the page", fingerprint] = log
        self.reconcile()

    def reconcile(self) -> None:
        """Send to MLflow what it lacks, in order; what fails goes to the end of the line."""
        what = PIPELINE
        with store.request_limits(after_failure=self._failed):
            fault = _fault(self._connect)
            for key, send in [*self._unsent.items()] if fault is None else []:
                fault = _fault(partial(send, *self._connect()))
                del self._unsent[key]
                if fault is not None:
                    self._unsent[key] = send
                    what, _ = key
                    break
        if fault is not None and not self._failed:
            self._warn(
                f"does not record {what} ({type(fault).__name__}: "
                f"{str(fault).partition(chr(10))[0]}); training continues, metrics.jsonl has every "
                "number, and missing records are sent when the store answers again, at the latest "
                "by the next `kedro run` of the same stages"
            )
        if fault is None and self._failed:
            self._warn("answers again; missing records were sent")
        self._failed, self._attempted_at = fault is not None, time.monotonic()

    def _mark(self, run: StageRun) -> None:
        """Let the next `reconcile` send a stage."""
        self._unsent[run.stage, run.fingerprint] = self._stages[run.fingerprint].reconcile

    def _connect(self) -> tuple[MlflowClient, str]:
        """Return client and parent run, created at the first call that reaches the store."""
        if self._client is None:
            self._client = store.connect(self._uri, self._project)
        if self._parent is None:
            tags = {key: truncate(value, TAG_LENGTH) for key, value in self._tags.items()}
            tags = {store.DRIVER_TAG: this_process(), **tags}
            experiment = store.experiment_id(self._client)
            opened = self._client.create_run(experiment, run_name=self._name, tags=tags)
            self._parent = opened.info.run_id
        return self._client, self._parent

    def _reconcile_parent(self, client: MlflowClient, parent: str) -> None:
        """Send the parameters of this run and its end, and close the runs of killed drivers."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH as LENGTH

        params = [Param(name, truncate(value, LENGTH)) for name, value in self._params.items()]
        client.log_batch(parent, params=params)
        if self._end is None:
            store.close_orphans(client, self._project)
            return
        status, summary = self._end
        if summary:
            client.set_tag(parent, DESCRIPTION_TAG, truncate(summary, TAG_LENGTH))
        client.set_terminated(parent, status)

    def _warn(self, text: str) -> None:
        logger.warning(as_typed(without_secrets(f"MLflow at {self._uri} {text}")))


def _fault(send: Callable[[], object]) -> BaseException | None:
    """Why sending fails: "connection refused" says more than the exceptions around it."""
    try:
        send()
    except Exception as error:  # drivers, HTTP clients and migrations have exceptions apart
        reasons = [*causes(error)]
        for cause in reasons:  # MLflow wraps a signal that arrives in a database call
            if isinstance(cause, Interrupted):
                raise cause from None
        return reasons[-1]
    return None
