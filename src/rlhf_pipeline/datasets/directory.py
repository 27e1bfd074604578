"""A directory that programs write into, as a catalog entry: its path is absolute, visible and differs by environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset
from kedro.io.core import DatasetError


class DirectoryDataset(AbstractDataset[NoReturn, Path]):
    """Loads as the path of a directory that exists; nothing is saved through it."""

    def __init__(self, *, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def load(self) -> Path:
        """The directory, made if need be."""
        self._filepath.mkdir(parents=True, exist_ok=True)
        return self._filepath

    def save(self, data: NoReturn) -> None:
        """Refuse: programs write into the directory themselves."""
        raise DatasetError(
            f"{self._filepath} is written by the stages' programs, not by the catalog"
        )

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath}
