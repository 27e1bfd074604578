"""A stand-in for the Hugging Face hub: answers huggingface_hub's requests over HTTP.

The files are in <root>/<owner>/<name>/<commit>/.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import metadata_load

from rlhf_pipeline.data.sources.adapter import CONVERTED

COMMITS = {"main": "1" * 40, CONVERTED: "2" * 40}
"""Initial branches of every repository -> commit."""


class Hub(ThreadingHTTPServer):
    """The server. A test may change `commits` while the server runs."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root = root
        self.commits = dict(COMMITS)
        self.revisions: set[str] = set()  # of all requested files

    @property
    def address(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Serve a hub while the block runs."""
    with Hub(root) as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        match [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]:
            case ["datasets", owner, name, "resolve", revision, *path] | [
                owner,
                name,
                "resolve",
                revision,
                *path,
            ]:
                self.server.revisions.add(revision)
                self.file(*self.state(owner, name, revision), "/".join(path))
            case ["api", "datasets" | "models", owner, name, *_] if not (
                self.server.root / owner / name
            ).is_dir():
                self.reply(404, b"", **{"X-Error-Code": "RepoNotFound"})
            case ["api", "datasets" | "models", owner, name]:
                self.json({"id": f"{owner}/{name}", "sha": self.server.commits["main"]})
            case ["api", "datasets" | "models", owner, name, "revision", revision]:
                folder, commit = self.state(owner, name, revision)
                readme = folder / "README.md"
                card = metadata_load(readme) if readme.is_file() else None
                self.json({"id": f"{owner}/{name}", "sha": commit, "cardData": card})
            case ["api", "datasets" | "models", owner, name, "tree", revision, *path]:
                self.json(self.listing(self.state(owner, name, revision)[0], "/".join(path)))
            case ["api", "datasets" | "models", owner, name, "paths-info", revision]:
                folder, _ = self.state(owner, name, revision)
                asked = json.loads(body) if body.startswith("{") else parse_qs(body)
                paths = [folder / path for path in asked["paths"]]
                self.json([self.entry(folder, path) for path in paths if path.exists()])
            case _:
                self.reply(404, b"")

    do_HEAD = do_POST = do_GET  # noqa: N815

    def state(self, owner: str, name: str, revision: str) -> tuple[Path, str]:
        commit = self.server.commits.get(revision, revision)
        return self.server.root / owner / name / commit, commit

    def file(self, folder: Path, commit: str, path: str) -> None:
        if not (folder / path).is_file():
            missing = "EntryNotFound" if folder.exists() else "RevisionNotFound"
            self.reply(404, b"", **{"X-Error-Code": missing, "X-Repo-Commit": commit})
            return
        content = (folder / path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        self.reply(200, content, **{"ETag": f'"{digest}"', "X-Repo-Commit": commit})

    def listing(self, folder: Path, path: str) -> list[dict[str, object]]:
        return [self.entry(folder, found) for found in sorted((folder / path).rglob("*"))]

    def entry(self, folder: Path, found: Path) -> dict[str, object]:
        kind, size = ("directory", 0) if found.is_dir() else ("file", found.stat().st_size)
        path = str(found.relative_to(folder))
        digest = hashlib.sha1(path.encode()).hexdigest()
        return {"type": kind, "path": path, "size": size, "oid": digest}

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
