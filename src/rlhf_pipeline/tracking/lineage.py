"""The data that stages read and make, as MLflow data sets.

Equal digests connect a training run with the runs that made its data. MLflow knows data sets as
inputs only, so a run that makes data also has them as inputs; the context tells the difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of, content_digest
from rlhf_pipeline.stages.events import StageRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput


def log_data_read(client: MlflowClient, run_id: str, run: StageRun) -> None:
    """Log the inputs that are data: records of sources, and folders of the split."""
    contexts = {
        "source": "source",
        "split": "evaluation" if run.stage.startswith("evaluate") else "training",
    }
    read = []
    for name, path in run.inputs.items():
        artifact = artifact_of(path)
        maker = None if artifact is None else Manifest.read(artifact).stage
        if maker in contexts:
            read.append(_data_set(path, run.digests[name], contexts[maker]))
    client.log_inputs(run_id, read)


def log_result(client: MlflowClient, run_id: str, run: StageRun) -> None:
    """Log the data that a finished stage made, and its report and figures as artifacts.

    Each folder of the data is a data set too. Artifacts that the run has are not logged again.
    """
    context = {"source": "source", "split": "prepared"}.get(run.stage)
    if context is not None:
        folders = sorted(path for path in run.export.iterdir() if path.is_dir())
        made = [_data_set(path, content_digest(path), context) for path in (run.export, *folders)]
        client.log_inputs(run_id, made)
    reports = sorted([*run.export.glob("report.md"), *run.export.glob("*.png")])
    logged = {file.path for file in client.list_artifacts(run_id)} if reports else set()
    for report in reports:
        if report.name not in logged:
            client.log_artifact(run_id, str(report))


def _data_set(path: Path, digest: str, context: str) -> DatasetInput:
    """An artifact of a source or of the split, or a folder of it: equal in every run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT
    from mlflow.utils.validation import MAX_DATASET_DIGEST_SIZE

    artifact = artifact_of(path)
    assert artifact is not None
    manifest = Manifest.read(artifact)
    folder = path.relative_to(artifact).as_posix() if path != artifact else ""
    if manifest.stage == "source":
        name = SourceConfig.model_validate(manifest.config["source"]).label()
    else:
        name = f"split/{folder}".rstrip("/")
    location = {
        "uri": str(path.resolve()),
        "stage": manifest.stage,
        "fingerprint": manifest.fingerprint,
    }
    return DatasetInput(
        Dataset(
            name,
            digest[:MAX_DATASET_DIGEST_SIZE],
            source_type="local",
            source=json.dumps(location),
            profile=json.dumps(_metrics(manifest, folder)),
        ),
        tags=[InputTag(MLFLOW_DATASET_CONTEXT, context)],
    )


def _metrics(manifest: Manifest, folder: str) -> dict[str, float]:
    prefix = f"{folder}_" if folder else ""
    metrics = ((name.partition("/")[2], value) for name, value in manifest.metrics.items())
    return {name.removeprefix(prefix): x for name, x in metrics if name.startswith(prefix)}
