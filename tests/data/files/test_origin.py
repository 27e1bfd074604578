from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rlhf_pipeline.data.files import Origin, origin
from rlhf_pipeline.errors import DataError

Write = Callable[[str, bytes], str]


def test_local_files_by_name(write: Write, tmp_path: Path) -> None:
    write("x/a.jsonl", b"1")
    write("x/b.jsonl", b"2")
    paths = {"a.jsonl": tmp_path / "x/a.jsonl", "b.jsonl": tmp_path / "x/b.jsonl"}
    assert origin(f"{tmp_path}/x/*") == Origin(paths, {})


def test_a_remote_file_changes_its_identity_with_its_bytes() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/origin/a.jsonl", b"1")
    first = origin("memory://origin/a.jsonl")
    assert first.files == {}
    assert list(first.identities) == ["a.jsonl"]
    assert origin("memory://origin/*.jsonl") == first
    memory.pipe("/origin/a.jsonl", b"2")
    assert origin("memory://origin/a.jsonl") != first


class _Handler(http.server.BaseHTTPRequestHandler):
    headers_sent: dict[str, str]

    def do_GET(self) -> None:
        self.send_response(200 if self.path.startswith("/a.jsonl") else 403)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def web() -> Iterator[str]:
    """The URL of a server that answers with `_Handler.headers_sent`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("headers", "identity"),
    [
        ({"ETag": '"abc"', "Last-Modified": "Mon"}, "ETag abc, 7 bytes"),
        ({"Last-Modified": "Mon, 01 Jan 2024"}, "Last-Modified Mon, 01 Jan 2024, 7 bytes"),
    ],
)
def test_the_identity_that_a_web_server_reports(
    web: str, headers: dict[str, str], identity: str
) -> None:
    _Handler.headers_sent = {"Content-Length": "7", **headers}
    assert origin(f"{web}/a.jsonl?sign=key") == Origin({}, {"a.jsonl": identity})


def test_a_web_server_without_an_identity(web: str) -> None:
    _Handler.headers_sent = {"Content-Length": "7"}
    with pytest.raises(
        DataError, match=r"/a.jsonl: the server sends no ETag, .* Fix: download the file"
    ):
        origin(f"{web}/a.jsonl")


def test_a_web_server_that_refuses(web: str) -> None:
    _Handler.headers_sent = {"Content-Length": "0"}
    with pytest.raises(DataError, match=r"/none.jsonl: not found \(403, message='Forbidden'"):
        origin(f"{web}/none.jsonl")
