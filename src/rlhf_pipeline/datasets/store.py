from typing import Any

from kedro.io import AbstractDataset
from kedro.io.core import DatasetError

from rlhf_pipeline.storage.store import Store


class StoreDataset(AbstractDataset[None, Store | None]):
    """Loaded as the store; None without a URL. Nodes do not use it, the runner of stages does."""

    def __init__(
        self,
        *,
        url: str | None,
        credentials: dict[str, Any] | None = None,
        fs_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.metadata = metadata
        self._store = None if url is None else Store(url, **(fs_args or {}), **(credentials or {}))

    def load(self) -> Store | None:
        """The store. Nothing is connected."""
        return self._store

    def save(self, data: None) -> None:
        """Refuse: the runner of stages writes to the store."""
        raise DatasetError("the store is not an output")

    def _describe(self) -> dict[str, Any]:
        return {"url": self._store and self._store.name}
