from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.data.files.rows import read_rows

Read = Callable[..., list[tuple[str, Any]]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file into the test's folder; its path."""

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def read() -> Read:
    """All rows of a path."""
    return lambda path, columns=(), split="train": list(read_rows(str(path), columns, split))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real S3 server with the key "access" and the secret "secret": its URL, and the folder whose folders are its buckets."""
    folder = tmp_path_factory.mktemp("s3")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    rclone = Path(sys.executable).with_name("rclone")
    options = [
        "--config",
        os.devnull,
        "--auth-key",
        "access,secret",
        "--addr",
        address,
        "--vfs-cache-mode",
        "off",
    ]
    options += ["--dir-cache-time", "0s"]  # what a test writes into the folder is there at once
    server = subprocess.Popen([rclone, "serve", "s3", *options, folder], stderr=subprocess.PIPE)
    try:
        _wait_for(address, server)
        yield f"http://{address}", folder
    finally:
        server.terminate()
        server.communicate(timeout=10)


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    host, port = address.split(":")
    for _ in range(200):
        assert server.poll() is None, server.communicate()[1].decode()
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"no S3 server at {address} after 10 s")


@pytest.fixture
def bucket(s3_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind s3://bucket, with the environment that leads there."""
    import fsspec

    fsspec.get_filesystem_class(
        "s3"
    ).clear_instance_cache()  # which holds the keys of an earlier test
    url, folder = s3_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    bucket = folder / "bucket"
    bucket.mkdir(exist_ok=True)
    return bucket
