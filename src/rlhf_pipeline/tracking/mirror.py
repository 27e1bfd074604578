"""The MLflow runs of a pipeline run: one parent, and a child for each stage that is launched.

The work directories are the source of truth, MLflow is a copy of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.errors import Interrupted, causes, without_secrets
from rlhf_pipeline.evaluation.comparison import score_name
from rlhf_pipeline.evaluation.report import titles, verdict
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.job import StageListener, StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import store
from rlhf_pipeline.tracking.child_run import (
    DESCRIPTION_TAG,
    TAG_LENGTH,
    ChildRun,
    log_result,
    truncate,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"
RETRY_S = 60.0  # between attempts to reach a failed store while a stage runs


class MlflowTracker(StageListener):
    """Records stages in MLflow.

    A store that fails costs one warning and never a stage. Missing records are sent from disk:
    after an outage as soon as the store answers again, or by the next pipeline run that runs or
    reuses the stage, which also closes orphaned runs.

    A recipe has one child run over all its attempts: an unfinished run of the same fingerprint is
    resumed. A reused stage is linked from the parent by the tag `rlhf.cached.<stage>`.
    """

    def __init__(self, uri: str, project: Path) -> None:
        self._uri, self._project = uri, project
        self.describe("pipeline", {})
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._stages: dict[str, ChildRun] = {}  # the launched ones, by fingerprint
        self._failed_at: float | None = None

    def describe(
        self, run_name: str, tags: dict[str, str], params: dict[str, str] | None = None
    ) -> None:
        """Describe the parent run, which the first stage opens: no earlier failure leaves a run."""
        self._name, self._tags, self._params = run_name, tags, params or {}

    def open(self) -> None:
        """Open the parent run if no stage has opened it."""
        with self._tolerate_failure(PIPELINE):
            self._connect()

    def end(self, status: Status, summary: str = "") -> None:
        """Close the parent run. `summary` is its description: the verdict, or why it failed."""
        self.catch_up()
        if self._parent is not None:
            with self._tolerate_failure(PIPELINE, self._parent, status):
                client, parent = self._connect()
                if summary:
                    client.set_tag(parent, DESCRIPTION_TAG, truncate(summary, TAG_LENGTH))
                client.set_terminated(parent, status)

    def catch_up(self) -> None:
        """Send the stages that ended during an outage."""
        for stage in [stage for stage in self._stages.values() if stage.end is not None]:
            with self._tolerate_failure(stage.run.stage, stage=stage):
                stage.reconcile(*self._connect())
            if self._failed_at is not None:
                return

    def stage_started(self, run: StageRun) -> None:
        """Open the child run of the stage, or link the run that trained a reused stage."""
        stage = ChildRun(run)
        if not run.cached:
            self._stages[run.fingerprint] = stage
        self.open()
        if self._parent is None:  # the store is silent; asking again would take as long
            return
        with self._tolerate_failure(run.stage, stage=stage):
            client, parent = self._connect()
            if run.cached:
                self._link(client, parent, stage)
            else:
                stage.reconcile(client, parent)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Log new records; during an outage, try again every `RETRY_S`."""
        stage = self._stages.setdefault(run.fingerprint, ChildRun(run))
        is_due = self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S
        if stage.is_open or is_due:
            with self._tolerate_failure(run.stage, stage=stage):
                stage.reconcile(*self._connect(), records)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Log the result and the real status of the stage, after any records that are missing."""
        if run.cached:
            return
        stage = self._stages.setdefault(run.fingerprint, ChildRun(run))
        stage.run, stage.end = run, (status, metrics)
        with self._tolerate_failure(run.stage, stage.run_id, status, stage):
            stage.reconcile(*self._connect())
            self._log_headline(run, metrics)

    def log_page(self, fingerprint: str, page: str) -> None:
        """Log the page of an evaluation as an artifact of the evaluation's run."""
        with self._tolerate_failure("the page"):
            client, _ = self._connect()
            run_id = store.find_run(client, fingerprint)
            if run_id is not None:
                client.log_text(run_id, page, "evaluation.html")

    def log_verdict(self, fingerprint: str, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation to its run and to the parent, as columns of MLflow's list: the verdict,
        the win rate by its judge, and the score of the reward model or else of that judge."""
        from mlflow.entities import Metric

        judge, candidate = evaluation["judge"], evaluation["candidate"]
        rate, scores = evaluation["win_rates"][judge], evaluation["policies"][candidate]
        score = scores.get(score_name(REWARD_MODEL), scores.get(score_name(judge)))
        columns = {"eval/win_rate": rate["rate"]}
        columns |= {} if score is None else {"eval/score": score}  # a judge of pairs has none
        with self._tolerate_failure("the verdict"):
            client, parent = self._connect()
            for run_id in filter(None, (parent, store.find_run(client, fingerprint))):
                started = client.get_run(run_id).info.start_time  # a repeated point is one point
                points = [Metric(name, value, started, 0) for name, value in columns.items()]
                client.log_batch(run_id, metrics=points)
                words = verdict(judge, rate, titles(evaluation)[candidate])
                client.set_tag(run_id, store.VERDICT_TAG, words)

    def _connect(self) -> tuple[MlflowClient, str]:
        """Return client and parent run, created at the first call that reaches the store."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH as LENGTH

        if self._client is None:
            self._client = store.connect(self._uri, self._project)
        if self._parent is None:
            experiment = store.experiment_id(self._client)
            tags = {key: truncate(value, TAG_LENGTH) for key, value in self._tags.items()}
            tags = {store.DRIVER_TAG: this_process(), **tags}
            opened = self._client.create_run(experiment, run_name=self._name, tags=tags)
            self._parent = opened.info.run_id
            params = [Param(name, truncate(value, LENGTH)) for name, value in self._params.items()]
            self._client.log_batch(self._parent, params=params)
            store.close_orphans(self._client, self._project, experiment)
        return self._client, self._parent

    def _log_headline(self, run: StageRun, metrics: dict[str, float]) -> None:
        """Log the metrics that the progress display shows to the parent run, too."""
        client, parent = self._connect()
        for name in filter(metrics.__contains__, run.headline_metrics):
            is_own = name.startswith(f"{run.stage}/")
            full = name if is_own else f"{run.stage}/{name.replace('/', '_')}"
            client.log_metric(parent, full, metrics[name])

    def _link(self, client: MlflowClient, parent: str, stage: ChildRun) -> None:
        """Link the run that trained a reused stage; send it from disk if the store lacks it."""
        run, trained = stage.run, store.find_run(client, stage.run.fingerprint)
        if trained is not None:
            client.set_tag(parent, f"rlhf.cached.{run.stage}", trained)
        metrics = Manifest.read(run.export).metrics
        if trained is not None:
            log_result(client, trained, run)
        else:
            stage.end = "FINISHED", metrics
            stage.reconcile(client, parent)
        self._log_headline(run, metrics)

    @contextmanager
    def _tolerate_failure(
        self,
        what: str,
        run_id: str | None = None,
        status: Status | None = None,
        stage: ChildRun | None = None,
    ) -> Iterator[None]:
        """Turn a failure of the store into one warning for each outage; save the `status` of a run
        that was to end in the block."""
        failed_before = self._failed_at is not None
        try:
            with store.request_limits(after_failure=failed_before):
                yield
            self._failed_at = None
        except Exception as error:  # drivers, HTTP clients and migrations have exceptions apart
            reasons = [*causes(error)]
            for cause in reasons:  # MLflow wraps a signal that arrives in a database call
                if isinstance(cause, Interrupted):
                    raise cause from None
            self._failed_at = time.monotonic()
            if stage is not None:
                stage.is_open = False
            if run_id is not None and status is not None:
                store.save_end(self._project, run_id, status, round(time.time() * 1000))
            if not failed_before:
                # "connection refused" says more than the exceptions around it
                root = f"{type(reasons[-1]).__name__}: {str(reasons[-1]).partition(chr(10))[0]}"
                self._warn(
                    f"does not record {what} ({root}); training continues, "
                    "metrics.jsonl has every number, and missing records are sent when the store "
                    "answers again, at the latest by the next `kedro run` of the same stages"
                )
        else:
            if failed_before:
                self._warn("records again")

    def _warn(self, text: str) -> None:
        logger.warning(without_secrets(f"MLflow at {self._uri} {text}"))
