"""A connection between the driver and the agent of another node, with a shared secret and a pulse.

Both sides prove that they know the secret before anything else is read. Frames are JSON objects or
raw pieces of files; nothing is unpickled. Each side sends a pulse, so both notice within
`launch.node_timeout_s` that the other machine has vanished, which TCP alone reports after hours.
"""

import hmac
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rlhf_pipeline.errors import StageError

TOKEN = "RLHF_NODE_TOKEN"  # noqa: S105 - a name
"""Environment variable with the secret that the nodes of one run share."""
PULSE, OBJECT, PIECE = b"p", b"o", b"b"
FAULT = "fault"
"""The last object that a side sends before it gives up, with the reason."""
PULSES = 5
"""Pulses in the time after which a silent node counts as lost."""
FIRST_BYTES = 2**16
"""Length of the longest frame before the other side has proved that it knows the secret."""
HANDSHAKE_S = 10.0


class Link:
    """One side of a connection. Its threads send pulses, and collect what arrives."""

    def __init__(self, connection: socket.socket, token: str, *, driver: bool, timeout_s: float):
        """Authenticate the other side. Raises StageError if it does not know the token."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = int(timeout_s * 1000)  # without it, sending to a vanished machine blocks for long
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        connection.setblocking(True)
        self._connection = Connection(connection.detach())
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._received: queue.Queue[dict[str, Any] | bytes] = queue.Queue(maxsize=8)
        self.lost: str | None = None
        """Why the other side can no longer be reached; None while it can."""
        try:
            self._authenticate(token, driver)
        except BaseException:
            self._connection.close()
            raise
        for target in (self._listen, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send an object. Raises OSError if the connection is closed."""
        self._send(OBJECT, json.dumps({"kind": kind, **fields}).encode())

    def send_piece(self, piece: bytes) -> None:
        """Send a piece of a file. Raises OSError if the connection is closed."""
        self._send(PIECE, piece)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next object, or None if none arrives in time or the other side is lost."""
        found = self._next(timeout_s)
        assert found is None or isinstance(found, dict)
        return found

    def expect(self, *kinds: str) -> dict[str, Any]:
        """Wait for an object of some kinds; raise StageError if the other side is lost."""
        while self.lost is None or not self._received.empty():
            found = self.receive(0.2)
            if found is not None and found["kind"] in kinds:
                return found
        raise StageError(str(self.lost))

    def receive_piece(self) -> bytes:
        """Wait for a piece of a file; raise StageError if the other side is lost."""
        while self.lost is None or not self._received.empty():
            if (found := self._next(0.2)) is not None:
                assert isinstance(found, bytes)
                return found
        raise StageError(str(self.lost))

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            connection = socket.socket(fileno=self._connection.fileno())
            try:
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            finally:
                connection.detach()

    def _next(self, timeout_s: float) -> dict[str, Any] | bytes | None:
        with suppress(queue.Empty):
            return self._received.get(timeout=timeout_s)
        return None

    def _send(self, mark: bytes, content: bytes = b"") -> None:
        try:
            with self._sending:
                self._connection.send_bytes(mark + content)
        except OSError:
            self._closed.wait(1.0)  # until the thread that listens has read the reason
            raise

    def _authenticate(self, token: str, driver: bool) -> None:
        """Exchange nonces, then a proof of each side over both: a proof serves one connection."""
        own = secrets.token_hex(16)
        self._send(OBJECT, json.dumps({"nonce": own}).encode())
        other = str(self._first().get("nonce"))
        nonces = f"{own} {other}" if driver else f"{other} {own}"
        self._send(OBJECT, json.dumps({"proof": _proof(token, driver, nonces)}).encode())
        expected = _proof(token, not driver, nonces)
        if not hmac.compare_digest(str(self._first().get("proof")), expected):
            raise StageError(
                f"{TOKEN}: the other side of the connection has another secret. Fix: give all "
                "nodes of a run the same value"
            )

    def _first(self) -> Mapping[str, Any]:
        try:
            if self._connection.poll(HANDSHAKE_S):
                content = json.loads(self._connection.recv_bytes(FIRST_BYTES)[1:])
                return content if isinstance(content, dict) else {}
        except (OSError, EOFError, ValueError):
            pass
        raise StageError("the other side of the connection speaks another protocol, or is silent")

    def _listen(self) -> None:
        try:
            while self._connection.poll(self._timeout_s):
                frame = self._connection.recv_bytes()
                if frame[:1] == PIECE:
                    self._received.put(frame[1:])
                elif frame[:1] == OBJECT:
                    content = json.loads(frame[1:])
                    if content["kind"] == FAULT:
                        self.lost = content["reason"]
                        break
                    self._received.put(content)
            else:
                self.lost = f"it has been silent for {self._timeout_s:g} s (launch.node_timeout_s)"
        except (OSError, EOFError):
            self.lost = "the connection was closed"
        self._closed.set()
        with self._sending:
            self._connection.close()

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._closed.wait(self._timeout_s / PULSES):
                self._send(PULSE)


def _proof(token: str, driver: bool, nonces: str) -> str:
    side = "driver" if driver else "agent"
    return hmac.new(token.encode(), f"{side} {nonces}".encode(), "sha256").hexdigest()
