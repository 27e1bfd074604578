"""The MLflow run of one stage, a child of the run of the pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.stages.events import StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking.lineage import log_data_read, log_result
from rlhf_pipeline.tracking.store import (
    DRIVER_TAG,
    FINGERPRINT_TAG,
    STAGE_TAG,
    experiment_id,
    find_run,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


DESCRIPTION_TAG = "mlflow.note.content"
"""MLflow shows this tag as the description of a run."""
TAG_LENGTH = 5000
"""Characters of a tag's value that every version of MLflow accepts."""


@dataclass
class ChildRun:
    """The MLflow run of a stage, a copy of its work directory.

    `reconcile` opens it, and opens it again after a failure of the store.
    """

    run: StageRun
    end: tuple[Status, dict[str, float]] | None = None
    """How the stage ended, until MLflow has it."""
    run_id: str | None = None
    is_open: bool = False
    """Whether it is known what MLflow has: false also after a failure."""
    _logged: dict[str, int] = field(default_factory=dict)
    """The last step that MLflow has of each metric. A resumed program reports some steps again, and
    an outage can begin in the middle of a record."""
    _last: tuple[int, int | None] = 0, None
    """Step and time of the newest record, milliseconds since 1970."""

    def reconcile(
        self, client: MlflowClient, parent: str, records: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Send what the work directory has and MLflow lacks, with the end of a stage that ended.

        `records` are those of the metrics file that are new; a run that is opened gets all.
        """
        if not self.is_open:
            known = self._open(client, parent)
            self._log_missing(client, known)
            records, self.is_open = read_json_lines(self.run.metrics_file), True
        self._log(client, records)
        if self.end is not None:
            self._finish(client, *self.end)
            if self.end[0] == "FINISHED":
                log_result(client, str(self.run_id), self.run)
            self.end, self.is_open = None, False

    def _open(self, client: MlflowClient, parent: str) -> Run:
        """Resume the unfinished run of the recipe, or create one."""
        run, self._logged = self.run, {}
        self.run_id = unfinished = find_run(client, run.fingerprint, finished=False)
        if unfinished is not None:
            client.update_run(unfinished, status="RUNNING")
            client.set_tag(unfinished, "mlflow.parentRunId", parent)
            client.set_tag(unfinished, DRIVER_TAG, this_process())
            return client.get_run(unfinished)
        records = read_json_lines(run.metrics_file)
        opened = client.create_run(
            experiment_id(client),
            start_time=_milliseconds(records[0]) if records else None,
            run_name=f"{run.title} {run.fingerprint[:4]}",
            tags={
                "mlflow.parentRunId": parent,
                STAGE_TAG: run.stage,
                DRIVER_TAG: this_process(),
                FINGERPRINT_TAG: run.fingerprint,
                "rlhf.directory": str(run.directory),
                **mixture_tag(run.mixture),
                **{f"rlhf.input.{name}": digest for name, digest in run.digests.items()},
            },
        )
        self.run_id = opened.info.run_id
        return opened

    def _log_missing(self, client: MlflowClient, opened: Run) -> None:
        """Log the parameters and inputs that MLflow lacks, and note the metrics that it has.

        MLflow refuses to change a parameter, and operational ones can differ between attempts.
        """
        from mlflow.entities import Param

        known, wanted = opened.data.params, parameters(self.run.config, self.run.seed)
        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        client.log_batch(self.run_id, params=missing)
        log_data_read(client, str(self.run_id), self.run)
        for name in opened.data.metrics:
            history = client.get_metric_history(self.run_id, name)
            self._logged[name] = max(point.step for point in history)

    def _log(self, client: MlflowClient, records: Sequence[dict[str, Any]]) -> None:
        """Send records that MLflow lacks, with their own step and time."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), _milliseconds(record), record["step"])
            for record in records
            for name, value in record["metrics"].items()
            if record["step"] > self._logged.get(name, 0)
        ]
        client.log_batch(self.run_id, metrics=metrics)  # the client splits it into requests
        self._logged |= {metric.key: metric.step for metric in metrics}
        if records:
            self._last = records[-1]["step"], _milliseconds(records[-1])

    def _finish(self, client: MlflowClient, status: Status, metrics: dict[str, float]) -> None:
        """Log the result at step and time of the last record, so a repeated value is one point.

        Training exports the best model, whose metrics are of an earlier step. The run's description
        lists them. Only the step and the headline become metrics, `exported/...`: a chart with one
        point says little.
        """
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        step, time_ms = self._last
        result = metrics
        if "step" in metrics:
            shown = [name for name in ("step", *self.run.headline_metrics) if name in metrics]
            result = {f"exported/{name.replace('/', '_')}": metrics[name] for name in shown}
            client.set_tag(self.run_id, DESCRIPTION_TAG, _exported(metrics))
        at = time_ms or get_current_time_millis()
        points = [Metric(name, float(value), at, step) for name, value in result.items()]
        client.log_batch(self.run_id, metrics=points)
        # A reused stage ended when its last record was written.
        client.set_terminated(self.run_id, status, time_ms if self.run.cached else None)


def _exported(metrics: Mapping[str, float]) -> str:
    """The description of a run that exported its best model."""
    rows = [f"| {name} | {value:.6g} |" for name, value in metrics.items() if name != "step"]
    title = f"The exported model, of step {metrics['step']:.0f}:"
    return "\n".join([title, "", "| metric | value |", "|---|---|", *rows])


def mixture_tag(mixture: Mapping[str, list[str]]) -> dict[str, str]:
    """The tag of a run whose inputs were made with other parameters; empty for other runs."""
    text = "; ".join(f"{name}: {', '.join(changes)}" for name, changes in mixture.items())
    return {"rlhf.mixture": truncate(text, TAG_LENGTH)} if mixture else {}


def _milliseconds(record: dict[str, Any]) -> int:
    return round(record["time"] * 1000)


def parameters(config: dict[str, Any], seed: int) -> dict[str, str]:
    """Flatten a configuration: {"ppo": {"lr": 1e-6}} becomes {"ppo.lr": "1e-06"}.

    Values other than strings are written as JSON, as in job.json. A character that MLflow refuses
    in a name, which a user's key can contain, becomes an underscore.
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
