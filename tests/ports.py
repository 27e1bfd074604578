"""Ports for the tests' servers and ranks."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port of 127.0.0.1 for a program that is given its number.

    The port stays bound, so the system assigns it to no other program. A server with SO_REUSEADDR
    can still listen at it. Until then, connections are refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
