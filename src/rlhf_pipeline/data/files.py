"""Data files, local or in any store that fsspec supports: found, identified, and read as rows.

Libraries that take long to import are imported late: the driver looks for files in each run.
"""

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused, is_utf8
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError, PipelineError, install, without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("jsonl", "json", "csv", "parquet", "txt")
MAX_CHARACTERS = 16 * 2**20
"""Limit for a row of JSON or CSV and a piece of text."""
_PIECE = 2**20
_BATCH_ROWS = 1_000
_BLANK = re.compile(r"[ \t\n\r]*")
_CHECKSUMS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""Fields in which stores report the identity of a file's bytes, best first."""
_QUERY_VARIABLE = re.compile(r"(https?://[^?]*\?)\$(\w+)")

Stream = io.BufferedReader | gzip.GzipFile
Numbered = Iterator[tuple[int, Row | Unused]]
"""Rows by their number or line, from 1."""


@dataclass(frozen=True)
class File:
    """One file, not yet opened."""

    name: str
    """Unique among the files of a path, whatever the folder that contains them."""
    path: str
    store: fsspec.AbstractFileSystem

    @property
    def local(self) -> Path | None:
        return Path(self.path) if isinstance(self.store, LocalFileSystem) else None

    @property
    def url(self) -> str:
        return self.path if self.local else str(self.store.unstrip_protocol(self.path))

    @property
    def format(self) -> str:
        """The format, by suffix; raises DataError for an unknown one."""
        suffix = PurePosixPath(self.name.lower().removesuffix(".gz")).suffix.removeprefix(".")
        if suffix not in FORMATS:
            known = ", ".join(f".{format}" for format in FORMATS)
            raise DataError(
                f"{without_secrets(self.url)}: unknown file format; expected {known}, each also "
                "with .gz. Fix: convert or rename the file, or select the data files with a glob."
            )
        return suffix


@dataclass(frozen=True)
class Location:
    """The files at a path, by name."""

    files: tuple[File, ...]
    saved: str | None = None
    """Their folder, if `save_to_disk` of the datasets library wrote it."""


def find_files(path: str) -> Location:
    """Find the files at a local path or fsspec URL: a file, a glob, or a saved data set. Raises
    DataError if no file was found, one has an unknown format, or the store is unreachable."""
    with explain_store_errors(path):
        store, root = fsspec.url_to_fs(_with_query(path))
        store.invalidate_cache()  # files may have changed since an earlier listing
        try:
            infos = {root: store.info(root)}
        except FileNotFoundError:
            infos = store.glob(root, detail=True)
            if not infos:
                raise
        if root in infos and infos[root]["type"] == "directory":
            return _saved_location(path, store, root)
        paths = [found for found, info in infos.items() if info["type"] == "file"]
        if not paths:
            raise FileNotFoundError("the path exists, but is not a file")
    files = tuple(File(name, found, store) for name, found in _named(paths))
    for file in files:
        _ = file.format  # raises before any file is read
    return Location(files)


def origin(path: str) -> tuple[dict[str, Path], dict[str, str]]:
    """The local files at a path, and the identities that stores report of remote ones, by name.

    Raises like `find_files`, and if a store tells no identity of a file.
    """
    files = find_files(path).files
    local = {file.name: file.local for file in files if file.local is not None}
    return local, {file.name: _identity(file) for file in files if file.local is None}


@contextmanager
def explain_store_errors(url: str, kind: type[PipelineError] = DataError) -> Iterator[None]:
    """Turn any error of the store, whatever its type, into one of this kind with URL and fix."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        shown = without_secrets(url)
        match error:
            case ImportError():
                reason = "the store needs a package that is not installed"
                fix = f"for S3: {install('s3')}"
            case FileNotFoundError():
                reason = "not found"
                fix = "correct the path; a relative one starts at the current folder."
            case PermissionError():
                reason = "access denied"
                fix = "correct the permissions of the file, or the credentials of the store."
            case _:
                reason = "cannot be read"
                fix = "check the path; for a remote store also endpoint, credentials and network."
        # fsspec's HTTP store reports every error as a missing file; the cause is the real error.
        cause = error.__cause__ or error
        said = shorten(without_secrets(str(cause)), 300)
        details = type(cause).__name__
        if said and shown == url:  # else the store's message may repeat the secret of the URL
            details += f": {said}"
        raise kind(f"{shown}: {reason} ({details}). Fix: {fix}") from None


def _with_query(path: str) -> str:
    if (found := _QUERY_VARIABLE.fullmatch(path)) is None:
        return path
    start, name = found.groups()
    if name in os.environ:
        return f"{start}{os.environ[name].removeprefix('?')}"
    raise DataError(
        f"{path}: environment variable {name} is not set. Fix: export it with the query of the URL."
    )


def _identity(file: File) -> str:
    with explain_store_errors(file.url):
        info = file.store.info(file.path)
        for name in _CHECKSUMS:
            if info.get(name):
                checksum = str(info[name]).strip('"')  # S3 quotes it in some responses only
                return f"{name} {checksum}, {info['size']} bytes"
        if "url" in info:  # HTTP: `ukey` does not depend on the content
            raise DataError(
                f"{without_secrets(file.url)}: the server sends no ETag, checksum or date, so a "
                "changed file would not be noticed. Fix: download the file, and set `path` to the "
                "copy."
            )
        return str(file.store.ukey(file.path))


def _saved_location(path: str, store: fsspec.AbstractFileSystem, root: str) -> Location:
    if not any(store.isfile(f"{root}/{marker}") for marker in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{path}: expected files, or a folder written by `save_to_disk`; "
            "found another folder. Fix: select the files in the folder, for example "
            f"{path.rstrip('/')}/*.parquet."
        )
    paths = sorted(store.find(root))
    return Location(
        tuple(File(found.removeprefix(f"{root}/"), found, store) for found in paths),
        root if isinstance(store, LocalFileSystem) else store.unstrip_protocol(root),
    )


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Paths by name: the shortest endings that are distinct, which are base names in most cases."""
    parts = [(path.partition("?")[0] if "://" in path else path).split("/") for path in paths]
    for depth in count(1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len({*names}) == len(names):
            break
    return sorted(zip(names, paths, strict=True))


def read_rows(path: str, columns: Sequence[str], split: str) -> Iterator[tuple[str, Row | Unused]]:
    """Yield every row with its place, file after file by name, in constant memory.

    A place is "name.jsonl:17": the line, or in JSON arrays, Parquet and saved data sets the row,
    from 1. A broken row is `Unused`. `columns` are those that the caller reads, dotted if nested,
    or empty for all; rows may lack all others. `split` is that of a saved DatasetDict. Raises
    DataError if a file is not found, not reachable, damaged or empty.
    """
    location = find_files(path)
    if (folder := location.saved) is not None:
        has_splits = any(file.name == "dataset_dict.json" for file in location.files)
        name = folder.rpartition("/")[2] + (f"/{split}" if has_splits else "")
        yield from _with_places(name, folder, _saved_rows(folder, columns, split))
        return
    for file in location.files:
        yield from _with_places(file.name, file.url, _file_rows(file, columns))


def _with_places(name: str, url: str, rows: Numbered) -> Iterator[tuple[str, Row | Unused]]:
    line, shown = 0, without_secrets(url)
    try:
        for line, row in rows:
            yield f"{name}:{line}", row
    except _FileFault as fault:
        raise DataError("{}:{}: {}".format(shown, *fault.args)) from None
    except Exception as error:
        if not _is_damage(error, is_remote="://" in url):
            with explain_store_errors(url):
                raise
        raise DataError(
            f"{shown}:{line + 1}: the file is damaged from here on ({shorten(str(error), 300)}). "
            "Fix: download or create the file again."
        ) from error
    if line == 0:
        raise DataError(
            f"{shown}: the file contains no rows. Fix: download or create the file again, or set "
            "`path` to another one."
        )


def _is_damage(error: Exception, *, is_remote: bool) -> bool:
    """Whether an error while reading is due to the bytes, not to the store."""
    import pyarrow as pa

    if isinstance(error, OSError):
        is_missing = isinstance(error, FileNotFoundError | PermissionError)
        return isinstance(error, gzip.BadGzipFile) or not (is_remote or is_missing)
    # UnicodeDecodeError stems from the name of a Parquet column.
    return isinstance(error, EOFError | zlib.error | pa.ArrowException | UnicodeDecodeError)


def _file_rows(file: File, columns: Sequence[str]) -> Numbered:
    readers: dict[str, Callable[[Stream], Numbered]] = {
        "jsonl": lambda stream: _json_lines(_lines(_decode(stream, newline="\n"))),
        "json": _json_rows,
        "csv": _csv_rows,
        "txt": _text_rows,
        "parquet": partial(_parquet_rows, columns=columns),
    }
    with file.store.open(file.path, "rb") as stored:
        packed = file.name.lower().endswith(".gz")
        yield from readers[file.format](gzip.GzipFile(fileobj=stored) if packed else stored)


def _parquet_rows(stream: Stream, columns: Sequence[str]) -> Numbered:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, pre_buffer=False)  # it would read the whole file ahead
    chosen = _requested_columns(columns, file.schema_arrow.names)
    yield from _number_rows(file.iter_batches(_BATCH_ROWS, columns=chosen))


def _saved_rows(folder: str, columns: Sequence[str], split: str) -> Numbered:
    import datasets

    saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(
                f"{folder}: split {split!r} not found. Fix: set the source's "
                f"`split` to one of: {', '.join(saved)}."
            )
        saved = saved[split]
    yield from data_set_rows(saved, columns)


def data_set_rows(data_set: Any, columns: Sequence[str]) -> Numbered:
    """Yield the requested columns of every row of a data set, numbered from 1."""
    chosen = data_set.select_columns(_requested_columns(columns, data_set.column_names))
    yield from _number_rows(chosen.with_format("arrow").iter(_BATCH_ROWS))


def _requested_columns(columns: Sequence[str], names: list[str]) -> list[str]:
    """The requested columns; all if one is missing, since the message about it lists them."""
    starts = {column: column.partition(".")[0] for column in columns}
    if not columns or any(not {column, start} & {*names} for column, start in starts.items()):
        return names
    return [name for name in names if name in {*starts, *starts.values()}]


def _number_rows(batches: "Iterable[pa.RecordBatch | pa.Table]") -> Numbered:
    import pyarrow as pa

    def rows(batch: pa.RecordBatch | pa.Table) -> list[Row | Unused]:
        try:
            batch.validate(full=True)  # converting a damaged batch would crash the process
            return batch.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError):
            if batch.num_rows == 1:
                return [Unused("a value that is not valid, such as text that is not UTF-8")]
            return [row for index in range(batch.num_rows) for row in rows(batch.slice(index, 1))]

    return enumerate(chain.from_iterable(map(rows, batches)), start=1)


def _text_rows(stream: Stream) -> Numbered:
    """The file as one document; a longer one is cut at line ends, after a million characters."""
    file = _decode(stream, newline="\n")
    line = 1
    while piece := file.read(_PIECE):
        piece += file.readline(MAX_CHARACTERS)
        if piece.strip():
            yield line, {"text": piece} if is_utf8(piece) else Unused(NOT_UTF8)
        line += piece.count("\n")


def _csv_rows(stream: Stream) -> Numbered:
    """RFC 4180; a row has the number of the line where it begins, and blank lines are no rows."""
    csv.field_size_limit(MAX_CHARACTERS)  # the default of 128 KiB is less than a long answer
    size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        for line in _lines(_decode(stream, newline="")):
            if (size := size + len(line)) > MAX_CHARACTERS:
                fault = f"the row has more than {MAX_CHARACTERS} characters. Fix: close its quote."
                raise _FileFault(begin, fault)
            yield line

    reader = csv.reader(lines(), strict=True)
    header = list[str]()
    while True:
        begin, fault, size = reader.line_num + 1, None, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error) or "field limit" in str(error):
                fix = "Fix: close its quote; double a quote inside a field."
                raise _FileFault(begin, f"the row does not end ({error}). {fix}") from None
            fields, fault = [], f"not CSV ({error})"
        if not fields and not fault:
            continue
        if not header:
            unread = f"the header line is {fault}. Fix: correct it."
            if message := unread if fault else _header_fault(fields):
                raise _FileFault(begin, message)
            header = fields
            continue
        if not fault and len(fields) != len(header):
            fault = f"{'fewer' if len(fields) < len(header) else 'more'} fields than the header has"
        elif not is_utf8("".join(fields)):
            fault = NOT_UTF8
        yield begin, Unused(fault) if fault else dict(zip(header, fields, strict=True))


def _header_fault(header: list[str]) -> str | None:
    names = "".join(header)
    if "\0" in names:
        return "the header line has NUL bytes. Fix: convert the file from UTF-16 to UTF-8."
    if not is_utf8(names):
        return f"the header line is {NOT_UTF8}. Fix: {TO_UTF8}"
    if twice := [name for name, found in Counter(header).items() if found > 1]:
        return f"the header has column {twice[0]!r} twice. Fix: rename or remove one."
    if len(header) == 1 and (delimiter := next((d for d in ";\t|" if d in names), None)):
        return (
            f"the header is one column, {names!r}: is the delimiter {delimiter!r}? Fix: write the "
            "file with commas, or as .jsonl."
        )
    return None


def _json_rows(stream: Stream) -> Numbered:
    """An array if the file starts with "[", else JSON Lines."""
    file, blank = _decode(stream, newline="\n"), 0
    while (first := file.readline(MAX_CHARACTERS + 1)) and not first.strip():
        blank += first.count("\n")
    if first.lstrip().startswith("["):
        return _array(_Window(file, "\n" * blank + first))
    return _json_lines(chain(["\n"] * blank, _lines(file, first, blank + 1)))


def _array(window: "_Window") -> Numbered:
    try:
        window.next_mark()
        window.at += 1
        number, more = 0, window.next_mark() != "]"
        while more:
            number += 1
            yield number, window.next_element()
            mark = window.next_mark()
            if mark not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", window.text, window.at)
            more = mark == ","
            window.at += more
        window.at += 1
        if window.next_mark():
            raise json.JSONDecodeError("Extra data", window.text, window.at)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else window.at
        raise _FileFault(
            window.line + window.text.count("\n", 0, at),
            f"the JSON array is broken ({_json_fault(error)}). Fix: correct it, or write one "
            "object per line (.jsonl).",
        ) from None


class _Window:
    """The part of a JSON array that is in memory, of which `begin` was read already."""

    def __init__(self, file: io.TextIOWrapper, begin: str) -> None:
        self._file = file
        self.text, self.at = begin, 0
        self.line = 1
        """Line of the file in which `text` begins."""

    def next_mark(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or not self._grow():
                return self.text[self.at : self.at + 1]

    def next_element(self) -> Row | Unused:
        """Raises JSONDecodeError, or another ValueError or RecursionError, at what is no JSON."""
        self.next_mark()
        while True:
            size = len(self.text) - self.at
            more = min(size, MAX_CHARACTERS - size)
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:  # broken, or cut
                if size > MAX_CHARACTERS:
                    error.msg += f", or the row has more than {MAX_CHARACTERS} characters"
                if size > MAX_CHARACTERS or not self._grow(more):
                    raise
                continue
            if end + len("e+") >= len(self.text) and self._grow(more):
                continue  # a number may be cut
            begin, self.at = self.at, end
            return _object(value, self.text[begin:end])

    def _grow(self, size: int = 0) -> bool:
        """Read on, and forget what is before `at`; False at the end of the file."""
        piece = self._file.read(max(size, _PIECE))
        if piece:
            self.line += self.text.count("\n", 0, self.at)
            self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)


def _json_lines(lines: Iterable[str]) -> Numbered:
    for number, line in enumerate(lines, start=1):
        try:
            yield number, _object(json.loads(line), line)
        except (ValueError, RecursionError) as error:
            fault = f"not JSON ({_json_fault(error)})"
            if "\0" in line:
                fault = "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"
            elif not is_utf8(line):
                fault = NOT_UTF8
            if line.strip():
                yield number, Unused(fault)


def _object(value: Any, written: str) -> Row | Unused:
    if not is_utf8(written):
        return Unused(NOT_UTF8)
    if isinstance(value, dict):
        return value
    return Unused(f"a JSON {type(value).__name__}, not an object")


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    deep = isinstance(error, RecursionError)
    return "nested too deeply" if deep else "a number of too many digits"


def _lines(file: io.TextIOWrapper, begin: str = "", start: int = 1) -> Iterator[str]:
    """The lines of a file, of which `begin` was read already, from number `start`.

    Raises _FileFault at a line without an end.
    """
    lines = iter(partial(file.readline, MAX_CHARACTERS + 1), "")
    for number, line in enumerate(chain(filter(None, [begin]), lines), start=start):
        if len(line) > MAX_CHARACTERS:
            reason = f"the line has more than {MAX_CHARACTERS} characters"
            raise _FileFault(number, f"{reason}. Fix: write one row per line, or split it.")
        yield line


def _decode(stream: Stream, newline: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


class _FileFault(Exception):  # noqa: N818 - a fault of the file
    """A reader cannot continue at this line, for this reason with its fix."""
