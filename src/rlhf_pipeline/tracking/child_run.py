"""The MLflow run of one stage, a child of the run of the pipeline, and the data of the stage.

The data that stages read and make are MLflow data sets. Equal digests connect a training run with
the runs that made its data. MLflow knows data sets as inputs only, so a run that makes data has
them as inputs, too; the context tells the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of, content_digest
from rlhf_pipeline.runtime.metrics_file import answers_in, read_json_lines
from rlhf_pipeline.stages.job import StageRun, Status
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

DESCRIPTION_TAG = "mlflow.note.content"  # MLflow shows it as the description of a run
ANSWERS = "answers.json"  # table of a training's sampled answers
TAG_LENGTH = 5000  # characters of a tag's value that every version of MLflow accepts


@dataclass
class ChildRun:
    """The MLflow run of a stage, a copy of its work directory.

    `reconcile` opens it, and opens it again after a failure of the store.
    """

    run: StageRun
    end: tuple[Status, dict[str, float]] | None = None  # of the stage, until MLflow has it
    run_id: str | None = None
    is_open: bool = False  # whether it is known what MLflow has: false also after a failure
    _logged: dict[str, int] = field(default_factory=dict)
    """The last step that MLflow has of each metric. A resumed program reports some steps again, and
    an outage can begin in the middle of a record."""
    _last: tuple[int, int | None] = 0, None  # step and milliseconds since 1970 of the newest record
    _is_closed: bool = False  # whether MLflow has the end, and lacks at most the report's files

    def reconcile(
        self, client: MlflowClient, parent: str, records: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Send what the work directory has and MLflow lacks; `records` of the metrics file are new,
        and a run that is opened gets all."""
        if not self._is_closed:
            if not self.is_open:
                self._open(client, parent)
                records, self.is_open = read_json_lines(self.run.metrics_file), True
            self._log(client, records)
        if self.end is not None:
            if not self._is_closed:
                self._finish(client, *self.end)
                self._is_closed = True
            if self.end[0] == "FINISHED":
                log_result(client, str(self.run_id), self.run)
            self.end, self.is_open, self._is_closed = None, False, False

    def _open(self, client: MlflowClient, parent: str) -> None:
        """Open the run of this stage again, which may be closed, or the unfinished one of the
        recipe, or create one, and log the parameters that it lacks: MLflow refuses to change one,
        and operational ones can differ between attempts."""
        from mlflow.entities import Param

        run, own = self.run, {"mlflow.parentRunId": parent, store.DRIVER_TAG: this_process()}
        self.run_id = self.run_id or store.find_run(client, run.fingerprint, finished=False)
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            for name, value in own.items():
                client.set_tag(self.run_id, name, value)
            opened = client.get_run(self.run_id)
        else:
            records = read_json_lines(run.metrics_file)
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
        is_evaluation = run.stage.startswith("evaluate")
        contexts = {"source": "source", "split": "evaluation" if is_evaluation else "training"}
        read = []  # records of sources, and folders of the split
        for name, path in run.inputs.items():
            artifact = artifact_of(path)
            maker = None if artifact is None else Manifest.read(artifact).stage
            if maker in contexts:
                read.append(_data_set(path, run.digests[name], contexts[maker]))
        client.log_inputs(self.run_id, read)
        self._logged = {
            name: max(point.step for point in client.get_metric_history(self.run_id, name))
            for name in opened.data.metrics
        }

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
        if answers_in(records):
            all_answers = answers_in(read_json_lines(self.run.metrics_file))
            log_answers(client, str(self.run_id), all_answers)
        if records:
            self._last = records[-1]["step"], _milliseconds(records[-1])

    def _finish(self, client: MlflowClient, status: Status, metrics: dict[str, float]) -> None:
        """Log the result at step and time of the last record, so a repeated value is one point.

        Training exports the best model, whose metrics are of an earlier step: the run's description
        lists them, and only step and headline become metrics, `exported/...`, of one point each.
        """
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        step, time_ms = self._last
        result = metrics
        if "step" in metrics:
            shown = [name for name in ("step", *self.run.headline_metrics) if name in metrics]
            result = {f"exported/{name.replace('/', '_')}": metrics[name] for name in shown}
            rows = [f"| {name} | {x:.6g} |" for name, x in metrics.items() if name != "step"]
            title = f"The exported model, of step {metrics['step']:.0f}:"
            description = "\n".join([title, "", "| metric | value |", "|---|---|", *rows])
            client.set_tag(self.run_id, DESCRIPTION_TAG, description)
        at = time_ms or get_current_time_millis()
        points = [Metric(name, float(value), at, step) for name, value in result.items()]
        client.log_batch(self.run_id, metrics=points)
        # A reused stage ended when its last record was written.
        client.set_terminated(self.run_id, status, time_ms if self.run.cached else None)


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


def log_result(client: MlflowClient, run_id: str, run: StageRun) -> None:
    """Log the data that a finished stage made, and its report as an artifact.

    Each folder of the data is a data set too. A report that the run has is not logged again.
    """
    context = {"source": "source", "split": "prepared"}.get(run.stage)
    if context is not None:
        folders = sorted(path for path in run.export.iterdir() if path.is_dir())
        made = [_data_set(path, content_digest(path), context) for path in (run.export, *folders)]
        client.log_inputs(run_id, made)
    report = run.export / "report.json"
    if report.is_file() and report.name not in {x.path for x in client.list_artifacts(run_id)}:
        client.log_artifact(run_id, str(report))


def log_answers(client: MlflowClient, run_id: str, answers: Sequence[dict[str, Any]]) -> None:
    """Log a training's sampled answers as one table of MLflow, like its `log_table`, but anew each
    time: after a resume, it has no step twice."""
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    table = {"columns": [*answers[0]], "data": [[*answer.values()] for answer in answers]}
    client.log_dict(run_id, table, ANSWERS)
    logged = json.dumps([{"path": ANSWERS, "type": "table"}])
    client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, logged)


def _data_set(path: Path, digest: str, context: str) -> DatasetInput:
    """An artifact of a source or of the split, or a folder of it: equal in every run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT
    from mlflow.utils.validation import MAX_DATASET_DIGEST_SIZE

    artifact = artifact_of(path)
    assert artifact is not None
    manifest = Manifest.read(artifact)
    folder = path.relative_to(artifact).as_posix() if path != artifact else ""
    name = f"split/{folder}".rstrip("/")
    if manifest.stage == "source":
        name = SourceConfig.model_validate(manifest.config["source"]).label()
    location = {"uri": str(path.resolve()), "stage": manifest.stage}
    location["fingerprint"] = manifest.fingerprint
    prefix = f"{folder}_" if folder else ""
    metrics = {key.partition("/")[2]: x for key, x in manifest.metrics.items()}
    own = {key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)}
    data_set = Dataset(
        name,
        digest[:MAX_DATASET_DIGEST_SIZE],
        source_type="local",
        source=json.dumps(location),
        profile=json.dumps(own),
    )
    return DatasetInput(data_set, tags=[InputTag(MLFLOW_DATASET_CONTEXT, context)])
