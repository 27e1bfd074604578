"""Programs that serve: vLLM or transformers for a policy and the chat, MLflow for its pages, and a
page on which people compare answers.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rlhf_pipeline.commands.command import Command, show_link
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.errors import ConfigError, StageError, printable
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of
from rlhf_pipeline.runtime.program import LOOPBACK
from rlhf_pipeline.stages.launch.resources import free_port
from rlhf_pipeline.tracking.store import (
    RUNS_VIEW,
    VIEW,
    connect,
    experiment_id,
    is_server,
    tracking_uri,
)

TRANSFORMERS, VLLM = "transformers.cli.transformers", "vllm.entrypoints.cli.main"
SILENT = "DO_NOT_TRACK", "HF_HUB_DISABLE_UPDATE_CHECK", "HF_HUB_OFFLINE", "PYTHONSAFEPATH"
"""Variables of the programs that are 1: they contact no server on their own."""


@click.command(cls=Command)
@click.argument("policy", default="champion")
@click.argument("options", nargs=-1, metavar="[-- SERVER_OPTIONS]")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option("--host", default=LOOPBACK, show_default=True, help="0.0.0.0: for every network.")
def serve(ledger: Ledger, policy: str, options: tuple[str, ...], port: int, host: str) -> None:
    """Serve POLICY by a server with OpenAI's API until Ctrl-C.

    POLICY is a version or an alias of the registered model, or the folder of an artifact. The
    default is the champion. The server is `vllm serve` if vLLM is installed, or else `transformers
    serve`. It gets SERVER_OPTIONS as they are: `kedro rlhf serve champion -- --log-level=info`.
    """
    folder = ledger.language_model(policy).resolve()
    click.echo(f"model {folder.name}, {folder}\nhttp://{host}:{port}/v1; Ctrl-C ends it")
    if tools := playing(folder).get("tools"):
        click.echo(f"trained with tools: {', '.join(tools)}; a request lists them as `tools`")
    program = TRANSFORMERS if find_spec("vllm") is None else VLLM
    os.chdir(folder.parent)  # the name of the folder is the name of the model
    command = serving(program, folder, host, port, *options)
    # No shell; the server gets the signals itself.
    os.execve(sys.executable, command, os.environ | dict.fromkeys(SILENT, "1"))  # noqa: S606


@click.command(cls=Command)
@click.argument("policy", default="champion")
@click.option("--max-tokens", default=512, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("--seed", type=int, help="Seed of sampling. The same seed repeats a conversation.")
def chat(
    ledger: Ledger, policy: str, max_tokens: int, temperature: float, seed: int | None
) -> None:
    """Talk to POLICY in the terminal, by `transformers chat`, or by a program that runs the tools
    of its training.

    POLICY is a version or an alias of the registered model, or the folder of an artifact. The
    default is the champion. An answer has at most MAX_TOKENS tokens. Temperature 0 always takes the
    most likely token.
    """
    folder, port = ledger.language_model(policy).resolve(), free_port(None, LOOPBACK)
    if own := playing(folder):
        own |= {"sampling": {"max_response_tokens": max_tokens, "temperature": temperature}}
        own |= {"environment": None, "seed": time.time_ns() if seed is None else seed}
        program = [sys.executable, "-P", "-m", "rlhf_pipeline.episodes.chat"]
        raise SystemExit(subprocess.call([*program, str(folder), json.dumps(own)]))
    seeded = [] if seed is None else [f"--default-seed={seed}"]
    command = serving(TRANSFORMERS, folder, LOOPBACK, port, "--log-level=error", *seeded)
    how = f"do_sample=true temperature={temperature} top_k=0" if temperature else "do_sample=false"
    flags = [f"max_new_tokens={max_tokens}", *how.split(), "--user=you"]
    talk = [*command[:4], "chat", folder.name, f"http://{LOOPBACK}:{port}", *flags]
    silent, null = os.environ | dict.fromkeys(SILENT, "1"), subprocess.DEVNULL
    server = subprocess.Popen(command, cwd=folder.parent, env=silent, stdout=null, stderr=null)
    with server, suppress(KeyboardInterrupt):
        try:
            while server.poll() is None and not answers(port):
                time.sleep(0.2)
            if server.poll() is not None:
                shown = f"cd {folder.parent}; {shlex.join(command)}"
                raise StageError(f"{policy}: the server ended. Fix: see why, by `{shown}`")
            # Offline, the hub's client refuses any server, this one as well.
            subprocess.run(talk, env=silent | {"HF_HUB_OFFLINE": "0"}, check=False)
        finally:
            server.terminate()


def playing(policy: Path) -> dict[str, Any]:
    """How the training of a policy called tools, by the fields of `EpisodesConfig`; empty if it
    called none."""
    # The average of weights lies inside of the artifact; the lineage also has the stage sample.
    lineage = Manifest.read(artifact_of(policy) or policy).lineage
    blocks = [block for record in lineage for block in record["config"].values() if block]
    block: dict[str, Any] = next((each for each in blocks if each.get("tools")), {})
    return {name: block[name] for name in EpisodesConfig.model_fields if name in block}


def serving(program: str, folder: Path, host: str, port: int, *options: str) -> list[str]:
    """The command that serves a model; start it in the parent of the folder."""
    if os.environ.get("RLHF_TRUST_REMOTE_CODE") == "true":  # its own Python code may run
        options = ("--trust-remote-code", *options)
    start = [sys.executable, "-P", "-m", program, "serve", folder.name]
    return [*start, f"--host={host}", f"--port={port}", *options]


def answers(port: int) -> bool:
    """Whether a program answers at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


@click.command(cls=Command)
@click.option("--port", default=5000, show_default=True, help="Port to listen on.")
def ui(project: Path, console: Console, port: int) -> None:
    """Show runs, metrics and registered models in MLflow's pages until Ctrl-C.

    Only this machine can open the pages. If MLFLOW_TRACKING_URI names a tracking server, the
    command prints the link to the pages of that server, and starts nothing.
    """
    uri = tracking_uri(project)
    remote = is_server(uri)
    page = runs_page(uri.rstrip("/") if remote else f"http://{LOOPBACK}:{port}", project)
    show_link(console, "runs", page)
    if remote:
        return
    if answers(port):
        raise ConfigError(
            f"--port: another program answers at {port}, perhaps an earlier `kedro rlhf ui`. Fix: "
            f"open the link above, or use `kedro rlhf ui --port={port + 1}`"
        )
    # MLflow starts uvicorn, which is beside the interpreter and perhaps not on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    start = [sys.executable, "-P", "-m", "mlflow", "ui"]
    command = [*start, f"--host={LOOPBACK}", f"--port={port}", "--workers=1"]
    # Every user of the machine can read a command line, and the store's address has a password.
    own = {"PATH": path, "MLFLOW_BACKEND_STORE_URI": uri, "PYTHONSAFEPATH": "1"}
    jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes that judge LLM traces
    with suppress(KeyboardInterrupt):
        subprocess.run(command, env=jobs | os.environ | own, check=True)


def runs_page(server: str, project: Path) -> str:
    """The address of the page with the runs; MLflow's own start page shows no runs.

    It names a view that is stored with the experiment: which columns the list of runs has.
    """
    client = connect(tracking_uri(project), project)
    experiment = experiment_id(client)
    client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{VIEW}", json.dumps(RUNS_VIEW))
    page = f"{server}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    return f"{page}&viewStateShareKey={VIEW}"


@click.command(cls=Command)
@click.argument("evaluation", required=False)
@click.option(
    "--pairs",
    metavar="FILE",
    help="Compare the pairs of this file (columns prompt, first, second) instead of EVALUATION.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="File to which the votes are added.  [default: 01_raw/votes.jsonl below root]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8700, show_default=True, help="Port to listen on; 0 picks a free port."
)
def label(
    ledger: Ledger, evaluation: str | None, pairs: str | None, output: str | None, host: str,
    port: int,
) -> None:  # fmt: skip
    """Serve a page on which people compare answers. Ctrl-C ends it.

    The votes become a file of comparisons, which a source in `split.sources` can read. EVALUATION
    is a version that `kedro rlhf runs` lists, its folder, or a policy, as for `kedro rlhf report`.
    """
    import uvicorn

    from rlhf_pipeline.data.files import read_rows
    from rlhf_pipeline.labelling.server import application
    from rlhf_pipeline.labelling.votes import distinct_pairs, evaluation_rows, locked

    if (evaluation is None) == (pairs is None):
        raise click.UsageError("use either EVALUATION or --pairs")
    rows: Iterable[Any]
    if pairs is not None:
        rows = (row for _, row in read_rows(pairs, (), "train"))
    else:
        rows = evaluation_rows(ledger.evaluation(evaluation))
    found, left_out = distinct_pairs(rows)
    file = Path(output or ledger.workspace.parent / "01_raw" / "votes.jsonl").resolve()
    with locked(file):  # refuses a file with something else
        pass
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        found_at = f"--host, --port: found {host}:{port} unusable ({error.strerror})"
        raise ConfigError(f"{found_at}. Fix: choose another one, or end what uses it") from None
    address = f"http://{host}:{listener.getsockname()[1]}"
    click.echo(f"page   {address}\nvotes  {file}\npairs  {len(found)}")
    for reason, count in left_out.items():
        click.echo(f"       {count} left out: {printable(reason)}")
    settings = uvicorn.Config(application(found, file, host), log_level="warning")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])
