"""The MLflow run of one stage, a child of the run of the pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.stages.events import StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking.lineage import log_data_read
from rlhf_pipeline.tracking.store import DRIVER_TAG, FINGERPRINT_TAG, experiment_id, find_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


DESCRIPTION_TAG = "mlflow.note.content"
"""MLflow shows this tag as the description of a run."""
TAG_LENGTH = 5000
"""Characters of a tag's value that every version of MLflow accepts."""


@dataclass
class ChildRun:
    """The open MLflow run of a stage."""

    client: MlflowClient
    opened: Run
    """The run as it was when it was opened."""
    logged: dict[str, int] = field(default_factory=dict)
    """The last step that MLflow has of each metric. A resumed program reports some steps again, and
    an outage can begin in the middle of a record."""
    step: int = 0
    """Step of the newest record."""
    time_ms: int | None = None
    """Time of the newest record, milliseconds since 1970."""

    @classmethod
    def open(cls, client: MlflowClient, parent: str, run: StageRun) -> ChildRun:
        """Resume the unfinished run of the recipe, or create one."""
        unfinished = find_run(client, run.fingerprint, finished=False)
        if unfinished is None:
            records = read_json_lines(run.metrics_file)
            opened = client.create_run(
                experiment_id(client),
                start_time=_milliseconds(records[0]) if records else None,
                run_name=f"{run.title} {run.fingerprint[:4]}",
                tags={
                    "mlflow.parentRunId": parent,
                    "rlhf.stage": run.stage,
                    DRIVER_TAG: this_process(),
                    FINGERPRINT_TAG: run.fingerprint,
                    "rlhf.directory": str(run.directory),
                    **mixture_tag(run.mixture),
                    **{f"rlhf.input.{name}": digest for name, digest in run.digests.items()},
                },
            )
        else:
            client.update_run(unfinished, status="RUNNING")
            client.set_tag(unfinished, "mlflow.parentRunId", parent)
            client.set_tag(unfinished, DRIVER_TAG, this_process())
            opened = client.get_run(unfinished)
        return cls(client, opened)

    @property
    def run_id(self) -> str:
        return str(self.opened.info.run_id)

    def log_missing(self, run: StageRun) -> None:
        """Log the parameters, the inputs and the records on disk that MLflow lacks.

        MLflow refuses to change a parameter, and operational ones can differ between attempts.
        """
        from mlflow.entities import Param

        known, wanted = self.opened.data.params, parameters(run.config, run.seed)
        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        self.client.log_batch(self.run_id, params=missing)
        log_data_read(self.client, self.run_id, run)
        for name in self.opened.data.metrics:
            history = self.client.get_metric_history(self.run_id, name)
            self.logged[name] = max(point.step for point in history)
        self.log(read_json_lines(run.metrics_file))

    def log(self, records: list[dict[str, Any]]) -> None:
        """Send records that MLflow lacks, with their own step and time."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), _milliseconds(record), record["step"])
            for record in records
            for name, value in record["metrics"].items()
            if record["step"] > self.logged.get(name, 0)
        ]
        self.client.log_batch(self.run_id, metrics=metrics)  # the client splits it into requests
        self.logged |= {metric.key: metric.step for metric in metrics}
        if records:
            self.step, self.time_ms = records[-1]["step"], _milliseconds(records[-1])

    def finish(
        self,
        status: Status,
        metrics: dict[str, float],
        headline: Collection[str] = (),
        *,
        end_time: int | None = None,
    ) -> None:
        """Log the result at step and time of the last record, so a repeated value is one point.

        Training exports the best model, whose metrics are of an earlier step. The run's description
        lists them. Only the step and the `headline` become metrics, `exported/...`: a chart with
        one point says little.
        """
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        time_ms = self.time_ms or get_current_time_millis()
        result = metrics
        if "step" in metrics:
            shown = ("step", *headline)
            result = {
                f"exported/{name.replace('/', '_')}": metrics[name]
                for name in shown
                if name in metrics
            }
            self.client.set_tag(self.run_id, DESCRIPTION_TAG, _exported(metrics))
        points = [Metric(name, float(value), time_ms, self.step) for name, value in result.items()]
        self.client.log_batch(self.run_id, metrics=points)
        self.client.set_terminated(self.run_id, status, end_time)


def _exported(metrics: Mapping[str, float]) -> str:
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
