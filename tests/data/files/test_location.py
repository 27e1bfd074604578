from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from fsspec.registry import _registry as fsspec_registry

from rlhf_pipeline.data.files import find_files
from rlhf_pipeline.errors import DataError

Write = Callable[[str, bytes], str]


def names(path: str) -> list[str]:
    return [file.name for file in find_files(path).files]


def test_a_file(write: Write) -> None:
    (file,) = find_files(write("a/b.jsonl.gz", b"")).files
    assert (file.name, file.format, file.gzipped) == ("b.jsonl.gz", "jsonl", True)
    (file,) = find_files(write("a/B.CSV", b"")).files
    assert (file.name, file.format, file.gzipped) == ("B.CSV", "csv", False)


def test_a_glob_is_sorted_by_name(write: Write, tmp_path: Path) -> None:
    for name in ("y/1.jsonl", "x/2.jsonl", "x/3.csv", "z.jsonl"):
        write(name, b"")
    assert names(f"{tmp_path}/*/*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["1.jsonl", "2.jsonl", "z.jsonl"]
    assert names(f"{tmp_path}/x/[23].*") == ["2.jsonl", "3.csv"]


def test_files_of_the_same_name_have_distinct_names(write: Write, tmp_path: Path) -> None:
    for name in ("b/in/t.jsonl", "a/in/t.jsonl", "a/out/t.jsonl"):
        write(name, b"")
    assert names(f"{tmp_path}/*/in/*") == ["a/in/t.jsonl", "b/in/t.jsonl"]
    assert names(f"{tmp_path}/a/*/*") == ["in/t.jsonl", "out/t.jsonl"]


def test_a_file_name_with_glob_characters(write: Write, tmp_path: Path) -> None:
    write("a1.jsonl", b"")
    assert names(write("a[1].jsonl", b"")) == ["a[1].jsonl"]


def test_the_home_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write("own.jsonl", b"")
    (file,) = find_files("~/own.jsonl").files
    assert file.local == tmp_path / "own.jsonl"
    assert names("~/*.jsonl") == ["own.jsonl"]


def test_a_relative_path_and_a_file_url(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("own.jsonl", b"")
    for path in ("own.jsonl", f"file://{tmp_path}/own.jsonl"):
        (file,) = find_files(path).files
        assert file.local == tmp_path / "own.jsonl"


def test_every_file_of_a_saved_data_set_counts(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"x": [1]})
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "many"))
    parts = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"]
    assert names(f"{tmp_path}/one/") == parts
    assert names(f"{tmp_path}/many") == ["dataset_dict.json", *(f"test/{part}" for part in parts)]
    assert find_files(f"{tmp_path}/many").saved == str(tmp_path / "many")


def test_another_folder(write: Write, tmp_path: Path) -> None:
    write("some/a.parquet", b"")
    with pytest.raises(
        DataError,
        match=r"/some: expected files, or a folder written by `save_to_disk`; .* "
        r"/.*/some/\*.parquet",
    ):
        find_files(f"{tmp_path}/some")


@pytest.mark.parametrize(
    "path", ["none.jsonl", "*.jsonl", "none/*.jsonl", "memory://none.jsonl", "memory://*.jsonl"]
)
def test_nothing_there(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"\.jsonl: not found \(.*\)\. Fix: correct the source's `path`"
    ):
        find_files(path)


def test_no_file() -> None:
    with pytest.raises(DataError, match="/dev/null: not found"):
        find_files("/dev/null")


@pytest.mark.parametrize("name", ["a.zip", "a.jsonl.zst", "jsonl", "gz", "a."])
def test_an_unknown_file_format(write: Write, tmp_path: Path, name: str) -> None:
    write("x/a.jsonl", b"")
    write(f"x/{name}", b"")
    with pytest.raises(
        DataError,
        match=rf"x/{name}: unknown file format; expected \.jsonl, \.json, \.csv, \.parquet, \.txt",
    ):
        find_files(f"{tmp_path}/x/*")


def test_a_store_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(fsspec_registry, "s3", raising=False)  # an earlier test may have used it
    with pytest.raises(
        DataError,
        match=r"s3://bucket/a.jsonl: .* not installed .*pip install --constraint "
        r"constraints\.txt 'rlhf-pipeline\[s3\]'$",
    ):
        find_files("s3://bucket/a.jsonl")


def test_an_unknown_store() -> None:
    with pytest.raises(
        DataError, match=r"nowhere://a.jsonl: cannot be read \(Protocol not known: nowhere\)"
    ):
        find_files("nowhere://a.jsonl")


@pytest.mark.parametrize(
    "path", ["http://me:key@127.0.0.1:9/a.jsonl", "http://127.0.0.1:9/a.jsonl?key"]
)
def test_messages_of_a_store_show_no_secret(path: str) -> None:
    with pytest.raises(DataError, match=r"not found \(ClientConnectorError\)") as caught:
        find_files(path)
    assert "key" not in str(caught.value)


def test_the_query_of_a_signed_url_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        DataError,
        match=r"^http://127\.0\.0\.1:9/a\.jsonl\?\.\.\.: environment variable SIGNED_QUERY is "
        r"not set",
    ):
        find_files("http://127.0.0.1:9/a.jsonl?$SIGNED_QUERY")
    monkeypatch.setenv("SIGNED_QUERY", "?sign=key")
    with pytest.raises(DataError, match=r"not found \(ClientConnectorError\)") as caught:
        find_files("http://127.0.0.1:9/a.jsonl?$SIGNED_QUERY")
    assert "key" not in str(caught.value)
