"""Another node as the driver sees it: its agent's last report, and the orders to the agent."""

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.checkpoint_files import checkpoint_path
from rlhf_pipeline.runtime.digests import PIECE, FileEntry, read_pieces
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.launch.link import Link
from rlhf_pipeline.stages.launch.node_program import NodeProgram

logger = logging.getLogger(__name__)

REPORTS = ("report", "interrupted")
"""What an agent sends without being asked."""
MEASURED_PIECES = 8
"""Pieces of a file that measure the bandwidth: 128 MiB."""


@dataclass
class RemoteNode:
    """One node besides the driver's."""

    link: Link
    number: int
    ranks: range
    host: str
    """Its name and address."""
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    """The newest heartbeat of each of its ranks."""
    code: int | None = None
    """Exit code of DeepSpeed's launcher there; None while it runs."""
    kernel_kills: int = 0
    """Processes there that the kernel has killed for lack of memory during the launch."""
    interrupted: str | None = None
    """The signal that the node's scheduler sent to its agent, with the node's name."""
    _statuses: dict[int, int | str] = field(default_factory=dict)
    _directory: Path | None = None

    def __str__(self) -> str:
        listed = f"{self.ranks[0]}" if len(self.ranks) == 1 else f"{self.ranks[0]}-{self.ranks[-1]}"
        return f"node {self.number} ({self.host}, rank{'s'[: len(self.ranks) - 1]} {listed})"

    @property
    def lost(self) -> str | None:
        """Why the node can no longer be reached, with its name; None while it can."""
        return None if self.link.lost is None else f"{self} is lost: {self.link.lost}"

    def prepare(self, run: StageRun) -> bool:
        """Bring the files of a stage to the node; return whether it has a file system of its own.

        Raises StageError if the node is lost meanwhile, or asks for a file that was not offered.
        """
        probe = run.directory / f".probe-{secrets.token_hex(8)}"
        probe.touch()
        try:
            self._order("prepare", directory=str(run.directory), probe=str(probe))
            if not self._expect("prepared")["separate"]:
                return False
        finally:
            probe.unlink()
        entries = {str(path): asdict(FileEntry.of(path)) for path in _files(run)}
        self._order("copy", files=entries)
        wanted = self._expect("wanted")["files"]
        for name in wanted:
            if name not in entries:  # an agent must not read what it likes
                raise StageError(f"{self} asked for {name}, expected a file of the stage")
            for piece in read_pieces(Path(name)):
                self._send_piece(piece)
        if wanted:
            self._expect("received")
            size = sum(entries[name]["size"] for name in wanted)
            logger.info("%s received %d files, %d bytes", self, len(wanted), size)
        return True

    def measure(self) -> tuple[float, float]:
        """The round trip in seconds, and the bandwidth to the node in Gbit/s."""
        start = time.monotonic()
        self._order("measure", pieces=0)
        self._expect("measured")
        round_trip_s, piece = time.monotonic() - start, bytes(PIECE)
        start = time.monotonic()
        self._order("measure", pieces=MEASURED_PIECES)
        for _ in range(MEASURED_PIECES):
            self._send_piece(piece)
        self._expect("measured")
        seconds = time.monotonic() - start
        return round_trip_s, 8e-9 * MEASURED_PIECES * PIECE / seconds

    def start(self, program: NodeProgram) -> None:
        self.heartbeats, self._statuses, self.code, self.kernel_kills = {}, {}, None, 0
        self._directory = Path(program.directory)
        self._order("start", program=program.as_json())

    def update(self) -> None:
        """Read what the agent has reported since the last call."""
        while (report := self.link.receive(0)) is not None:
            self._take(report)

    def status(self, rank: int) -> int | str:
        """The last known exit status of a rank, else "running", "stopped" or "gone".

        The ranks of a lost node are "gone": nothing more is known of them.
        """
        return "gone" if self.link.lost is not None else self._statuses.get(rank, "running")

    def send(self, rank: int, number: Signals) -> None:
        if self.lost is None:
            self._order("signal", rank=rank, number=int(number))

    def end(self) -> None:
        """Kill the node's ranks; keep the end of its log. Does nothing if the node is lost."""
        if self.lost is not None or self._directory is None:
            return
        directory, self._directory = self._directory, None
        try:
            self._order("end")
            ended = self._expect("ended")
        except StageError:
            return
        log = directory / f"program-node{self.number}.log"
        if not log.is_file():
            log.write_text(ended["log"])

    def _order(self, kind: str, **fields: Any) -> None:
        with self._connected():
            self.link.send(kind, **fields)

    def _send_piece(self, piece: bytes) -> None:
        with self._connected():
            self.link.send_piece(piece)

    def _expect(self, kind: str) -> dict[str, Any]:
        with self._connected():
            while (answer := self.link.expect(kind, *REPORTS))["kind"] != kind:
                self._take(answer)
        return answer

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise StageError with the name of the node if it is lost inside the block."""
        try:
            yield
        except (OSError, StageError) as error:
            raise StageError(f"{self} is lost: {self.link.lost or error}") from error

    def _take(self, report: Mapping[str, Any]) -> None:
        if report["kind"] == "interrupted":
            self.interrupted = f"{self} received {report['signal']}"
        if report["kind"] != "report":
            return
        # Only its own ranks: the driver signals the processes that its heartbeats name.
        own = [h for h in report["heartbeats"] if h["rank"] in self.ranks]
        self.heartbeats = {h["rank"]: Heartbeat(**h) for h in own}
        self._statuses = {int(rank): status for rank, status in report["statuses"].items()}
        self.code, self.kernel_kills = report["code"], report["kernel_kills"]
        for name, text in report["errors"].items():
            file = Path(str(self._directory)) / ERRORS / Path(name).name
            if self._directory is not None and not file.is_file():
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, text)


def _files(run: StageRun) -> Iterable[Path]:
    """What the ranks read: the job, the inputs, and the checkpoint to resume from."""
    yield run.directory / "job.json"
    folders = [path.resolve() for path in run.inputs.values()]
    if run.resume_from is not None:
        folders.append(checkpoint_path(run.checkpoints, run.resume_from))
    for folder in folders:
        yield from [folder] if folder.is_file() else sorted(_below(folder))


def _below(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
