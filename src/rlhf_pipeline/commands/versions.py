"""Published versions of artifacts."""

from __future__ import annotations

from collections.abc import Iterable

from kedro.io import CatalogProtocol

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.runtime.manifest import Manifest


def artifacts(catalog: CatalogProtocol, names: Iterable[str]) -> list[ArtifactDataset]:
    """The artifact datasets among the named ones."""
    datasets = (catalog.get(name) for name in sorted(names))
    return [dataset for dataset in datasets if isinstance(dataset, ArtifactDataset)]


def first_version(catalog: CatalogProtocol, name: str, fingerprint: str) -> str | None:
    """The first run that published the result of a recipe as the dataset `name`."""
    versions = [path for dataset in artifacts(catalog, [name]) for path in dataset.versions()]
    return next(
        (path.parent.name for path in versions if Manifest.read(path).fingerprint == fingerprint),
        None,
    )


def is_unpublished(catalog: CatalogProtocol, name: str) -> bool:
    """Whether the dataset `name` is an artifact without any version."""
    return any(not dataset.versions() for dataset in artifacts(catalog, [name]))
