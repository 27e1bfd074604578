"""Files at a path or URL: found, identified, opened; the stores are real."""

import gzip
import http.server
import sys
import threading

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry as fsspec_registry

from rlhf_pipeline.data.files import find_files, origin
from rlhf_pipeline.errors import DataError


def names(path):
    return [file.name for file in find_files(path).files]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a/b.jsonl.gz", ["b.jsonl.gz"]),
        ("a/B.CSV", ["B.CSV"]),
        ("*/*.jsonl", ["1.jsonl", "2.jsonl"]),
        ("**/*.jsonl", ["1.jsonl", "2.jsonl", "z.jsonl"]),
        ("x/[23].*", ["2.jsonl", "3.csv"]),
        ("a[1].json", ["a[1].json"]),  # a name, although it has the characters of a glob
        # The shortest names that differ.
        ("*/in/*", ["c/in/t.txt", "d/in/t.txt"]),
        ("c/*/*", ["in/t.txt", "out/t.txt"]),
    ],
)
def test_files_by_name(write, tmp_path, pattern, found):
    made = "a/b.jsonl.gz a/B.CSV y/1.jsonl x/2.jsonl x/3.csv z.jsonl a1.json a[1].json"
    for name in [*made.split(), "d/in/t.txt", "c/in/t.txt", "c/out/t.txt"]:
        write(name, b"")
    assert names(f"{tmp_path}/{pattern}") == found


def test_local_paths(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write("own.jsonl", b"1")
    for path in ("~/own.jsonl", "~/*.jsonl", "own.jsonl", f"file://{tmp_path}/own.jsonl"):
        assert origin(path) == ({"own.jsonl": tmp_path / "own.jsonl"}, {})


def test_every_file_of_a_saved_data_set_counts(tmp_path):
    data = datasets.Dataset.from_dict({"x": [1]})
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "many"))
    parts = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"]
    assert names(f"{tmp_path}/one/") == parts
    assert names(f"{tmp_path}/many") == ["dataset_dict.json", *(f"test/{part}" for part in parts)]
    assert find_files(f"{tmp_path}/many").saved == str(tmp_path / "many")


SUFFIXES = r"unknown file format; expected \.jsonl, \.json, \.csv, \.parquet, \.txt"
NOT_FOUND = r"not found \(.*\)\. Fix: correct the path"
REFUSED = r"not found \(ClientConnectorError\)"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("some", r"^some: expected files, or a folder written by .* Fix: .* some/\*\.parquet"),
        *((f"x/{name}", SUFFIXES) for name in ("a.zip", "a.jsonl.zst", "jsonl", "gz", "a.")),
        *((path, NOT_FOUND) for path in ("none.jsonl", "*.jsonl", "none/*.jsonl")),
        *((f"memory://{name}.jsonl", NOT_FOUND) for name in ("none", "*")),
        ("/dev/null", "/dev/null: not found"),
        ("nowhere://a.jsonl", r"cannot be read \(ValueError: Protocol not known: nowhere\)"),
        # No message shows the secret.
        ("http://me:secret@127.0.0.1:9/a.jsonl", REFUSED),
        ("http://127.0.0.1:9/a.jsonl?secret", REFUSED),
        ("http://127.0.0.1:9/a.jsonl?$SIGNED_QUERY", REFUSED),
        ("http://127.0.0.1:9/a.jsonl?$NONE", r"l\?\.\.\.: environment variable NONE is not set"),
    ],
)  # fmt: skip
def test_paths_without_files(write, tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIGNED_QUERY", "?sign=secret")
    write("some/a.parquet", b"")
    for name in ("a.zip", "a.jsonl.zst", "jsonl", "gz", "a."):
        write(f"x/{name}", b"")
    with pytest.raises(DataError, match=message) as caught:
        find_files(path)
    assert "secret" not in str(caught.value)


def test_a_store_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(fsspec_registry, "s3", raising=False)  # an earlier test may have used it
    fix = r"pip install --constraint constraints\.txt 'boto3\S*' 's3fs\S*'$"
    with pytest.raises(DataError, match=rf"s3://bucket/a.jsonl: .* not installed .*{fix}"):
        find_files("s3://bucket/a.jsonl")


class _Handler(http.server.BaseHTTPRequestHandler):
    headers_sent: dict[str, str]

    def do_GET(self):
        self.send_response(200 if self.path.startswith("/a.jsonl") else 403)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_): ...


@pytest.fixture
def web():
    """The URL of a server that answers with `_Handler.headers_sent`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_identity_that_a_web_server_reports(web):
    for sent, identity in (
        ({"ETag": '"abc"', "Last-Modified": "Mon"}, "ETag abc, 7 bytes"),
        ({"Last-Modified": "Mon, 01 Jan 2024"}, "Last-Modified Mon, 01 Jan 2024, 7 bytes"),
    ):
        _Handler.headers_sent = {"Content-Length": "7", **sent}
        assert origin(f"{web}/a.jsonl?sign=key") == ({}, {"a.jsonl": identity})
    _Handler.headers_sent = {"Content-Length": "7"}
    with pytest.raises(DataError, match=r"/a.jsonl: the server sends no ETag, .* Fix: downl"):
        origin(f"{web}/a.jsonl")


def test_reading_from_s3(bucket, read):
    folder = bucket / "read"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(b'{"x": 1}\n')
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 2}\n{"x": 3}\n'))
    pq.write_table(pa.table({"x": [4], "y": [5]}), folder / "c.parquet")
    (folder / "d.parquet.gz").write_bytes(gzip.compress((folder / "c.parquet").read_bytes()))
    assert read("s3://bucket/read/b.jsonl") == [("b.jsonl:1", {"x": 1})]
    assert read("s3://bucket/read/*", ["x"]) == [
        ("a.jsonl.gz:1", {"x": 2}),
        ("a.jsonl.gz:2", {"x": 3}),
        ("b.jsonl:1", {"x": 1}),
        ("c.parquet:1", {"x": 4}),
        ("d.parquet.gz:1", {"x": 4}),
    ]


def test_a_saved_data_set_on_s3(bucket, read):
    data = datasets.Dataset.from_dict({"x": [1, 2]})
    datasets.DatasetDict({"test": data}).save_to_disk(str(bucket / "saved"))
    rows = [("saved/test:1", {"x": 1}), ("saved/test:2", {"x": 2})]
    assert read("s3://bucket/saved", (), "test") == rows
    assert "test/data-00000-of-00001.arrow" in origin("s3://bucket/saved")[1]


def test_the_identity_on_s3_is_that_of_the_bytes(bucket):
    for name in ("one", "two"):
        (bucket / name).mkdir()
        (bucket / name / "a.jsonl").write_bytes(b'{"x": 1}\n')
    first = origin("s3://bucket/one/a.jsonl")
    # MD5 of the nine bytes, as md5sum prints it.
    assert first[1] == {"a.jsonl": "ETag 15058b6e28ee0b319e87b24f005b9187, 9 bytes"}
    assert origin("s3://bucket/one/*.jsonl") == origin("s3://bucket/two/a.jsonl") == first
    (bucket / "one" / "a.jsonl").write_bytes(b'{"x": 2}\n')
    assert first not in (origin("s3://bucket/one/a.jsonl"), origin("s3://bucket/one/*.jsonl"))


def test_no_such_bucket_or_key(bucket):
    for path in ("none/a.jsonl", "none/*.jsonl", "bucket/none.jsonl", "bucket/*.none"):
        with pytest.raises(DataError, match=r"^s3://.*: not found \(.*\)\. Fix: correct the path"):
            origin(f"s3://{path}")


def test_a_wrong_secret(bucket, monkeypatch):
    (bucket / "a.jsonl").write_bytes(b'{"x": 1}\n')
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    for path in ("a.jsonl", "*.jsonl"):
        with pytest.raises(DataError, match=r"^s3://.*: access denied \(.*Forbidden\)") as caught:
            origin(f"s3://bucket/{path}")
        assert "guessed" not in str(caught.value)


def test_a_connection_that_breaks(bucket, read, monkeypatch):
    """The file disappears after the store has listed it."""
    from botocore.exceptions import EndpointConnectionError
    from s3fs import S3File

    (bucket / "long.jsonl").write_bytes(b'{"x": 1}\n')

    def read_nothing(*_):
        raise EndpointConnectionError(endpoint_url="http://store")

    monkeypatch.setattr(S3File, "read", read_nothing)
    with pytest.raises(DataError, match=r"long.jsonl: cannot be read \(EndpointConnectionError: "):
        read("s3://bucket/long.jsonl")
