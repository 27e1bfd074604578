import os
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.tracking.store import connect, experiment_id, is_server, tracking_uri


def runs_page(server: str, project: Path) -> str:
    """The address of the page with the runs; MLflow's own start page shows no runs."""
    experiment = experiment_id(connect(tracking_uri(project), project))
    return f"{server}/#/experiments/{experiment}/runs?workflowType=machine_learning"


def serve(project: Path, port: int, console: Console) -> None:
    """Print the link, and serve until Ctrl-C.

    With a tracking server in MLFLOW_TRACKING_URI, its pages are used and nothing is started. Raises
    ConfigError if the port is in use.
    """
    uri = tracking_uri(project)
    remote = is_server(uri)
    page = runs_page(uri.rstrip("/") if remote else f"http://127.0.0.1:{port}", project)
    console.print(f"runs: [link={page}]{page}[/link]", highlight=False, soft_wrap=True)
    if remote:
        return
    require_free(port, "ui", "open the link above")
    # MLflow starts uvicorn, which is beside the interpreter and perhaps not on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    options = ["--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-P", "-m", "mlflow", "ui", *options, "--workers", "1"]
    # Every user of the machine can read a command line, and the store's address has a password.
    own = {"PATH": path, "MLFLOW_BACKEND_STORE_URI": uri, "PYTHONSAFEPATH": "1"}
    with suppress(KeyboardInterrupt):
        subprocess.run(command, env=os.environ | own, check=True)


def require_free(port: int, command: str, fix: str) -> None:
    """Raise ConfigError if a program answers at a port of this machine."""
    with closing(socket.socket()) as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(
                f"--port: another program answers at {port}, perhaps an earlier one of this. Fix: "
                f"{fix}, or use `kedro rlhf {command} --port={port + 1}`"
            )
