"""Nodes on one machine: network namespaces with addresses, host names and folders of their own."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).parents[1]
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"
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
        """The workspace, which the nodes share unless they have folders of their own."""
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
        self.enter = folder / "enter"
        """A command that runs another one on a node: `enter NUMBER COMMAND`."""
        lines = [
            *("case $1 in", *(f"{n}) name={each};;" for n, each in enumerate(self.names)), "esac"),
            "export number=$1; shift",
            "exec ip netns exec $name unshare --mount --uts sh -c '",
            "hostname node-$number",
            f"mount --bind {self._known_hosts} /etc/hosts",
            f"test ! -d {self.root}$number || mount --bind {self.root}$number {self.root}",
            'exec "$@"\' enter "$@"',
        ]
        self.enter.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        self.enter.chmod(0o755)

    def start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node; its output is in `output(number)`."""
        with self.output(number).open("ab") as file:
            return subprocess.Popen(
                [str(self.enter), str(number), *command],
                env=os.environ | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
            )

    def separate(self, number: int) -> None:
        """Give a node a folder of its own under the path of the workspace."""
        Path(f"{self.root}{number}").mkdir()

    def output(self, number: int) -> Path:
        """The file with the output of all commands on a node."""
        return self.folder / f"node{number}.out"

    def start_run(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **parameters: object
    ) -> subprocess.Popen[bytes]:
        """Start `kedro run` on the first node, with one rank for each node, and parameters."""
        launch = {
            "root": self.root,
            "launch.mode": "command",
            "launch.nodes": len(self.names),
            "launch.command": f"{self.enter} {{node}} {{command}}",
            "launch.address": self.addresses[0],
            "launch.processes": 1,
            **parameters,
        }
        params = ",".join(f"{name}={value}" for name, value in launch.items())
        return self.start(0, [KEDRO, "run", *arguments, f"--params={params}"], environment)

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


def programs(nodes: Nodes) -> list[str]:
    """The command lines of ranks and launchers on all nodes."""
    found = []
    for number in range(len(nodes.names)):
        for pid in nodes.processes(number):
            with suppress(psutil.NoSuchProcess):
                found.append(" ".join(psutil.Process(pid).cmdline()))
    return [command for command in found if "07_workspace" in command]


def missing_ssh() -> str | None:
    """Why no node can be reached by ssh, or None."""
    if shutil.which("sshd", path=SBIN) is None or shutil.which("pdsh") is None:
        return "needs sshd (openssh-server) and pdsh"
    return None


def ssh_servers(nodes: Nodes) -> dict[str, Any]:
    """Start a server on each node; return what makes DeepSpeed use them, for `start_run`."""
    folder = nodes.folder
    for name in ("host", "user"):
        if not (folder / name).exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = (
        f"-o HostKey={folder}/host -o AuthorizedKeysFile={folder}/user.pub -o UsePAM=no "
        "-o StrictModes=no -o PermitRootLogin=yes -o PidFile=none"
    )
    sshd = [str(shutil.which("sshd", path=SBIN)), "-D", "-e", "-f", "/dev/null", *server.split()]
    for number in range(len(nodes.names)):
        if not any("sshd" in psutil.Process(pid).name() for pid in nodes.processes(number)):
            nodes.start(number, sshd)
    client = folder / "bin" / "ssh"
    client.parent.mkdir(exist_ok=True)
    client.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F /dev/null -i {folder}/user "
        '-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
    )
    client.chmod(0o755)
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} slots=1\n" for address in nodes.addresses))
    return {
        "environment": {"PATH": f"{client.parent}:{os.environ['PATH']}"},
        **{"launch.mode": "hostfile", "launch.hostfile": hosts, "launch.processes": "null"},
        **{"launch.nodes": "null", "launch.command": "null"},
    }


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
