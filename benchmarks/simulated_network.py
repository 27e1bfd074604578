"""Nodes on one machine, joined by links with a bandwidth and a delay. Needs root and Linux.

Each node is a network namespace with one interface, a TUN device. The kernel's token bucket
(`tc`, qdisc tbf) limits what a node sends. A thread carries packets from node to node and holds
each one for the delay: unlike netem, which some kernels lack, it needs no kernel module.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
MTU = 16_000
"""Bytes of a packet. Large packets leave the cores to the processes under test."""
PATIENCE = 300
"""Seconds that one answer of a rank may take."""


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


class Ranks:
    """Processes that obey together: each reads a JSON line and answers with one."""

    def __init__(self, processes: list[subprocess.Popen[str]], logs: Path) -> None:
        self._processes = processes
        self._logs = logs

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method on all: the mean bytes, and of each step the slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([method, arguments]) + "\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        found = dict(answers[0])
        if "seconds" in found:
            steps = zip(*(answer["seconds"] for answer in answers), strict=True)
            found["seconds"] = [max(step) for step in steps]
            found["sent"] = sum(answer["sent"] for answer in answers) / len(answers)
        return found

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            raise TimeoutError(
                f"a rank: found no answer in {PATIENCE} s. Fix: read {self._logs}/rank*"
            )
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank: found an early end. Fix: read {self._logs}/rank*.log")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(network: Network, program: Path, logs: Path) -> Iterator[Ranks]:
    """Run a Python program as a rank on each node; the ranks are killed at the end."""
    plain = os.environ | {
        "WORLD_SIZE": str(len(network.names)), "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": "29500", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, name in enumerate(network.names):
            with (logs / f"rank{number}.log").open("w") as log:
                command = ["ip", "netns", "exec", name, sys.executable, str(program)]
                processes.append(
                    subprocess.Popen(
                        command, env=plain | {"RANK": str(number)}, text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    )
                )  # fmt: skip
        yield Ranks(processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
