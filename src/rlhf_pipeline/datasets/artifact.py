"""Finished artifacts and pages in the Kedro catalog."""

import logging
import os
import re
import shutil
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock
from kedro.io import AbstractVersionedDataset, Version
from kedro.io.core import DatasetError, generate_timestamp, get_protocol_and_path
from kedro_datasets._typing import TablePreview  # what Kedro-Viz knows

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.files import force_to_disk, write_atomically
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.stages.launch.failure import explain_full_disk
from rlhf_pipeline.stages.processes import may_run, this_process
from rlhf_pipeline.storage.files import link_or_copy
from rlhf_pipeline.storage.store import Store

logger = logging.getLogger(__name__)

LATEST = "latest"
"""Name of the link to the newest version."""

OUTLINES = ".outlines"
"""Folder beside the copies of versions, for outlines of the versions that were never loaded."""


class PathDataset(AbstractVersionedDataset[Any, Path]):
    """Versions of a file or a directory, loaded as the path of one of them.

    With a URL such as `s3://bucket/models/sft_model` as `filepath`, the versions are in a store,
    and a loaded one is copied to the local folder `cache` first. `credentials` and `fs_args` are
    options of the fsspec file system.
    """

    _version: Version | None
    POINTER = ""
    """Path in a version of the file that is written last."""

    def __init__(
        self,
        *,
        filepath: str,
        version: Version | None = None,
        credentials: dict[str, Any] | None = None,
        fs_args: dict[str, Any] | None = None,
        cache: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.metadata = metadata  # for plugins such as Kedro-Viz
        protocol, path = get_protocol_and_path(filepath, version)
        self.store: Store | None = None
        """None: the versions are local."""
        self.folder = Path(path)
        """Local folder of the versions, or of the copies of those in a store."""
        if protocol == "file":
            super().__init__(PurePosixPath(path), version)
            return
        if version is None:
            raise DatasetError(f"{filepath}: found no `versioned: true`, expected it for a URL")
        self.store = Store(f"{protocol}://{path}", **(fs_args or {}), **(credentials or {}))
        self.folder = Path(cache or _cache_folder()) / protocol / path.lstrip("/")
        super().__init__(
            PurePosixPath(path),
            version,
            exists_function=lambda path: Path(path).parent.name in self._stored_versions(),
        )

    def load(self) -> Path:
        """The path of this run's version, of the pinned version, or of the newest one.

        Raises ArtifactError if the version is damaged in its store.
        """
        path = Path(str(self._get_load_path()))
        return path if self.store is None else self._fetch(path.parent.name)

    def clock_fault(self) -> str | None:
        """What is wrong if the newest version has a time later than now; else None."""
        newest = Path(next(iter(self._get_versions()), "")).parent.name
        if not re.match(r"\d{4}-\d\d-\d\dT", newest) or newest < generate_timestamp():
            return None
        fix = "Fix: correct the clock, or rename it"
        return f"{self.folder}: found version {newest}, expected none later than now. {fix}"

    def versions(self, *, strict: bool = False) -> list[Path]:
        """All published versions, oldest first.

        Of those in a store that were never loaded here, the outline: see `Store.pull`. One whose
        manifest is damaged there is left out and reported; raises ArtifactError if `strict`.
        """
        if self.store is None:
            return sorted(self.folder.glob(f"*/{self.folder.name}"))
        found = []
        for name in self._stored_versions():
            try:
                found.append(self._fetch(name, outline=True))
            except ArtifactError as error:
                if strict:
                    raise
                logger.warning("a version is left out: %s", error)
        return found

    def _get_versions(self) -> list[str]:
        """Kedro's list of the versions, newest first, from one listing of the store."""
        if self.store is None:
            return list(super()._get_versions())
        return [str(self._get_versioned_path(name)) for name in self._stored_versions()[::-1]]

    def _stored_versions(self) -> list[str]:
        assert self.store is not None
        pointers = self.store.names(f"*/{self.folder.name}{self.POINTER}")
        return [pointer.partition("/")[0] for pointer in pointers]

    @abstractmethod
    def _fetch(self, version: str, *, outline: bool = False) -> Path:
        """Copy a version from the store unless it is here; return its path."""

    def _target(self) -> Path:
        """Local path of this run's version."""
        path = Path(str(self._get_save_path()))
        return path if self.store is None else self.folder / path.parent.name / path.name

    def _read_back(self, target: Path) -> None:
        """Let later nodes read this version even if another run has published a newer one."""
        if self._version is not None and self._version.load is None:
            self._version = Version(target.parent.name, target.parent.name)

    def _exists(self) -> bool:
        path = self._get_load_path()
        return Path(path).exists() if self.store is None else self._exists_function(str(path))

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath, "version": self._version}


class PageDataset(PathDataset):
    """A page of HTML. Saved as text, loaded as the path that a browser opens."""

    def save(self, data: str) -> None:
        target = self._target()
        if self.store is not None:
            self.store.write(f"{target.parent.name}/{target.name}", data)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
        self._read_back(target)

    def _fetch(self, version: str, *, outline: bool = False) -> Path:
        target = self.folder / version / self.folder.name
        text = (
            None if outline or self.store is None else self.store.read(f"{version}/{target.name}")
        )
        if text is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f"{target.name}.lock")):
                write_atomically(target, text)
        return target


class ArtifactDataset(PathDataset):
    """A directory with a manifest: a model, a split, an evaluation. Saved and loaded as a path.

    Saving creates a new version of hard links, without copying. An interrupted run leaves none.
    Published files share their bytes with the work directory: treat them as read-only. In a store,
    a version is a manifest, and the files are beside the versions, each once, by content.
    """

    POINTER = f"/{NAME}"

    def save(self, data: Path) -> None:
        try:
            manifest = Manifest.read(data)
        except ArtifactError as error:
            raise DatasetError(str(error)) from error
        target = self._target()
        if self.store is not None:
            pointer = f"{target.parent.name}/{target.name}{self.POINTER}"
            self.store.push(data, pointer)
        owner = quote(this_process(), safe="@")
        partial = target.with_name(f"{target.name}.{owner}.partial")  # not a version
        what = f"stage {manifest.stage} is finished in {data} but not published as {target}"
        with explain_full_disk(what, target):
            try:
                shutil.copytree(data, partial, copy_function=link_or_copy)
                force_to_disk(partial)
                partial.rename(target)
                self._link_latest(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)  # free the space
                raise
        self._read_back(target)

    def preview(self) -> TablePreview:
        """The final metrics of the stage, which Kedro-Viz shows beside the graph."""
        metrics = Manifest.read(self.load()).metrics
        rows = [[name, f"{value:.4g}"] for name, value in sorted(metrics.items())]
        return TablePreview(
            {"index": [*range(len(rows))], "columns": ["metric", "value"], "data": rows}
        )

    def _link_latest(self, target: Path) -> None:
        """Let `latest`, beside the versions, refer to a version.

        Kedro looks for `*/NAME`, which `latest` itself never is.
        """
        link = target.parent.parent / LATEST
        temporary = link.with_name(f".{LATEST}.{os.getpid()}")
        with suppress(OSError):  # the file system has no links
            temporary.symlink_to(target.relative_to(link.parent))
            temporary.replace(link)

    def whole(self, path: Path) -> Path:
        """The path with its files, if it is an outline of `versions` or in one: downloads them."""
        outlines = self.folder / OUTLINES
        if self.store is None or not path.is_relative_to(outlines):
            return path
        version, _, *below = path.relative_to(outlines).parts
        return self._fetch(version).joinpath(*below)

    def _fetch(self, version: str, *, outline: bool = False) -> Path:
        assert self.store is not None
        name = self.folder.name
        whole, pointer = self.folder / version / name, f"{version}/{name}{self.POINTER}"
        if outline and (whole / NAME).is_file():
            return whole
        copies = [path.parent for path in self.folder.glob(f"*/{name}{self.POINTER}")]
        target = self.folder / OUTLINES / version / name if outline else whole
        with explain_full_disk(f"{self.store.name}/{pointer} is not copied", target):
            found = self.store.pull(pointer, target, copies, outline=outline)
        if found is None:
            raise DatasetError(f"{self.store.name}/{pointer}: found nothing, expected a manifest")
        return target

    def abandoned(self) -> list[Path]:
        """Directories of interrupted publications."""
        name = f"{self.folder.name}."
        return [
            path
            for path in sorted(self.folder.glob(f"*/{name}*[0-9].partial"))
            if not may_run(unquote(path.stem.removeprefix(name)), path.stat().st_mtime)
        ]


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "rlhf-pipeline"
