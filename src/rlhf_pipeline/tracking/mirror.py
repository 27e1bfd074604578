"""The MLflow runs of a pipeline run: one parent, and a child for each stage that is launched.

The work directories are the source of truth, MLflow is a copy of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.errors import Interrupted, as_typed, causes, without_secrets
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.stages.job import StageListener, StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import store
from rlhf_pipeline.tracking.child_run import DESCRIPTION_TAG, TAG_LENGTH, ChildRun, truncate
from rlhf_pipeline.verdict.answers import score_name
from rlhf_pipeline.verdict.words import titles, verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"
EVERY_S, RETRY_S = 10.0, 60.0
"""Seconds between attempts while a stage runs, and after a failure."""
PATIENCE_S = 5.0  # after a failure, an attempt that took longer leaves the rest to the next one


class MlflowTracker(StageListener):
    """Records stages in MLflow.

    Every record waits until `reconcile` has sent it. A store that fails costs one warning and never
    a stage: the next `reconcile` sends the rest, at the latest in the next pipeline run that runs
    or reuses the stage. That run also closes the runs of killed drivers.

    A recipe has one child run over all its attempts: an unfinished run of the same fingerprint is
    resumed. A reused stage is linked from the parent by the tag `rlhf.cached.<stage>`.
    """

    def __init__(self, uri: str, project: Path) -> None:
        self._uri, self._project = uri, project
        self.describe("pipeline", {})
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._stages: dict[str, ChildRun] = {}  # by fingerprint
        self._unsent: dict[tuple[str, str], Callable[[MlflowClient, str], None]] = {
            (PIPELINE, "begin"): self._begin
        }
        """What sends it, by its name in messages and what is unique in it."""
        self._failed, self._tried_at = False, 0.0

    def describe(
        self, run_name: str, tags: dict[str, str], params: dict[str, str] | None = None
    ) -> None:
        """Describe the parent run, which the first stage opens: no earlier failure leaves a run."""
        self._name, self._tags, self._params = run_name, tags, params or {}

    def catch_up(self) -> None:
        """Send what an outage held back."""
        if self._stages:
            self.reconcile()

    def end(self, status: Status, summary: str = "") -> None:
        """Close the parent run. `summary` is its description: the verdict, or why it failed."""
        if self._parent is None and not self._stages:
            return

        def close(client: MlflowClient, parent: str) -> None:
            if summary:
                client.set_tag(parent, DESCRIPTION_TAG, truncate(summary, TAG_LENGTH))
            client.set_terminated(parent, status)

        self._unsent = {(PIPELINE, "end"): close} | self._unsent
        self.reconcile()
        for stage in self._stages.values():
            # The next run sends a finished stage from disk, with the metrics that the store lacks.
            if stage.end and stage.end[0] != "FINISHED" and stage.run_id and not stage.closed:
                store.save_end(self._project, stage.run_id, stage.end[0])
        if self._parent is not None and (PIPELINE, "end") in self._unsent:
            store.save_end(self._project, self._parent, status)

    def stage_started(self, run: StageRun) -> None:
        """Open the child run of the stage; a reused one is linked when it ends."""
        stage = self._stages[run.fingerprint] = ChildRun(run)
        if not run.cached:
            self._send(run.stage, run.fingerprint, stage.reconcile)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """The next `reconcile` sends the new records from the work directory."""
        self._unsent[run.stage, run.fingerprint] = self._stages[run.fingerprint].reconcile

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        """Reconcile every few seconds."""
        if time.monotonic() - self._tried_at > (RETRY_S if self._failed else EVERY_S):
            self.reconcile()

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Log the result and the real status of the stage, after any records that are missing."""
        stage = self._stages[run.fingerprint]
        stage.run, stage.end = run, (status, metrics)
        self._send(run.stage, run.fingerprint, stage.reconcile)

    def log_page(self, fingerprint: str, page: str) -> None:
        """Log the page of an evaluation as an artifact of the evaluation's run."""

        def log(client: MlflowClient, parent: str) -> None:
            run_id = self._run_of(client, fingerprint)
            if run_id is not None:
                client.log_text(run_id, page, "evaluation.html")

        self._send("the page", fingerprint, log)

    def log_verdict(self, fingerprint: str, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation to its run and to the parent, as columns of MLflow's list: the verdict,
        the win rate by its judge, and the score of the reward model or else of that judge."""
        from mlflow.entities import Metric

        judge, candidate = evaluation["judge"], evaluation["candidate"]
        rate, scores = evaluation["win_rates"][judge], evaluation["policies"][candidate]
        score = scores.get(score_name(REWARD_MODEL), scores.get(score_name(judge)))
        columns = {"eval/win_rate": rate["rate"]}
        columns |= {} if score is None else {"eval/score": score}  # a judge of pairs has none
        words = verdict(judge, rate, titles(evaluation)[candidate])

        def log(client: MlflowClient, parent: str) -> None:
            for run_id in filter(None, (parent, self._run_of(client, fingerprint))):
                started = client.get_run(run_id).info.start_time  # a repeated point is one point
                points = [Metric(name, value, started, 0) for name, value in columns.items()]
                client.log_batch(run_id, metrics=points)
                client.set_tag(run_id, store.VERDICT_TAG, words)

        self._send("the verdict", fingerprint, log)

    def _run_of(self, client: MlflowClient, fingerprint: str) -> str | None:
        """The run of a recipe: that of this pipeline run, or the newest finished one."""
        stage = self._stages.get(fingerprint)
        return (stage and stage.run_id) or store.find_run(client, fingerprint)

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

    def _begin(self, client: MlflowClient, parent: str) -> None:
        """Log the parameters of this run, and close the runs of drivers that were killed."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH as LENGTH

        params = [Param(name, truncate(value, LENGTH)) for name, value in self._params.items()]
        client.log_batch(parent, params=params)
        store.close_orphans(client, self._project)

    def _send(self, what: str, of: str, send: Callable[[MlflowClient, str], None]) -> None:
        self._unsent[what, of] = send
        self.reconcile()

    def reconcile(self) -> None:
        """Send what is unsent, in order; what fails goes to the end of the line."""
        began = time.monotonic()
        with store.request_limits(after_failure=self._failed):
            fault = _fault(self._connect)
            faults = [] if fault is None else [(PIPELINE, fault)]
            for key, send in [*self._unsent.items()] if fault is None else []:
                if faults and time.monotonic() - began > PATIENCE_S:
                    break
                fault = _fault(partial(send, *self._connect()))
                del self._unsent[key]
                if fault is not None:
                    self._unsent[key] = send
                    faults.append((key[0], fault))
        if faults and not self._failed:
            what, fault = faults[0]
            self._warn(
                f"does not record {what} ({type(fault).__name__}: "
                f"{str(fault).partition(chr(10))[0]}); training continues, metrics.jsonl has every "
                "number, and missing records are sent when the store answers again, at the latest "
                "by the next `kedro run` of the same stages"
            )
        if self._failed and not faults:
            self._warn("records again")
        self._failed, self._tried_at = bool(faults), time.monotonic()

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
