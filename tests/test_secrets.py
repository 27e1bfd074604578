"""Secrets of a run appear in no file, log or message."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[1]


def leaks(folder: Path) -> list[str]:
    """Files with a canary in their content or name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if b"canary" in path.read_bytes() or "canary" in path.name]


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
        return (
            super().send_head() if self.path.endswith("?sig=canary-query") else self.send_error(403)
        )

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def signed(tmp_path):
    """The URL of a file of comparisons, without its signature."""
    folder = tmp_path / "web"
    folder.mkdir()
    rows = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(300)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Signed, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/pairs.jsonl"
        server.shutdown()


@pytest.mark.slow
def test_no_stage_writes_a_secret_of_a_url(signed, tmp_path):
    """Secrets are in every possible place of the node base_model, which reads a source."""
    conf, left = tmp_path / "conf", tmp_path / "left"
    shutil.copytree(PROJECT / "conf", conf)
    (conf / "local").mkdir(exist_ok=True)
    (conf / "local" / "credentials.yml").write_text("store: {key: canary-credentials}")
    left.mkdir()
    source = {"name": "files", "path": f"{signed}?$QUERY"}
    (conf / "local" / "parameters_source.yml").write_text(
        yaml.safe_dump({"split": {"sources": [source]}})
    )
    command = [str(Path(sys.executable).with_name("kedro")), "run", "--nodes=base_model"]
    command += [f"--conf-source={conf}", f"--params=root={left / 'data'}"]
    names = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")
    settings = {name: f"canary-{name}" for name in names}
    settings["MLFLOW_TRACKING_URI"] = f"sqlite:///{left}/mlflow.db"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    refused, accepted = (
        subprocess.run(
            command, cwd=PROJECT, env=os.environ | settings | {"QUERY": query}, check=False, **pipes
        )
        for query in ("sig=canary-wrong", "sig=canary-query")
    )
    assert refused.returncode == 1 and "/pairs.jsonl?...: not found" in refused.stdout
    assert accepted.returncode == 0, accepted.stdout
    (job,) = left.glob("data/07_workspace/source/*/job.json")
    assert json.loads(job.read_text())["config"]["source"]["path"] == source["path"]
    assert leaks(left) == []
    assert "canary" not in refused.stdout + accepted.stdout
