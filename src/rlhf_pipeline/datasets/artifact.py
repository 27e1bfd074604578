"""Finished artifacts and pages in the Kedro catalog."""

import os
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
from kedro.io import AbstractVersionedDataset, Version
from kedro.io.core import DatasetError
from kedro_datasets._typing import TablePreview  # what Kedro-Viz knows

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.launch.failure import explain_full_disk

LATEST = "latest"
"""Name of the link to the newest version."""


class PathDataset(AbstractVersionedDataset[Any, Path]):
    """Versions of a file or a directory, loaded as the path of one of them."""

    _version: Version | None

    def __init__(
        self,
        *,
        filepath: str,
        version: Version | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.metadata = metadata  # for plugins such as Kedro-Viz
        super().__init__(filepath=PurePosixPath(filepath), version=version)

    def load(self) -> Path:
        """The path of this run's version, of the pinned version, or of the newest one."""
        return Path(str(self._get_load_path()))

    def versions(self) -> list[Path]:
        """All published versions, oldest first."""
        return sorted(Path(str(self._filepath)).glob(f"*/{self._filepath.name}"))

    def _read_back(self, target: Path) -> None:
        """Let later nodes read this version even if another run has published a newer one."""
        if self._version is not None and self._version.load is None:
            self._version = Version(target.parent.name, target.parent.name)

    def _exists(self) -> bool:
        return Path(str(self._get_load_path())).exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath, "version": self._version}


class PageDataset(PathDataset):
    """A page of HTML. Saved as text, loaded as the path that a browser opens."""

    def save(self, data: str) -> None:
        """Publish a page under this run's version."""
        target = Path(str(self._get_save_path()))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
        self._read_back(target)


class ArtifactDataset(PathDataset):
    """A directory with a manifest: a model, a split, an evaluation. Saved and loaded as a path.

    Saving creates a new version of hard links, without copying. An interrupted run leaves none.
    Published files share their bytes with the work directory: treat them as read-only.
    """

    def save(self, data: Path) -> None:
        """Publish a finished directory under this run's version."""
        try:
            manifest = Manifest.read(data)
        except ArtifactError as error:
            raise DatasetError(str(error)) from error
        target = Path(str(self._get_save_path()))
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")  # not a version
        what = f"stage {manifest.stage} is finished in {data} but not published as {target}"
        with explain_full_disk(what, target):
            try:
                shutil.copytree(data, partial, copy_function=_link_or_copy)
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

    def abandoned(self) -> list[Path]:
        """Directories of interrupted publications."""
        partials = Path(str(self._filepath)).glob(f"*/{self._filepath.name}.[0-9]*.partial")
        return sorted(
            path
            for path in partials
            if not psutil.pid_exists(int(path.suffixes[-2].removeprefix(".")))
        )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
