"""The manifest of an artifact: the digest of every file, and the recipe that made them.

The manifest is written last: a folder without a manifest is not an artifact. The manifest contains
its own digest, which detects damage to the manifest itself. Digests are SHA-256, computed while
files are read or written, with a heartbeat for every piece.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ArtifactError, ForeignFileError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import write_atomically

NAME = "manifest.json"

CURVES = "metrics.jsonl"
"""File of a trained model with the metrics of every step. It says how the model was made, and when:
two trainings with the same result have different ones, so it does not count as content."""
PIECE = 2**24
"""Bytes that are read or written at a time."""

_known: dict[tuple[int, int, int, int], str] = {}
"""Digests of the large files that this process has read or written, by `_state`."""


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    size: int
    """Bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """The entry of a file.

        A file of at least one `PIECE` that this process has read or written is not read again,
        unless it has changed since. Smaller files may change twice within a tick of the clock.
        """
        found = _known.get(_state(path)) or _remember(path, file_digest(path))
        return cls(path.stat().st_size, found)

    def matches(self, path: Path) -> bool:
        """Whether a file has this size and these bytes. The file is always read."""
        return path.stat().st_size == self.size and file_digest(path) == self.sha256


@dataclass(frozen=True)
class Manifest:
    """The lineage record of a finished stage."""

    stage: str
    fingerprint: str
    """Digest of the recipe, see `rlhf_pipeline.stages.cache.fingerprint`."""
    seed: int
    config: dict[str, Any]
    """The resolved parameters of the stage."""
    inputs: dict[str, str]
    """Input name to content digest."""
    versions: dict[str, str]
    """Versions of the libraries that can change the result."""
    metrics: dict[str, float]
    """Final metrics of the stage, by `group/name`."""
    files: dict[str, FileEntry]
    """Size and digest of each file, by its path relative to the artifact."""
    ranks: int = 1
    """Ranks that finished the stage. An interrupted attempt may have had another number."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration of each engine, by model."""
    mixture: dict[str, list[str]] = field(default_factory=dict)
    """Published inputs of the pipeline run that other parameters made, with the changes."""
    ancestors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`origin` of all that the artifact was made from, by content digest, so that a copy of it
    knows its lineage where the other artifacts are missing."""

    @property
    def origin(self) -> dict[str, Any]:
        """What an artifact that was made from this one records about it."""
        return {"stage": self.stage, "config": self.config, "inputs": self.inputs}

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """`origin` of the artifact, and of all that it was made from."""
        return [self.origin, *self.ancestors.values()]

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read an artifact's manifest.

        Raises ArtifactError if the folder has no manifest, or the manifest is damaged.
        """
        path = directory / NAME
        try:
            return cls.parse(path.read_text())
        except FileNotFoundError:
            raise ArtifactError(
                f"{directory} is not a finished artifact: it has no {NAME}"
            ) from None
        except ValueError as error:
            raise ArtifactError(
                f"{path} is damaged ({error}). Fix: delete {directory} and run its stage again"
            ) from error

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """The manifest that a text contains. Raises ValueError if it is damaged."""
        try:
            fields = json.loads(text)
            if fields.pop("digest", None) != json_digest(fields):
                raise ValueError("its digest does not match")
            files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
            for name, entry in files.items():
                if name.startswith("/") or ".." in name.split("/") or "/" in entry.sha256:
                    raise ValueError("it names a file outside its folder")
            known = cls.__dataclass_fields__.keys() & fields.keys()  # another version has others
            return cls(files=files, **{name: fields[name] for name in known})
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def write(self, directory: Path) -> None:
        """Write the manifest completely or not at all."""
        fields = asdict(self)
        text = json.dumps(fields | {"digest": json_digest(fields)}, indent=2, sort_keys=True)
        write_atomically(directory / NAME, text)


def file_entries(directory: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below `directory`, except the manifest itself."""
    return {name: FileEntry.of(path) for name, path in _files(directory).items()}


def _files(directory: Path) -> dict[str, Path]:
    found = sorted(
        path for path in directory.rglob("*") if path.is_file() and path != directory / NAME
    )
    return {path.relative_to(directory).as_posix(): path for path in found}


def json_digest(value: Any) -> str:
    """SHA-256 of a value of JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def artifact_of(path: Path) -> Path | None:
    """The finished artifact that a folder is or belongs to. None: no artifact, or a file."""
    if path.is_file():
        return None
    return next((parent for parent in (path, *path.parents) if _is_ours(parent / NAME)), None)


def _is_ours(path: Path) -> bool:
    """Whether a file is a manifest of this package; other programs use the same file name.

    A file that is not JSON counts as a damaged manifest.
    """
    try:
        fields = json.loads(path.read_text())
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True
    return isinstance(fields, dict) and "fingerprint" in fields


def content_digest(path: Path) -> str:
    """Digest of an input by content alone: equal bytes give equal digests.

    A folder inside an artifact, such as `split / "sft"`, is digested from the manifest's entries
    below it except `CURVES`, without reading the files; a plain file by its bytes. Raises
    ArtifactError if the path is neither a file nor in an artifact, or the folder has no files.
    """
    owner = artifact_of(path)
    if owner is None:
        if not path.is_file():
            raise ArtifactError(
                f"{path} is neither a file nor part of a finished artifact: no folder above it "
                f"contains a {NAME}"
            )
        return file_digest(path)
    prefix = "" if path == owner else path.relative_to(owner).as_posix() + "/"
    manifest = Manifest.read(owner)
    files = {
        name: entry.sha256
        for name, entry in manifest.files.items()
        if name.startswith(prefix) and name != CURVES
    }
    if not files:
        raise ArtifactError(
            f"{path} is empty: {owner / NAME} lists no file below {prefix}. Fix: run stage "
            f"{manifest.stage} with parameters that create it"
        )
    return json_digest(files)


def folder_digest(directory: Path) -> str:
    """Digest of a folder that no stage made, from the names and bytes of all its files."""
    return _folder_digest(file_entries(directory))


def copy_folder(source: Path, target: Path) -> str:
    """Copy a folder that no stage made; return its `folder_digest`. Each file is read once."""
    entries = {}
    for name, path in _files(source).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        entries[name] = write_pieces(target / name, read_pieces(path))
    return _folder_digest(entries)


def _folder_digest(entries: Mapping[str, FileEntry]) -> str:
    return json_digest({name: entry.sha256 for name, entry in entries.items()})


def verify(directory: Path) -> Manifest:
    """Check every file of an artifact against its manifest.

    Raises:
        ArtifactError: a file was changed or is missing, or the manifest is; names the first one.
        ForeignFileError: a file was added. transformers would load it if it had the right name.
    """
    manifest = Manifest.read(directory)
    for name in manifest.files:
        _check(directory, name, manifest)
    for name, path in _files(directory).items():
        # Desktops and file systems add hidden files, which nothing loads.
        hidden = any(part.startswith(".") for part in Path(name).parts)
        is_known = name in manifest.files or name == "registered_model_meta"  # of MLflow's registry
        if not is_known and not hidden:
            raise ForeignFileError(
                f"{path} was added after stage {manifest.stage} finished. Fix: move it elsewhere"
            )
    return manifest


def verified(directory: Path, name: str) -> Path:
    """The path of one file of an artifact, checked against its manifest; raises like `verify`."""
    _check(directory, name, Manifest.read(directory))
    return directory / name


def _check(directory: Path, name: str, manifest: Manifest) -> None:
    path, entry = directory / name, manifest.files.get(name)
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ArtifactError(
            f"{path} is outside its artifact, at {path.resolve()}. Fix: replace the link by the "
            "file"
        )
    if entry is None or not path.is_file():
        raise ArtifactError(
            f"{path} is missing from a finished artifact. Fix: run stage {manifest.stage} again"
        )
    if not entry.matches(path):
        raise ArtifactError(
            f"{path} was changed after stage {manifest.stage} finished: expected SHA-256 "
            f"{entry.sha256[:12]}... Fix: restore the file or run stage {manifest.stage} again"
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. The file is always read."""
    return digest_of(read_pieces(path))


def digest_of(pieces: Iterable[bytes]) -> str:
    """SHA-256 of bytes that come in pieces, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        heartbeat.report_progress()
    return digest.hexdigest()


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file; return its entry, computed from the given bytes without reading the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        for piece in pieces:
            digested = beside.submit(digest.update, piece)  # while the file is written
            file.write(piece)
            digested.result()
            heartbeat.report_progress()
    return FileEntry(path.stat().st_size, _remember(path, digest.hexdigest()))


def read_pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, at most `PIECE` of them at a time."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _remember(path: Path, digest: str) -> str:
    if path.stat().st_size >= PIECE:
        _known[_state(path)] = digest
    return digest


def _state(path: Path) -> tuple[int, int, int, int]:
    """What changes when a file is replaced or written to, but not when it is renamed."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
