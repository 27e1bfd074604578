"""Reading from real stores: an S3 server, and fsspec's memory."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline.data.files import origin
from rlhf_pipeline.errors import DataError

Read = Callable[..., list[tuple[str, Any]]]


def test_memory(read: Read) -> None:
    fsspec.filesystem("memory").pipe("/stores/a.jsonl", b'{"x": 1}\n')
    assert read("memory://stores/a.jsonl") == [("a.jsonl:1", {"x": 1})]
    assert read("memory://stores/*") == [("a.jsonl:1", {"x": 1})]


def test_reading_from_s3(bucket: Path, read: Read) -> None:
    (bucket / "read").mkdir()
    (bucket / "read" / "b.jsonl").write_bytes(b'{"x": 1}\n')
    (bucket / "read" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 2}\n{"x": 3}\n'))
    parquet = io.BytesIO()
    pq.write_table(pa.table({"x": [4], "y": [5]}), parquet)
    (bucket / "read" / "c.parquet").write_bytes(parquet.getvalue())
    (bucket / "read" / "d.parquet.gz").write_bytes(gzip.compress(parquet.getvalue()))
    assert read("s3://bucket/read/b.jsonl") == [("b.jsonl:1", {"x": 1})]
    assert read("s3://bucket/read/*", ["x"]) == [
        ("a.jsonl.gz:1", {"x": 2}),
        ("a.jsonl.gz:2", {"x": 3}),
        ("b.jsonl:1", {"x": 1}),
        ("c.parquet:1", {"x": 4}),
        ("d.parquet.gz:1", {"x": 4}),
    ]


def test_a_saved_data_set_on_s3(bucket: Path, read: Read) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"x": [1, 2]})}).save_to_disk(
        str(bucket / "saved")
    )
    assert read("s3://bucket/saved", (), "test") == [
        ("saved/test:1", {"x": 1}),
        ("saved/test:2", {"x": 2}),
    ]
    assert "test/data-00000-of-00001.arrow" in origin("s3://bucket/saved").identities


def test_the_identity_on_s3_is_that_of_the_bytes(bucket: Path) -> None:
    for name in ("one", "two"):
        (bucket / name).mkdir()
        (bucket / name / "a.jsonl").write_bytes(b'{"x": 1}\n')
    first = origin("s3://bucket/one/a.jsonl")
    # MD5 of the nine bytes, as md5sum prints it.
    assert first.identities == {"a.jsonl": "ETag 15058b6e28ee0b319e87b24f005b9187, 9 bytes"}
    assert origin("s3://bucket/one/*.jsonl") == first
    assert origin("s3://bucket/two/a.jsonl") == first
    (bucket / "one" / "a.jsonl").write_bytes(b'{"x": 2}\n')
    assert origin("s3://bucket/one/a.jsonl") != first
    assert origin("s3://bucket/one/*.jsonl") != first


@pytest.mark.parametrize(
    "path",
    ["s3://none/a.jsonl", "s3://none/*.jsonl", "s3://bucket/none.jsonl", "s3://bucket/*.none"],
)
def test_no_such_bucket_or_key(bucket: Path, path: str) -> None:
    with pytest.raises(
        DataError, match=r"^s3://.*: not found \(.*\)\. Fix: correct the source's `path`"
    ):
        origin(path)


@pytest.mark.parametrize("path", ["s3://bucket/a.jsonl", "s3://bucket/*.jsonl"])
def test_a_wrong_secret(bucket: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (bucket / "a.jsonl").write_bytes(b'{"x": 1}\n')
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    with pytest.raises(DataError, match=r"^s3://.*: access denied \(.*Forbidden\)") as caught:
        origin(path)
    assert "guessed" not in str(caught.value)


def test_a_secret_in_the_url(bucket: Path) -> None:
    with pytest.raises(
        DataError, match=r"^s3://...@bucket/a.jsonl: cannot be read \(ParamValidationError\)"
    ):
        origin("s3://access:sec/ret@bucket/a.jsonl")


def test_a_connection_that_breaks(
    bucket: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file disappears after the store has listed it."""
    from botocore.exceptions import EndpointConnectionError
    from s3fs import S3File

    (bucket / "long.jsonl").write_bytes(b'{"x": 1}\n')

    def read_nothing(*_: Any) -> bytes:
        raise EndpointConnectionError(endpoint_url="http://store")

    monkeypatch.setattr(S3File, "read", read_nothing)
    with pytest.raises(
        DataError, match=r"s3://bucket/long.jsonl: cannot be read \(Could not connect"
    ):
        read("s3://bucket/long.jsonl")
