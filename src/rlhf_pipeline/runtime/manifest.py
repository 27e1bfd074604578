"""The manifest of an artifact: what it holds, byte for byte, and where it came from. Written last: no manifest, no artifact.

It holds a digest of itself, so that a damaged one is known from a whole one, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ArtifactError, ForeignFileError

NAME = "manifest.json"

NOT_OURS = "registered_model_meta"
"""What MLflow leaves in the folder of a model that it loads from its registry."""


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The lineage record of a finished stage."""

    stage: str
    fingerprint: str
    """Names the recipe: what decided the content. See `rlhf_pipeline.stages.cache.fingerprint`."""
    seed: int
    config: dict[str, Any]
    """The resolved parameters of the stage."""
    inputs: dict[str, str]
    """Input name to content digest."""
    versions: dict[str, str]
    """Library versions that change numbers."""
    metrics: dict[str, float]
    """The stage's result in numbers, `group/name`."""
    files: dict[str, FileEntry]
    """Path relative to the artifact to its size and digest."""
    ranks: int = 1
    """Processes that finished it; they may have gone on where another number of them was interrupted."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own configuration of each engine, by model."""
    adjusted: dict[str, Any] = field(default_factory=dict)
    """Parameters by place that are not as configured, because that took too much memory: {"configured": 8, "used": 4}."""

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read an artifact's manifest; raise `ArtifactError` where there is none or it cannot be understood."""
        path = directory / NAME
        try:
            fields = json.loads(path.read_text())
            if fields.pop("digest", None) != _digest(fields):
                raise ValueError("it is not what was written")
            files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
            return cls(files=files, **fields)
        except FileNotFoundError:
            raise ArtifactError(
                f"{directory} is not a finished artifact: it has no {NAME}"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(
                f"{path} is damaged ({error}); delete {directory} and run its stage again"
            ) from error

    def write(self, directory: Path) -> None:
        """Write the manifest whole or not at all."""
        partial = directory / f"{NAME}.partial"
        fields = asdict(self)
        partial.write_text(
            json.dumps(fields | {"digest": _digest(fields)}, indent=2, sort_keys=True)
        )
        partial.rename(directory / NAME)


def file_entries(directory: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below `directory`, the manifest itself left out."""
    return {
        name: FileEntry(path.stat().st_size, file_digest(path))
        for name, path in _files(directory).items()
    }


def _files(directory: Path) -> dict[str, Path]:
    """Every file below an artifact's directory by its relative path, the manifest itself left out."""
    found = sorted(
        path for path in directory.rglob("*") if path.is_file() and path != directory / NAME
    )
    return {path.relative_to(directory).as_posix(): path for path in found}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact_of(path: Path) -> Path | None:
    """The finished artifact that a folder is, or lies in; None where there is none, and for a file."""
    if path.is_file():
        return None
    return next((parent for parent in (path, *path.parents) if _is_ours(parent / NAME)), None)


def _is_ours(path: Path) -> bool:
    """Whether it is a manifest: others have files of that name, too. What cannot be read is taken for a damaged one."""
    try:
        fields = json.loads(path.read_text())
    except OSError:
        return False
    except ValueError:
        return True
    return isinstance(fields, dict) and "fingerprint" in fields


def content_digest(path: Path) -> str:
    """Digest of an input by content alone: equal bytes give equal digests, wherever and whenever they were made.

    A folder inside an artifact (`prepared / "sft"`) is digested from the manifest's entries below it, without reading the
    files; a plain file by its bytes.
    """
    owner = artifact_of(path)
    if owner is None:
        if not path.is_file():
            raise ArtifactError(
                f"{path} is neither a file nor part of a finished artifact: it is below no {NAME}"
            )
        return file_digest(path)
    prefix = "" if path == owner else path.relative_to(owner).as_posix() + "/"
    manifest = Manifest.read(owner)
    files = {
        name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(prefix)
    }
    if not files:
        raise ArtifactError(
            f"{path} holds nothing: {owner / NAME} lists no file below {prefix}; run stage {manifest.stage} with parameters "
            "that make it"
        )
    return _digest(files)


def folder_digest(directory: Path) -> str:
    """Digest of a folder that no stage made, by the names and bytes of all its files."""
    return _digest({name: entry.sha256 for name, entry in file_entries(directory).items()})


def verify(directory: Path) -> Manifest:
    """Check every file of an artifact against its manifest; the error names the first one that differs.

    Raises:
        ArtifactError: a file was changed or is missing, or the manifest is.
        ForeignFileError: a file was added. transformers would load it if it had the right name.
    """
    manifest = Manifest.read(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ArtifactError(
                f"{path} lies outside of its artifact, at {path.resolve()}; put the file itself there"
            )
        if not path.is_file():
            raise ArtifactError(
                f"{path} is missing from a finished artifact; run stage {manifest.stage} again"
            )
        if path.stat().st_size != entry.size or file_digest(path) != entry.sha256:
            raise ArtifactError(
                f"{path} was changed after stage {manifest.stage} finished: its SHA-256 is not {entry.sha256[:12]}...; "
                f"restore the file or run stage {manifest.stage} again"
            )
    for name, path in _files(directory).items():
        # A desktop or a file system leaves hidden files, which nothing loads.
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if name not in manifest.files and not hidden and name != NOT_OURS:
            raise ForeignFileError(
                f"{path} was added after stage {manifest.stage} finished; move it elsewhere"
            )
    return manifest
