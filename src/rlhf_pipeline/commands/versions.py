"""The published versions of a project's artifacts."""

from __future__ import annotations

from collections.abc import Iterable

from kedro.io import CatalogProtocol

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.runtime.manifest import Manifest


def artifacts(catalog: CatalogProtocol, names: Iterable[str]) -> list[ArtifactDataset]:
    """The datasets among the named ones that hold artifacts."""
    datasets = (catalog.get(name) for name in sorted(names))
    return [dataset for dataset in datasets if isinstance(dataset, ArtifactDataset)]


def first_version(catalog: CatalogProtocol, name: str, fingerprint: str) -> str | None:
    """The run that first published a recipe's result as the dataset `name`: the run that made it, as a rule."""
    versions = [path for dataset in artifacts(catalog, [name]) for path in dataset.versions()]
    return next(
        (path.parent.name for path in versions if Manifest.read(path).fingerprint == fingerprint),
        None,
    )


def is_unpublished(catalog: CatalogProtocol, name: str) -> bool:
    """Whether an artifact has no version at all."""
    return any(not dataset.versions() for dataset in artifacts(catalog, [name]))
