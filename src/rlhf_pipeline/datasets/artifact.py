"""Finished artifacts, pages and the store in the Kedro catalog."""

import logging
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
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.stages.launch.failure import explain_full_disk
from rlhf_pipeline.stages.processes import may_run, this_process
from rlhf_pipeline.storage.store import Store, link_or_copy

logger = logging.getLogger(__name__)

OUTLINES = ".outlines"  # folder beside the versions: those in the store, never loaded here


class PathDataset(AbstractVersionedDataset[Any, Path]):
    """Versions of a file or a directory in a local folder, loaded as the path of one of them."""

    _version: Version | None
    store: Store | None = None
    """A store that has versions as well; None: all are local."""

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
                "Fix: set `filepath` to a folder, and `store` to the URL of the store"
            )
        self.folder = Path(path)
        """The folder of the versions."""
        super().__init__(PurePosixPath(path), version)

    def load(self) -> Path:
        """The path of this run's version, of the pinned version, or of the newest one."""
        return Path(str(self._get_load_path()))

    def versions(self, *, strict: bool = False) -> list[Path]:
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
        return bool(self._exists_function(str(self._get_load_path())))

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

    With `store`, the URL of a store, versions are saved there as well, and those of other machines
    are copied when they are loaded. `credentials` and `fs_args` are options of its file system.
    """

    def __init__(
        self,
        *,
        filepath: str,
        version: Version | None = None,
        store: str | None = None,
        credentials: dict[str, Any] | None = None,
        fs_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(filepath=filepath, version=version, metadata=metadata)
        if store is not None:
            self.store = Store(store, **(fs_args or {}), **(credentials or {}))
            self._exists_function = lambda path: (
                Path(path).exists() or Path(path).parent.name in self._stored()
            )

    def load(self) -> Path:
        """The path as above, copied from the store if necessary.

        Raises ArtifactError if the version is damaged there.
        """
        path = Path(str(self._get_load_path()))
        return path if self.store is None or path.exists() else self._fetch(path.parent.name)

    def versions(self, *, strict: bool = False) -> list[Path]:
        """All published versions, oldest first; the outline of those that were never loaded here.

        One whose manifest is damaged in the store is left out and reported, or raises ArtifactError
        if `strict`. See `Store.pull`.
        """
        found = {path.parent.name: path for path in super().versions()}
        for name in sorted({*self._stored()} - found.keys()):
            try:
                found[name] = self._fetch(name, outline=True)
            except ArtifactError as error:
                if strict:
                    raise
                logger.warning("a version is left out: %s", error)
        return [found[name] for name in sorted(found)]

    def save(self, data: Path) -> None:
        try:
            manifest = Manifest.read(data)
        except ArtifactError as error:
            raise DatasetError(str(error)) from error
        target = Path(str(self._get_save_path()))
        if self.store is not None:
            self.store.push(data, self._pointer(target.parent.name))
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

    def whole(self, path: Path) -> Path:
        """The path with its files, if it is an outline of `versions` or in one: downloads them."""
        outlines = self.folder / OUTLINES
        if not path.is_relative_to(outlines):
            return path
        version, _, *below = path.relative_to(outlines).parts
        return self._fetch(version).joinpath(*below)

    def abandoned(self) -> list[Path]:
        """Directories of interrupted publications."""
        name = f"{self.folder.name}."
        found = sorted(self.folder.glob(f"*/{name}*[0-9].partial"))
        owners = {path: unquote(path.stem.removeprefix(name)) for path in found}
        return [path for path in found if not may_run(owners[path], path.stat().st_mtime)]

    def _get_versions(self) -> list[str]:
        """Kedro's list of the versions, newest first."""
        stored = (str(self._get_versioned_path(name)) for name in self._stored())
        return sorted({*super()._get_versions(), *stored}, reverse=True)

    def _stored(self) -> list[str]:
        if self.store is None:
            return []
        names = self.store.names(f"versions/{self.folder.name}", ".json")
        return [PurePosixPath(name).stem for name in names]

    def _pointer(self, version: str) -> str:
        return f"versions/{self.folder.name}/{version}.json"

    def _fetch(self, version: str, *, outline: bool = False) -> Path:
        """Copy a version from the store unless it is here; return its path."""
        assert self.store is not None
        name, pointer = self.folder.name, self._pointer(version)
        target = (self.folder / OUTLINES if outline else self.folder) / version / name
        copies = [path.parent for path in self.folder.glob(f"*/{name}/{NAME}")]
        if (manifest := self.store.manifest(pointer)) is None:
            raise DatasetError(f"{self.store.name}/{pointer}: found nothing, expected a manifest")
        with explain_full_disk(f"{self.store.name}/{pointer} is not copied", target):
            self.store.pull(manifest, target, copies, outline=outline)
        return target


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
