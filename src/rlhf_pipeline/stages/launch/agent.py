"""The agent of a node: runs the node's part of every launch, as the driver orders, and reports.

    python -m rlhf_pipeline.stages.launch.agent --driver HOST:PORT

It imports neither Kedro nor torch. It ends its ranks when the driver falls silent.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals, signal
from threading import Thread
from typing import Any

import click

from rlhf_pipeline.errors import ConfigError, PipelineError, StageError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import FileEntry, write_pieces
from rlhf_pipeline.runtime.manifest import NAME
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.cache.code import code_of_package, library_version
from rlhf_pipeline.stages.cache.lock import await_programs
from rlhf_pipeline.stages.job import TRAINING_LIBRARIES
from rlhf_pipeline.stages.launch.failure import kernel_kills
from rlhf_pipeline.stages.launch.link import FAULT, TOKEN, Link
from rlhf_pipeline.stages.launch.node_program import NodeProgram
from rlhf_pipeline.stages.launch.ranks import Ranks
from rlhf_pipeline.stages.launch.resources import gpu_count

AGENT = "rlhf_pipeline.stages.launch.agent"
"""The name of this module, which may run as `__main__`."""
POLL_S = 0.2
RETRY_S = 0.5
LOG_BYTES = 2**14
"""Length of the end of the log that the driver gets."""
NUMBERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the number of an agent among those that one command started."""


def serve(
    address: tuple[str, int],
    token: str,
    *,
    number: int | None,
    timeout_s: float,
    start_timeout_s: float,
) -> int:
    """Connect to the driver and obey it until it says goodbye; return the exit code.

    Args:
        address: host and port of the driver.
        token: the secret that the nodes of the run share.
        number: number of this node, from 1. None: the driver gives the next one.
        timeout_s: seconds of silence after which the driver counts as lost.
        start_timeout_s: seconds to try to connect.

    Raises:
        StageError: the driver cannot be reached, has another secret, or fell silent; or this node
            cannot obey, for example because its disk is full.
    """
    link = _connect(address, token, timeout_s, start_timeout_s)
    link.send("hello", number=number, **description())

    def pass_on(signal_number: int, frame: object) -> None:
        """Tell the driver, which lets all ranks save a checkpoint and ends this agent."""
        name = {"signal": Signals(signal_number).name}
        Thread(target=_try_to_send, args=(link, "interrupted"), kwargs=name, daemon=True).start()

    for each in (SIGINT, SIGTERM):
        signal(each, pass_on)
    return obey_and_report(link)


def obey_and_report(link: Link) -> int:
    """Obey the driver; if this node cannot, report why and raise StageError."""
    try:
        return _obey(link)
    except (OSError, PipelineError) as error:
        is_lost = isinstance(error, OSError) and link.lost is not None
        reason = f"the driver is lost: {link.lost}" if is_lost else str(error)
        _try_to_send(link, FAULT, reason=reason)
        raise StageError(reason) from error


def _obey(link: Link) -> int:
    """Do what the driver orders until it says goodbye; return the exit code that it gives."""
    while True:
        lost = link.lost  # read first: an order may arrive just before the driver leaves
        order = link.receive(1.0)
        if order is None and lost is not None:
            raise StageError(f"the driver is lost: {lost}")
        if order is None:
            continue
        if order["kind"] == "refused":
            raise StageError(order["reason"])
        if order["kind"] == "goodbye":
            link.close()
            return int(order["code"])
        if order["kind"] == "prepare":
            _prepare(link, order)
        if order["kind"] == "measure":
            for _ in range(order["pieces"]):
                link.receive_piece()
            link.send("measured")
        if order["kind"] == "start":
            _run(link, NodeProgram.from_json(order["program"]))


def _try_to_send(link: Link, kind: str, **fields: Any) -> None:
    with suppress(OSError):  # the driver is lost, which the main thread notices
        link.send(kind, **fields)


def description() -> dict[str, Any]:
    """What the driver checks: the code, the libraries and the GPUs of this node."""
    return {
        "host": socket.gethostname(),
        "gpus": gpu_count(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "code": code_of_package(),
        "versions": {name: library_version(name) for name in TRAINING_LIBRARIES},
        "time": time.time(),
    }


def _connect(
    address: tuple[str, int], token: str, timeout_s: float, start_timeout_s: float
) -> Link:
    deadline = time.monotonic() + start_timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
            return Link(connection, token, driver=False, timeout_s=timeout_s)
        except OSError as error:  # the driver may start later
            if time.monotonic() > deadline:
                raise StageError(
                    f"launch.address: found no driver at {address[0]}:{address[1]} within "
                    f"{start_timeout_s:g} s ({error}). Fix: set launch.address to a name of node 0 "
                    "that this node reaches, and open launch.port"
                ) from error
            time.sleep(RETRY_S)


def _prepare(link: Link, order: dict[str, Any]) -> None:
    """Fetch the files of a stage that differ here, unless this node sees those of the driver."""
    directory = Path(order["directory"])
    separate = not Path(order["probe"]).exists()
    await_programs(directory)  # those of a lost driver outlive it by some seconds
    if separate:
        finished = (directory / "export" / NAME).exists()  # by the driver, so it is not separate
        for name in (heartbeat.FOLDER, ERRORS, *([] if finished else ["export"])):
            shutil.rmtree(directory / name, ignore_errors=True)
    link.send("prepared", separate=separate)
    if not separate:
        return
    entries = link.expect("copy")["files"]
    wanted = [name for name, entry in entries.items() if not _is_here(name, entry)]
    link.send("wanted", files=wanted)
    for name in wanted:
        _receive(link, Path(name), FileEntry(**entries[name]))
    if wanted:
        link.send("received")


def _is_here(name: str, entry: dict[str, Any]) -> bool:
    with suppress(OSError):
        return FileEntry(**entry).matches(Path(name))
    return False


def _receive(link: Link, path: Path, entry: FileEntry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")

    def pieces() -> Iterator[bytes]:
        left = entry.size
        while left:
            piece = link.receive_piece()
            left -= len(piece)
            yield piece

    found = write_pieces(partial, pieces())
    if found != entry:
        raise OSError(f"{path} changed while it was copied")
    partial.replace(path)


def _run(link: Link, program: NodeProgram) -> None:
    """Run the node's ranks until the driver ends them or is lost."""
    directory, kills = Path(program.directory), kernel_kills() or 0
    ranks = Ranks(directory, program.own_ranks, None)
    sent: dict[str, Any] = {}
    with program.running() as process:
        while link.lost is None:
            order = link.receive(POLL_S)
            if order is not None and order["kind"] == "end":
                break
            if order is not None and order["kind"] == "signal":
                ranks.send(order["rank"], Signals(order["number"]))
            statuses = {rank: ranks.status(rank) for rank in ranks.heartbeats}
            ranks.read()  # after the statuses: a rank writes a last heartbeat before it ends
            errors = {
                path.name: path.read_text()
                for rank in program.own_ranks
                for path in (directory / ERRORS).glob(f"*-rank{rank}.txt")
            }
            report = {
                "heartbeats": [asdict(h) for h in ranks.heartbeats.values()],
                "statuses": statuses,
                "errors": errors,
                "code": process.poll(),
                "kernel_kills": (kernel_kills() or 0) - kills,
            }
            if report != sent:
                _try_to_send(link, "report", **report)
                sent = report
    log = (directory / program.log).read_bytes()[-LOG_BYTES:].decode(errors="replace")
    _try_to_send(link, "ended", log=log)


def own_number() -> int | None:
    """The number of this agent's node: the driver's is 0, and agents are counted from 0 as well."""
    found = next((os.environ[name] for name in NUMBERS if name in os.environ), None)
    return None if found is None else int(found) + 1


@click.command()
@click.option("--driver", required=True, help="HOST:PORT of the driver.")
@click.option("--node", type=int, help="Number of this node, from 1.")
@click.option("--timeout", type=float, default=30.0, help="launch.node_timeout_s")
@click.option("--start-timeout", type=float, default=600.0, help="launch.start_timeout_s")
@click.option("--all-gpus", is_flag=True, help="Ignore CUDA_VISIBLE_DEVICES.")
@click.option("--token", help=f"The shared secret, if {TOKEN} does not contain it.")
def main(
    driver: str,
    node: int | None,
    timeout: float,
    start_timeout: float,
    all_gpus: bool,
    token: str | None,
) -> None:
    """Run this node's part of a `kedro run` that another node drives."""
    if all_gpus:  # DeepSpeed's launcher shows a process the GPU of its slot alone
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    host, _, port = driver.rpartition(":")
    secret = token or os.environ.get(TOKEN)
    try:
        if not secret:
            raise ConfigError(f"{TOKEN}: found nothing, expected the secret of the run")
        code = serve(
            (host, int(port)),
            secret,
            number=own_number() if node is None else node,
            timeout_s=timeout,
            start_timeout_s=start_timeout,
        )
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
