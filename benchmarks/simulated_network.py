"""Nodes on one machine, joined by links with a bandwidth and a delay. Needs root and Linux.

Each node is a network namespace with one interface, a TUN device. The kernel's token bucket
(`tc`, qdisc tbf) limits what a node sends. A thread carries packets from node to node and holds
each one for the delay: unlike netem, which some kernels lack, it needs no kernel module.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from types import TracebackType

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
MTU = 16_000
"""Bytes of a packet. Large packets leave the cores to the processes under test."""


class Network:
    """Namespaces `names` with the addresses 10.<x>.0.1, 10.<x>.0.2, ...; removed at the end."""

    def __init__(self, count: int) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"c{mark}{number}" for number in range(count)]
        self.addresses = [f"10.{int(mark[:2], 16)}.0.{number + 1}" for number in range(count)]
        self._delay = 0.0
        self._ends: list[int] = []
        self._closing = threading.Event()
        self._carrier = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Network:
        for name, address in zip(self.names, self.addresses, strict=True):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN_NO_PI))
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "mtu", str(MTU), "txqueuelen", "10000")
            _run("ip", "-n", name, "link", "set", name, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._carrier.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        if self._carrier.is_alive():
            self._carrier.join(timeout=5)
        for end in self._ends:
            os.close(end)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def shape(self, megabits: float | None, delay: float) -> None:
        """Let each node send `megabits` a second (None: no limit); packets take `delay` seconds."""
        self._delay = delay
        for name in self.names:
            device = ("dev", name, "root")
            if megabits is None:
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "del", *device], check=False, capture_output=True
                )
            else:
                limits = ("rate", f"{megabits}mbit", "burst", str(2 * MTU), "limit", "16mb")
                _run("tc", "-n", name, "qdisc", "replace", *device, "tbf", *limits)

    def _carry(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        on_the_way: deque[tuple[float, int, bytes]] = deque()
        while not self._closing.is_set():
            wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else 0.1
            ready, _, _ = select.select(self._ends, [], [], wait)
            arrival = time.monotonic() + self._delay
            for end in ready:
                with suppress(BlockingIOError):
                    for _ in range(8):
                        packet = os.read(end, 65_536)
                        number = packet[19] - 1  # the last byte of an IPv4 destination
                        if packet[0] >> 4 == 4 and number < len(self._ends):
                            on_the_way.append((arrival, self._ends[number], packet))
            now = time.monotonic()
            while on_the_way and on_the_way[0][0] <= now:
                _, to, packet = on_the_way.popleft()
                os.write(to, packet)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
