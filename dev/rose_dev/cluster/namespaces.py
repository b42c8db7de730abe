"""The node's namespaces and the processes in them.

``NodeNamespaces.open`` starts process 1 (``node_init``) with ``unshare``; ``start`` adds processes
with ``nsenter``. Every process carries a mark in its environment and a process id file, and ends
with process 1. ``sweep`` finds and ends whatever an earlier run left, whichever way it died.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_interface
from pathlib import Path

from rose_dev.cluster import cgroups
from rose_dev.cluster.place import MARK, NodeFolders
from rose_dev.errors import DevelopmentError, StartFailed
from rose_dev.shell import run, succeeds, tail
from rose_dev.waiting import wait_until

_COMMAND_SECONDS = 30.0
_INIT = "init"
# Writes its process id (atomically), then becomes the command: PIDFILE LOG COMMAND...
_DETACHED = """
echo $$ >"$1.new" && mv "$1.new" "$1" || exit 1
log=$2; shift 2
exec "$@" >>"$log" 2>&1
"""


class NodeNamespaces:
    """Namespaces of the node at a place."""

    def __init__(self, place: NodeFolders) -> None:
        self.place = place

    @property
    def pids(self) -> Path:
        """Folder of process id files, of the ``unshare`` and ``nsenter`` that wait."""
        return self.place.run / "pids"

    def open(self, beside: NodeNamespaces | None = None) -> None:
        """Start process 1 and connect the node's network with the machine.

        Args:
            beside: the node whose network this one hangs on instead of the machine's.

        Raises:
            DevelopmentError: a step failed.
        """
        for folder in (self.place.run, self.pids, self.place.logs, self.place.data):
            folder.mkdir(parents=True, exist_ok=True)
        self.place.run.chmod(0o700)
        flags = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = [sys.executable, "-m", "rose_dev.cluster.node_init", str(self.place.run)]
        self._launch(_INIT, ["unshare", *flags, "--propagation", "private", *init])
        ready = self.place.run / "init.ready"
        self._wait(_INIT, ready.exists, "the node's file system")
        cgroups.make(self.place.seat.cgroup)
        if beside is None:
            self._connect(_on_machine)
            seat = self.place.seat
            for range_ in (seat.ranges.pods, seat.ranges.services):
                _on_machine(["ip", "route", "add", range_, "via", seat.address])
        else:
            self._connect(beside.run)
            self._exchange_routes(beside)

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a process of the node; its output goes to ``logs/NAME.log``."""
        self._launch(name, [*self._enter("--pid"), *argv])

    def kill(self, name: str) -> None:
        """Kill a process of the node, as a crash would.

        Raises:
            StartFailed: it does not run.
        """
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        # A zombie's other threads may still hold its ports; its parent gets to reap it after them.
        gone = Path("/proc", str(pid))
        wait_until(lambda: not gone.exists(), f"the end of {name}", seconds=_COMMAND_SECONDS)

    def pid(self, name: str) -> int:
        """Process id of a component, as the machine sees it.

        Raises:
            StartFailed: it does not run.
        """
        outer = self._outer(name)
        children = _children(outer) if outer and _alive(outer) else []
        if not children:
            message = f"{name} of the node does not run:\n{tail(self.place.logs / f'{name}.log')}"
            raise StartFailed(message)
        return children[0]

    def running(self, name: str) -> bool:
        """Whether a component runs."""
        try:
            return _alive(self.pid(name))
        except StartFailed:
            return False

    def alive(self) -> bool:
        """Whether the node's process 1 runs."""
        return self.running(_INIT)

    def root(self) -> Path:
        """The node's file system, as the machine sees it."""
        return Path("/proc") / str(self.pid(_INIT)) / "root"

    def run(self, argv: Sequence[str | Path], *, seconds: float = 60, stdin: bytes = b"") -> str:
        """Run a command in the node's mount and network namespaces and return its output."""
        return run([*self._enter(), *argv], seconds=seconds, stdin=stdin).stdout

    def succeeds(self, argv: Sequence[str | Path]) -> bool:
        """Whether a command succeeds in the node's mount and network namespaces."""
        return succeeds([*self._enter(), *argv])

    def _enter(self, *namespaces: str) -> list[str]:
        target = str(self.pid(_INIT))
        return ["nsenter", "--target", target, "--mount", "--net", *namespaces, "--"]

    def _wait(self, name: str, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            outer = self._outer(name)
            if outer and not _alive(outer):
                message = f"{what}:\n{tail(self.place.logs / f'{name}.log')}"
                raise StartFailed(message)
            return condition()

        wait_until(holds, what, seconds=_COMMAND_SECONDS, pause=0.02)

    def _launch(self, name: str, argv: Sequence[str]) -> None:
        """Start detached from this process, so that it outlives whoever called."""
        log, pid = self.place.logs / f"{name}.log", self.pids / name
        pid.unlink(missing_ok=True)
        environment = {"PATH": _path(), "HOME": "/root", MARK: str(self.place.run)}
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _DETACHED, "sh", str(pid), str(log), *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
            check=True,
            cwd="/",
        )
        wait_until(pid.exists, f"the start of {name}", seconds=_COMMAND_SECONDS, pause=0.01)
        outer = self._outer(name)
        wait_until(
            lambda: not _alive(outer) or bool(_children(outer)),
            f"the start of {name}",
            seconds=_COMMAND_SECONDS,
            pause=0.01,
        )

    def _outer(self, name: str) -> int:
        try:
            return int((self.pids / name).read_text())
        except (OSError, ValueError):
            return 0

    def _connect(self, outside: Callable[[list[str]], object]) -> None:
        """Lay the link; ``outside`` runs commands in the network at its other end."""
        seat = self.place.seat
        peer = ["peer", "name", "machine0", "netns", str(self.pid(_INIT))]
        outside(["ip", "link", "add", seat.link, "type", "veth", *peer])
        outside(["ip", "address", "add", f"{seat.gateway}/30", "dev", seat.link])
        outside(["ip", "link", "set", seat.link, "up"])
        self.run(["ip", "link", "set", "lo", "up"])
        self.run(["ip", "address", "add", f"{seat.address}/30", "dev", "machine0"])
        self.run(["ip", "link", "set", "machine0", "up"])
        # /proc/sys/net shows the network of whoever reads it, so this is the node's own.
        self.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])

    def _exchange_routes(self, beside: NodeNamespaces) -> None:
        """Each node's pods, and what is behind the first one, are reached over the link."""
        mine, theirs = self.place.seat, beside.place.seat
        beside.run(["ip", "route", "add", mine.pods, "via", mine.address])
        behind = ip_interface(f"{theirs.address}/30").network
        for range_ in (theirs.pods, str(behind)):
            self.run(["ip", "route", "add", range_, "via", mine.gateway])


def sweep(place: NodeFolders) -> None:
    """End whatever is left of a node at this place: processes, link, cgroups, files.

    Frozen cgroups are thawed first, because frozen tasks ignore even SIGKILL.

    Raises:
        DevelopmentError: something would not go.
    """
    deadline = time.monotonic() + 60
    while True:
        left = marked(place) | cgroups.members(place.seat.cgroup)
        cgroups.kill(place.seat.cgroup)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        if time.monotonic() > deadline:
            message = f"processes of the node that do not end: {sorted(left)}"
            raise DevelopmentError(message)
        time.sleep(0.05)
    if Path("/sys/class/net", place.seat.link).exists():
        run(["ip", "link", "delete", place.seat.link], seconds=_COMMAND_SECONDS, check=False)
    if stuck := cgroups.remove(place.seat.cgroup):
        message = f"cgroups that cannot be removed: {', '.join(map(str, stuck))}"
        raise DevelopmentError(message)
    for folder in (place.run, place.data):
        shutil.rmtree(folder, ignore_errors=True)


def marked(place: NodeFolders) -> set[int]:
    """Processes that carry the mark of the node at this place; zombies do not count."""
    wanted = f"{MARK}={place.run}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def _alive(pid: int) -> bool:
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _children(pid: int) -> list[int]:
    try:
        text = Path("/proc", str(pid), "task", str(pid), "children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split() if _alive(int(pid))]


def _on_machine(argv: list[str]) -> None:
    run(argv, seconds=_COMMAND_SECONDS)


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
