"""Directories in the Kedro catalog that programs write into."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset
from kedro.io.core import DatasetError


class DirectoryDataset(AbstractDataset[NoReturn, Path]):
    """The path of a directory. Only loading is supported."""

    def __init__(self, *, filepath: str) -> None:
        self._filepath = Path(filepath)

    def load(self) -> Path:
        """The directory; created if it does not exist."""
        self._filepath.mkdir(parents=True, exist_ok=True)
        return self._filepath

    def save(self, data: NoReturn) -> None:
        """Fail: programs write into the directory."""
        raise DatasetError(
            f"{self._filepath} cannot be saved: the programs of the stages write into it"
        )

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath}
