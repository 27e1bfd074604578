"""A real S3 server for tests that read from or write to a store."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import reserved_port

from rlhf_pipeline.stages.store import Store


def store_at(port: int) -> Store:
    """A store of the server at a port, which does not repeat a request that fails."""
    return Store(
        "s3://bucket/x",
        key="access",
        secret="secret",
        client_kwargs={"endpoint_url": f"http://127.0.0.1:{port}"},
        config_kwargs={"retries": {"max_attempts": 0}},
    )


def serve_s3(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a real S3 server with key "access" and secret "secret".

    The subfolders of `folder` are the buckets.
    """
    rclone = Path(sys.executable).with_name("rclone")
    options = ["--config", os.devnull, "--auth-key", "access,secret", "--vfs-cache-mode", "off"]
    # Files that a test writes are visible at once. With 0 rclone keeps a core busy.
    options += ["--dir-cache-time", "1ms"]
    command = [rclone, "serve", "s3", *options, "--addr", f"127.0.0.1:{port}", folder]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    _wait_for(port, server)
    return server


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of `serve_s3`: its URL and its folder."""
    folder = tmp_path_factory.mktemp("s3")
    with reserved_port() as port:
        server = serve_s3(folder, port)
        yield f"http://127.0.0.1:{port}", folder
        server.kill()
        server.communicate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        assert server.poll() is None, server.communicate()[1].decode()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)


@pytest.fixture
def bucket(s3_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of s3://bucket, with the environment that selects the server."""
    import fsspec

    # It contains the keys of an earlier test.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    url, folder = s3_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    bucket = folder / "bucket"
    bucket.mkdir(exist_ok=True)
    return bucket
