"""Finished artifacts, pages and the store in the Kedro catalog."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from kedro.io import AbstractDataset, AbstractVersionedDataset, Version
from kedro.io.core import DatasetError, generate_timestamp, get_protocol_and_path
from kedro_datasets._typing import TablePreview  # what Kedro-Viz knows

from rlhf_pipeline.errors import ArtifactError, without_secrets
from rlhf_pipeline.runtime.files import force_to_disk, write_atomically
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.launch.failure import explain_full_disk
from rlhf_pipeline.stages.processes import may_run, this_process
from rlhf_pipeline.stages.store import Store, link_or_copy


class PathDataset(AbstractVersionedDataset[Any, Path]):
    """Versions of a file or a directory in a local folder, loaded as the path of one of them."""

    _version: Version | None

    def __init__(
        self,
        *,
        filepath: str,
        version: Version | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.metadata = metadata  # for plugins such as Kedro-Viz
        protocol, path = get_protocol_and_path(filepath, version)
        if protocol != "file":
            raise DatasetError(
                f"{without_secrets(filepath)}: found a URL as `filepath`, expected a local folder. "
                "Fix: set `filepath` to a folder; the parameter `store` shares results"
            )
        self.folder = Path(path)
        """The folder of the versions."""
        super().__init__(PurePosixPath(path), version)

    def load(self) -> Path:
        """The path of this run's version, of the pinned version, or of the newest one."""
        return Path(str(self._get_load_path()))

    def versions(self) -> list[Path]:
        """All published versions, oldest first."""
        return sorted(self.folder.glob(f"*/{self.folder.name}"))

    def clock_fault(self) -> str | None:
        """What is wrong if the newest version has a time later than now; else None."""
        newest = Path(next(iter(self._get_versions()), "")).parent.name
        if re.match(r"\d{4}-\d\d-\d\dT", newest) and newest >= generate_timestamp():
            fix = "Fix: correct the clock, or rename it"
            return f"{self.folder}: found version {newest}, expected none later than now. {fix}"
        return None

    def _read_back(self, target: Path) -> None:
        """Let later nodes read this version, although another run may publish a newer one."""
        if self._version is not None and self._version.load is None:
            self._version = Version(target.parent.name, target.parent.name)

    def _exists(self) -> bool:
        return Path(str(self._get_load_path())).exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath, "version": self._version}


class PageDataset(PathDataset):
    """A page of HTML. Saved as text, loaded as the path that a browser opens."""

    def save(self, data: str) -> None:
        target = Path(str(self._get_save_path()))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
        self._read_back(target)


class ArtifactDataset(PathDataset):
    """A directory with a manifest: a model, a split, an evaluation. Saved and loaded as a path.

    Saving creates a version of hard links: its files share their bytes with the work directory, so
    treat them as read-only. An interrupted run leaves no version.
    """

    def save(self, data: Path) -> None:
        try:
            manifest = Manifest.read(data)
        except ArtifactError as error:
            raise DatasetError(str(error)) from error
        target = Path(str(self._get_save_path()))
        owner = quote(this_process(), safe="@")
        partial = target.with_name(f"{target.name}.{owner}.partial")  # not a version
        what = f"stage {manifest.stage} is finished in {data} but not published as {target}"
        with explain_full_disk(what, target):
            try:
                shutil.copytree(data, partial, copy_function=link_or_copy)
                force_to_disk(partial)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)  # free the space
                raise
            latest = self.folder / "latest"  # no version: Kedro looks for `*/NAME`
            temporary = latest.with_name(f".{latest.name}.{os.getpid()}")
            with suppress(OSError):  # the file system has no links
                temporary.symlink_to(target.relative_to(self.folder))
                temporary.replace(latest)
        self._read_back(target)

    def preview(self) -> TablePreview:
        """The final metrics of the stage, which Kedro-Viz shows beside the graph."""
        metrics = Manifest.read(self.load()).metrics
        rows = [[name, f"{value:.4g}"] for name, value in sorted(metrics.items())]
        columns = ["metric", "value"]
        return TablePreview({"index": [*range(len(rows))], "columns": columns, "data": rows})

    def abandoned(self) -> list[Path]:
        """Directories of interrupted publications."""
        name = f"{self.folder.name}."
        found = sorted(self.folder.glob(f"*/{name}*[0-9].partial"))
        owners = {path: unquote(path.stem.removeprefix(name)) for path in found}
        return [path for path in found if not may_run(owners[path], path.stat().st_mtime)]


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
        return self._store

    def save(self, data: None) -> None:
        raise DatasetError("the store is not an output")

    def _describe(self) -> dict[str, Any]:
        return {"url": self._store and self._store.name}
