import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import uvicorn
from kedro.io import CatalogProtocol

from rlhf_pipeline.commands.artifacts import whole
from rlhf_pipeline.commands.report import find_evaluation
from rlhf_pipeline.data.formats import read_rows
from rlhf_pipeline.errors import ConfigError, printable
from rlhf_pipeline.labelling.pairs import distinct_pairs, evaluation_rows
from rlhf_pipeline.labelling.server import application
from rlhf_pipeline.labelling.votes import locked


def label(
    catalog: CatalogProtocol, project: Path, evaluation: str | None, pairs: str, output: str | None,
    host: str, port: int
) -> None:  # fmt: skip
    """Serve the pairs of an evaluation, or else of a file, until Ctrl-C."""
    workspace = Path(catalog.load("workspace"))
    rows: Iterable[Any] = (row for _, row in read_rows(pairs, (), "train"))
    if evaluation is not None:
        rows = evaluation_rows(whole(find_evaluation(evaluation, catalog, project), catalog))
    found, left_out = distinct_pairs(rows)
    file = Path(output or workspace.parent / "01_raw" / "votes.jsonl").resolve()
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
