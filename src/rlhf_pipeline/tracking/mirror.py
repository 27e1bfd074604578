"""The MLflow runs of a pipeline run: one parent, and a child for each stage that is launched.

The work directories are the source of truth, MLflow is a copy of them.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.evaluate import CHAMPION, REWARD_MODEL
from rlhf_pipeline.errors import Interrupted, as_typed, causes, without_secrets
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import NAME
from rlhf_pipeline.runtime.metrics_file import answers_in, read_json_lines
from rlhf_pipeline.stages.job import StageListener, StageRun, Status, node_of
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import store
from rlhf_pipeline.verdict.comparison import EVALUATION, read_evaluation, score_name
from rlhf_pipeline.verdict.words import titles, verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

PIPELINE = "the pipeline run"
EVERY_S, RETRY_S = 10.0, 60.0
"""Seconds between attempts while a stage runs, and after a failure."""
PATIENCE_S = 5.0  # at the end, for what can still be sent once something has failed
DESCRIPTION_TAG = "mlflow.note.content"  # MLflow shows it as the description of a run
ANSWERS = "answers.json"  # table of a training's sampled answers
Records = Sequence[dict[str, Any]]  # of the metrics file
TAG_LENGTH = 5000  # characters of a tag's value that every version of MLflow accepts


class MlflowTracker(StageListener):
    """Reconciles work directories with their runs in MLflow: when a stage starts, every few
    seconds, and when it ends.

    A store that fails costs one warning and never a stage: the next `reconcile` sends what is
    missing, at the latest in the next pipeline run that runs or reuses the stage. That run also
    closes the runs of killed drivers.

    A recipe has one child run over all its attempts: an unfinished run of the same fingerprint is
    resumed. A reused stage is linked from the parent by the tag `rlhf.cached.<stage>`. The first
    stage opens the parent: no earlier failure leaves a run.
    """

    def __init__(
        self, uri: str, project: Path, name: str, tags: dict[str, str], params: dict[str, str]
    ) -> None:
        self._uri, self._project = uri, project
        self._name, self._tags, self._params = name, tags, params  # of the parent
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._end: tuple[Status, str] | None = None  # of the parent, and its description
        self._stages: dict[str, ChildRun] = {}  # by fingerprint
        self._unsent: dict[tuple[str, str], Callable[[MlflowClient, str], None]] = {
            (PIPELINE, ""): self._reconcile_parent
        }
        """What sends it, by its name in messages and its fingerprint."""
        self._failed, self._attempted_at = False, 0.0

    def end(self, status: Status, summary: str = "") -> None:
        """Close the parent run. `summary` is its description: the verdict, or why it failed."""
        if self._parent is None and not self._stages:
            return
        self._end = status, summary
        self._unsent = {(PIPELINE, ""): self._reconcile_parent} | self._unsent
        began = time.monotonic()
        for _ in range(len(self._unsent)):  # each `reconcile` ends at its first fault
            self.reconcile()
            if not self._unsent or time.monotonic() - began > PATIENCE_S:
                break
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


@dataclass
class ChildRun:
    """The MLflow run of a stage, a copy of its work directory."""

    run: StageRun
    end: tuple[Status, dict[str, float]] | None = None  # of the stage
    run_id: str | None = None
    closed: bool = False  # whether MLflow has the end
    _logged: dict[str, int] | None = None
    """The last step that MLflow has of each metric; None: unknown, as after a failure. A resumed
    program reports some steps again, and an outage can begin in the middle of a record."""
    _answers: Records = ()  # those that MLflow has

    def reconcile(self, client: MlflowClient, parent: str) -> None:
        """Send what the work directory has and MLflow lacks: artifacts last, because their store
        can be out of reach when the other one is not. A reused stage is linked with the run that
        trained it, if MLflow has one."""
        records = read_json_lines(self.run.metrics_file)
        if not self.closed:
            trained = self.run.cached and store.find_run(client, self.run.fingerprint)
            if trained:
                self.run_id = trained
                client.set_tag(parent, f"rlhf.cached.{self.run.stage}", trained)
                self._log_headline(client, parent, records)
            else:
                self._log_records(client, parent, records)
            self.closed = self.end is not None
        self._log_artifacts(client, str(self.run_id), answers_in(records))

    def _log_records(self, client: MlflowClient, parent: str, records: Records) -> None:
        """Log the metrics with their own step and time, and the end."""
        from mlflow.entities import Metric

        logged = self._open(client, parent, records) if self._logged is None else self._logged
        self._logged = None
        metrics = [
            Metric(name, float(value), _milliseconds(record), record["step"])
            for record in records
            for name, value in record["metrics"].items()
            if record["step"] > logged.get(name, 0)
        ]
        client.log_batch(self.run_id, metrics=metrics)  # the client splits it into requests
        if self.end is not None:
            self._finish(client, parent, records)
        else:
            self._logged = logged | {metric.key: metric.step for metric in metrics}

    def _open(self, client: MlflowClient, parent: str, records: Records) -> dict[str, int]:
        """Open the run of this stage again, which may be closed, or the unfinished one of the
        recipe, or create one, and log the parameters that it lacks: MLflow refuses to change one,
        and operational ones can differ between attempts. Returns the last step of each metric."""
        from mlflow.entities import Param

        run, own = self.run, {"mlflow.parentRunId": parent, store.DRIVER_TAG: this_process()}
        self.run_id = self.run_id or store.find_run(client, run.fingerprint, finished=False)
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            for name, value in own.items():
                client.set_tag(self.run_id, name, value)
            opened = client.get_run(self.run_id)
        else:
            opened = client.create_run(
                store.experiment_id(client),
                start_time=_milliseconds(records[0]) if records else None,
                run_name=f"{run.title} {run.fingerprint[:4]}",
                tags={
                    **own,
                    store.STAGE_TAG: run.stage,
                    store.FINGERPRINT_TAG: run.fingerprint,
                    "rlhf.directory": str(run.directory),
                    **mixture_tag(run.mixture),
                    **{f"rlhf.input.{name}": digest for name, digest in run.digests.items()},
                },
            )
        self.run_id = str(opened.info.run_id)
        known, wanted = opened.data.params, parameters(run.config, run.seed)
        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        client.log_batch(self.run_id, params=missing)
        # `data.metrics` has no steps, and a history has every point of months of training.
        return {latest.key: latest.step for latest in opened.data.to_proto().metrics}

    def _finish(self, client: MlflowClient, parent: str, records: Records) -> None:
        """Log the result at step and time of the last record, so a repeated value is one point.

        Training exports the best model, whose metrics are of an earlier step: the run's description
        lists them, and only step and headline become metrics, `exported/...`, of one point each.
        """
        assert self.end is not None and self.run_id is not None
        status, metrics = self.end
        result = metrics
        if "step" in metrics:
            shown = [name for name in ("step", *self.run.headline_metrics) if name in metrics]
            result = {f"exported/{name.replace('/', '_')}": metrics[name] for name in shown}
            rows = [f"| {name} | {x:.6g} |" for name, x in metrics.items() if name != "step"]
            title = f"The exported model, of step {metrics['step']:.0f}:"
            description = "\n".join([title, "", "| metric | value |", "|---|---|", *rows])
            client.set_tag(self.run_id, DESCRIPTION_TAG, description)
        self._log_result(client, self.run_id, result, records)
        if status == "FINISHED":
            self._log_headline(client, parent, records)
        # A reused stage ended when its last record was written.
        ended = _milliseconds(records[-1]) if self.run.cached and records else None
        client.set_terminated(self.run_id, status, ended)

    def _log_headline(self, client: MlflowClient, parent: str, records: Records) -> None:
        run, metrics = self.run, self.end[1] if self.end else {}
        own = f"{run.stage}/"
        headline = {
            name if name.startswith(own) else own + name.replace("/", "_"): metrics[name]
            for name in run.headline_metrics
            if name in metrics
        }
        self._log_result(client, parent, headline, records)

    def _log_result(
        self, client: MlflowClient, run_id: str, result: dict[str, float], records: Records
    ) -> None:
        """Log a result to a run, and the verdict of an evaluation with the columns of MLflow's
        list: the win rate by its judge, and the score of the reward model or else of that judge."""
        from mlflow.entities import Metric

        is_champions = self.run.stage == node_of("evaluate", CHAMPION)  # which the gate reads
        if (self.run.export / EVALUATION).is_file() and not is_champions:
            evaluation = read_evaluation(self.run.export, earlier=True)
            judge, candidate = evaluation["judge"], evaluation["candidate"]
            rate, scores = evaluation["win_rates"][judge], evaluation["policies"][candidate]
            score = scores.get(score_name(REWARD_MODEL), scores.get(score_name(judge)))
            result = result | {"eval/win_rate": rate["rate"]}
            result |= {} if score is None else {"eval/score": score}  # a judge of pairs has none
            words = verdict(judge, rate, titles(evaluation)[candidate])
            client.set_tag(run_id, store.VERDICT_TAG, words)
        manifest = self.run.export / NAME
        finished = manifest.stat().st_mtime if manifest.is_file() else time.time()
        last = records[-1] if records else {"step": 0, "time": finished}
        at = _milliseconds(last)
        points = [Metric(name, float(value), at, last["step"]) for name, value in result.items()]
        client.log_batch(run_id, metrics=points)

    def _log_artifacts(self, client: MlflowClient, run_id: str, answers: Records) -> None:
        """Log the report of a stage that finished, and the sampled answers, like MLflow's
        `log_table`, but anew each time: after a resume, the table has no step twice."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        known = {}  # what an earlier run has sent of a reused stage
        if self.run.cached:
            known = {file.path: file.file_size for file in client.list_artifacts(run_id)}
        if answers and answers != self._answers:
            rows = [[*answer.values()] for answer in answers]
            tables = json.dumps([{"path": ANSWERS, "type": "table"}])
            client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, tables)
            table = json.dumps({"columns": [*answers[0]], "data": rows})
            if known.get(ANSWERS) != len(table.encode()):
                client.log_text(run_id, table, ANSWERS)
            self._answers = answers
        report = self.run.export / "report.json"
        is_finished = self.end is not None and self.end[0] == "FINISHED" and report.is_file()
        if is_finished and known.get(report.name) != report.stat().st_size:
            client.log_artifact(run_id, str(report))


def mixture_tag(mixture: Mapping[str, list[str]]) -> dict[str, str]:
    """The tag of a run whose inputs were made with other parameters; empty for other runs."""
    text = "; ".join(f"{name}: {', '.join(changes)}" for name, changes in mixture.items())
    return {"rlhf.mixture": truncate(text, TAG_LENGTH)} if mixture else {}


def _milliseconds(record: dict[str, Any]) -> int:
    return round(record["time"] * 1000)


def parameters(config: dict[str, Any], seed: int) -> dict[str, str]:
    """Flatten a configuration: {"ppo": {"lr": 1e-6}} becomes {"ppo.lr": "1e-06"}, as in job.json.

    A character that MLflow refuses in a name, which a user's key can contain, becomes "_".
    """
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH

    return {
        re.sub(r"[^\w.\- /:]", "_", name)[:MAX_ENTITY_KEY_LENGTH]: truncate(
            value if isinstance(value, str) else json.dumps(value), MAX_PARAM_VAL_LENGTH
        )
        for name, value in [*leaves(config), ("seed", seed)]
    }


def truncate(value: str, length: int) -> str:
    """Cut a value to the length that MLflow accepts, with an ellipsis; job.json has all of it."""
    return value if len(value) <= length else value[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"
