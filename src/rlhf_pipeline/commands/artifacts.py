"""Find artifacts: by a version, an alias or a folder, and by their content."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from kedro.framework.project import pipelines
from kedro.io import AbstractDataset, CatalogProtocol

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest
from rlhf_pipeline.stages.cache.workspace import DOWNLOADS
from rlhf_pipeline.tracking.registry import registered_folder

D = TypeVar("D", bound=AbstractDataset[Any, Any])


def folder_of(policy: str, catalog: CatalogProtocol, project: Path) -> Path:
    """The artifact that a version, an alias or a path names.

    Raises ArtifactError if there is none, and StageError if MLflow's store fails.
    """
    if (Path(policy) / NAME).is_file():
        return Path(policy)
    model = RegisterConfig.model_validate(catalog.load("params:register")).model
    downloads = Path(catalog.load("workspace")) / DOWNLOADS
    return registered_folder(policy, model, project, downloads)


def policy_of(policy: str, catalog: CatalogProtocol, project: Path) -> Path:
    """`folder_of` something that can answer; raises ArtifactError for other artifacts."""
    folder = folder_of(policy, catalog, project)
    config = folder / "config.json"
    if not config.is_file() or "ForSequenceClassification" in config.read_text(encoding="utf-8"):
        raise ArtifactError(
            f"{folder}: found an artifact of stage {Manifest.read(folder).stage}, expected a "
            "language model. Fix: name the model of stage sft, ppo or dpo"
        )
    return folder


def artifact_datasets(catalog: CatalogProtocol) -> dict[str, ArtifactDataset]:
    """The data sets of all pipelines that publish artifacts, by name."""
    return datasets_of(ArtifactDataset, catalog)


def datasets_of(kind: type[D], catalog: CatalogProtocol) -> dict[str, D]:
    """The data sets of all pipelines that are of a kind, by name."""
    names = {name for pipeline in pipelines.values() for name in pipeline.all_outputs()}
    found = {name: catalog.get(name) for name in sorted(names)}
    return {name: data for name, data in found.items() if isinstance(data, kind)}


def all_artifacts(catalog: CatalogProtocol, workspace: Path) -> list[Path]:
    """The finished artifacts of the workspace, then the published versions of each data set."""
    artifacts = sorted(path.parent for path in workspace.glob(f"*/*/export/{NAME}"))
    datasets = artifact_datasets(catalog).values()
    return artifacts + [path for dataset in datasets for path in dataset.versions()]


def whole(folder: Path, catalog: CatalogProtocol) -> Path:
    """The folder of an artifact, or in one, with its files: those of an outline are downloaded."""
    for dataset in artifact_datasets(catalog).values():
        folder = dataset.whole(folder)
    return folder


def places(artifacts: list[Path]) -> dict[str, Path]:
    """Where content is, by its digest: the artifacts, and the folders in them."""
    known: dict[str, Path] = {}
    for artifact in artifacts:
        for folder in (artifact, *(path for path in artifact.iterdir() if path.is_dir())):
            try:
                known[content_digest(folder)] = folder
            except ArtifactError:
                continue  # another artifact, which nobody may ask for
    return known


def ancestors(folder: Path, known: dict[str, Path]) -> Iterator[tuple[Path, Manifest]]:
    """An artifact, and all artifacts that it was made from and that are still there, once each."""
    waiting, seen = [folder], set()
    while waiting:
        place = waiting.pop()
        artifact = place if (place / NAME).is_file() else place.parent
        manifest = Manifest.read(artifact)
        if manifest.fingerprint not in seen:
            seen.add(manifest.fingerprint)
            yield artifact, manifest
            waiting += [known[digest] for digest in manifest.inputs.values() if digest in known]
