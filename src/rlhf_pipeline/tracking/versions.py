"""Versions of the registered model, and their files on this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf_pipeline.tracking.store import DIGEST_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def find_version(client: MlflowClient, model: str, name: str) -> ModelVersion | None:
    """The version of a registered model with this alias or number. None: there is no such one."""
    if not client.search_registered_models(f"name = '{model}'"):
        return None
    number = client.get_registered_model(model).aliases.get(name, name)
    found = client.search_model_versions(f"name = '{model}'")
    return next((version for version in found if str(version.version) == str(number)), None)


def local_folder(client: MlflowClient, version: ModelVersion, downloads: Path) -> Path:
    """The folder of a version; that of a server is downloaded into a folder of `downloads` once."""
    from mlflow.artifacts import download_artifacts

    if ":/" not in version.source:
        return Path(version.source)
    folder = downloads / version.tags[DIGEST_TAG][:16]
    if not folder.is_dir():
        downloads.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=downloads) as partial:
            uri = client.tracking_uri
            found = download_artifacts(version.source, dst_path=partial, tracking_uri=uri)
            Path(found).rename(folder)
    return folder
