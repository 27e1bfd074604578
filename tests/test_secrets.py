"""Secrets of a run appear in no file, log or message."""

import http.server
import json
import os
import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import warm
import yaml
from conftest import KEDRO, PROJECT, SECRETS


def leaks(folder: Path) -> list[str]:
    """Files with a canary in their content or name."""
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # a run of another test renames it
            if "canary" in path.name or b"canary" in path.read_bytes():
                found.append(str(path))
    return found


@pytest.mark.slow
def test_no_stage_writes_a_secret_of_its_environment(project):
    assert (project.root / "mlflow.db").stat().st_size > 0
    logs = list(project.root.rglob("program.log"))
    assert len(logs) >= 7 and sum(log.stat().st_size for log in logs) > 0
    assert leaks(project.root) == []
    assert "canary" not in project.output


@pytest.mark.slow
def test_files_of_a_run_are_not_writable_for_others(project):
    assert [path for path in project.root.rglob("*") if path.stat().st_mode & 0o002] == []


class Signed(http.server.SimpleHTTPRequestHandler):
    """Answers only requests with the signature."""

    def send_head(self):
        is_signed = self.path.endswith("?sig=canary-query")
        return super().send_head() if is_signed else self.send_error(403)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def signed(tmp_path):
    """The URL of a file of comparisons, without its signature."""
    folder = tmp_path / "web"
    folder.mkdir()
    rows = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(300)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    answer = partial(Signed, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/pairs.jsonl"
        server.shutdown()


@pytest.fixture
def kedro(tmp_path):
    """Runs node base_model with secrets in every possible place; returns exit code and output."""
    conf, left = tmp_path / "conf", tmp_path / "left"
    shutil.copytree(PROJECT / "conf", conf)
    (conf / "local").mkdir(exist_ok=True)
    (conf / "local" / "credentials.yml").write_text("store: {key: canary-credentials}")
    left.mkdir()

    def run(path: str, *, query: str, tracking: str) -> tuple[int, str]:
        split = {"sources": [{"name": "files", "path": path}]}
        (conf / "local" / "parameters_source.yml").write_text(yaml.safe_dump({"split": split}))
        options = [f"--conf-source={conf}", f"--params=root={left / 'data'}"]
        names = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")
        settings = {name: SECRETS[name] for name in names} | {"QUERY": query}
        settings |= {"MLFLOW_TRACKING_URI": tracking, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        command = [KEDRO, "run", "--nodes=base_model", *options]
        return warm.output_of(command, os.environ | settings, PROJECT)

    run.left = left
    return run


@pytest.mark.slow
@pytest.mark.cold
def test_no_stage_writes_a_secret_of_a_url(kedro, signed):
    store = f"sqlite:///{kedro.left}/mlflow.db"
    code, refused = kedro(f"{signed}?$QUERY", query="sig=canary-wrong", tracking=store)
    assert code == 1 and "/pairs.jsonl?...: not found" in refused
    silent = "http://me:canary-login@127.0.0.1:9"
    code, untracked = kedro(f"{signed}?$QUERY", query="sig=canary-query", tracking=silent)
    not_recorded = "MLflow at http://...@127.0.0.1:9 does not record the pipeline run"
    assert code == 0 and not_recorded in untracked
    code, tracked = kedro(f"{signed}?$QUERY", query="sig=canary-query", tracking=store)
    assert code == 0
    code, written = kedro("s3://me:canary/login@bucket/a.jsonl", query="", tracking=store)
    advice = "set the credentials of the store in the environment"
    assert code == 1 and advice in written and "canary" not in written
    (job,) = kedro.left.glob("data/07_workspace/source/*/job.json")
    assert json.loads(job.read_text())["config"]["source"]["path"] == f"{signed}?$QUERY"
    assert leaks(kedro.left) == []
    assert [text for text in (refused, untracked, tracked) if "canary" in text] == []
