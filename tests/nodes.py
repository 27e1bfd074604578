"""Nodes on one machine: network namespaces with addresses, host names and folders of their own."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_pipeline.stages.launch.link import TOKEN

PROJECT = Path(__file__).parents[1]
KEDRO = str(Path(sys.executable).with_name("kedro"))


def missing() -> str | None:
    """Why this machine cannot make nodes, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need ip (iproute2) and unshare (util-linux)"
    name = f"probe{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"this machine refuses network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Nodes:
    """Namespaces `names`, joined by a bridge, with the addresses 10.<n>.0.1, 10.<n>.0.2, ..."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        mark = uuid.uuid4().hex[:6]
        self.folder = folder
        self.root = folder / "root"
        """The workspace: every node sees a folder of its own here if it is private."""
        self.root.mkdir()
        self.names = [f"n{mark}{number}" for number in range(count)]
        self.hosts = [f"node-{number}" for number in range(count)]
        """Their host names."""
        self._known_hosts = folder / "etc-hosts"
        self._bridge = f"b{mark}"
        net = int(mark[:2], 16)
        self.addresses = [f"10.{net}.0.{number + 1}" for number in range(count)]
        lines = [f"{one} {other}" for one, other in zip(self.addresses, self.hosts, strict=True)]
        self._known_hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for number, name in enumerate(self.names):
            inside, outside = f"v{mark}{number}", f"w{mark}{number}"
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            _ip("link", "set", outside, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[number]}/24", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def start(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        private: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node; its output is in `output(number)`.

        With `private`, the node has its own folder under the path of the workspace.
        """
        steps = [f"hostname {self.hosts[number]}", f"mount --bind {self._known_hosts} /etc/hosts"]
        if private and number > 0:
            own = self.folder / f"root{number}"
            own.mkdir(exist_ok=True)
            steps.append(f"mount --bind {own} {self.root}")
        inside = " && ".join([*steps, f"exec {shlex.join(command)}"])
        with self.output(number).open("ab") as file:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.names[number]),
                    *("unshare", "--mount", "--uts", "sh", "-c", inside),
                ],
                env=os.environ | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
            )

    def output(self, number: int) -> Path:
        """The file with the output of all commands on a node."""
        return self.folder / f"node{number}.out"

    def start_runs(
        self,
        *arguments: str,
        numbers: Sequence[int] | None = None,
        private: bool = False,
        prefix: Callable[[int], list[str]] = lambda number: [],
        environment: Mapping[str, str] | None = None,
        **parameters: object,
    ) -> list[subprocess.Popen[bytes]]:
        """Start `kedro run` with one rank for each node, on every node as a scheduler does.

        Args:
            arguments: those of `kedro run`.
            numbers: the nodes; None: all.
            private: as for `start`.
            prefix: the beginning of the command of a node.
            environment: further variables. None: those of a plain scheduler.
            parameters: of the run, by name.
        """
        launch = {
            "root": self.root,
            "launch.mode": "rank_env",
            "launch.processes": 1,
            **parameters,
        }
        params = ",".join(f"{name}={value}" for name, value in launch.items())
        command = [KEDRO, "run", *arguments, f"--params={params}"]
        plain = {"NNODES": str(len(self.names)), "MASTER_ADDR": self.addresses[0]}
        started = []
        for number in range(len(self.names)) if numbers is None else numbers:
            shared = plain | {"NODE_RANK": str(number)} if environment is None else environment
            variables = {TOKEN: "secret"} | shared
            started.append(
                self.start(number, [*prefix(number), *command], variables, private=private)
            )
        return started

    def unplug(self, number: int) -> None:
        """Cut a node's cable: nothing arrives, and nobody is told."""
        _ip("link", "set", f"w{self.names[number][1:]}", "down")

    def plug(self, number: int) -> None:
        """Plug the cable in again."""
        _ip("link", "set", f"w{self.names[number][1:]}", "up")

    def processes(self, number: int) -> list[int]:
        """The processes on a node."""
        command = ["ip", "netns", "pids", self.names[number]]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once."""
        for pid in self.processes(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Kill what runs on the nodes, and remove them."""
        for number, name in enumerate(self.names):
            self.kill(number)
            _ip("netns", "del", name)
        _ip("link", "del", self._bridge)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
