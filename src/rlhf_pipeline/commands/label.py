import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import uvicorn

from rlhf_pipeline.commands.command import Command
from rlhf_pipeline.data.files import read_rows
from rlhf_pipeline.errors import ConfigError, printable
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.labelling.server import application
from rlhf_pipeline.labelling.votes import distinct_pairs, evaluation_rows, locked


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
