"""The environment of Mooncake, in whose store engines of several nodes keep keys for each other.

``python -m rose_dev.mooncake_environment`` makes it in ``$ROSE_CACHE/engine`` (half a minute) and
prints the path of its Python; run again it answers at once. The build without CUDA: pages pass
through host memory. It wants the library of InfiniBand also where there is none, so that is
unpacked beside its own libraries, on machines of Debian; nothing of the machine is changed.

``serving`` runs a master and a client that gives memory, for tests and benchmarks. Mooncake's
transfers listen on all interfaces whatever they are told (``MC_TCP_BIND_ADDRESS`` is a name to be
announced), so all of it is in a network namespace of its own, where root runs it. Next step:
``rose_engines.kv.pool_process`` runs in this environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rose_agent.tap.sockets import namespace
from rose_dev.environments import PYTHON_VERSION, Environment, SetupFailed, Steps
from rose_dev.sandbox_parts import Impossible, Packages
from rose_dev.shell import ending_with_us
from rose_dev.waiting import wait_until
from rose_wire.ports import free_port

VERSION = "0.3.13.post1"
_WHEELS = (
    f"mooncake-transfer-engine-non-cuda=={VERSION}",
    "aiohttp==3.14.5",
    "cryptography==50.0.2",
    "requests==2.34.2",
    "xxhash==4.1.0",
)
_LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_START_SECONDS = 30.0


def fingerprint() -> str:
    """What the environment is made of."""
    return hashlib.sha256(" ".join((*_WHEELS, *_LIBRARIES, PYTHON_VERSION)).encode()).hexdigest()


def _fill(steps: Steps) -> None:
    steps.install(f"Mooncake {VERSION} without CUDA", *_WHEELS)
    with tempfile.TemporaryDirectory(prefix="rose") as scratch:
        packages = Packages(Path(scratch) / "debian", None)
        try:
            packages.refresh()
            packages.unpack(*_LIBRARIES, alone=True)
        except Impossible as error:
            raise SetupFailed(f"InfiniBand's library, which Mooncake wants: {error}") from error
        # Where its own libraries are, which the loader looks into for all of them.
        beside = steps.site / "mooncake_transfer_engine_non_cuda.libs"
        for found in packages.root.rglob("*.so.*"):
            shutil.copy(found.resolve(), beside / found.name)
    steps.run("first import of Mooncake", [steps.python, "-c", "import mooncake.store"])


ENGINE = Environment(f"mooncake-{VERSION}", "Mooncake", fingerprint, _fill)
mooncake_python = ENGINE.python
is_ready = ENGINE.is_ready
install = ENGINE.install


@dataclass(frozen=True)
class Pool:
    """A store of Mooncake on this machine.

    Attributes:
        master: ``host:port``.
        metrics: URL of the master's own figures.
        processes: the master, and the client that gives memory.
        python: has Mooncake, and runs where the two are reached.
        network: namespace that they are in; empty = this process's.
    """

    master: str
    metrics: str
    processes: tuple[subprocess.Popen[bytes], ...]
    python: Path
    network: str = ""

    def kill_master(self) -> None:
        """Take the master away, as a node that is lost does; the memory stays."""
        self.processes[0].kill()
        self.processes[0].wait()

    def stand_still(self, *, still: bool) -> None:
        """Stop, or let go on, the client that gives memory.

        A signal is sent before its process stands still: one of its threads has to be given a core
        to take it, and until then the others answer, thousands of times where cores are busy.
        """
        client = self.processes[1]
        client.send_signal(signal.SIGSTOP if still else signal.SIGCONT)
        if still:
            wait_until(lambda: _stands_still(client.pid), "it stands still", seconds=_START_SECONDS)

    def objects(self) -> int:
        """How many there are, by the master's count."""
        with (
            namespace(self.network),
            urllib.request.urlopen(self.metrics, timeout=10) as page,  # noqa: S310  # loopback
        ):
            text = page.read().decode()
        found = re.search(r"(?m)^master_key_count\S* (\d+)", text)
        if found is None:
            raise SetupFailed(f"{self.metrics} has no master_key_count")
        return int(found[1])


def _stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    return all((one / "stat").read_text().rpartition(")")[2].split()[0] == "T" for one in threads)


_HOLD = """
import fcntl, socket, struct, sys
with socket.socket() as made:
    fcntl.ioctl(made, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS: up
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def _own_network(folder: Path) -> Iterator[tuple[str, Path]]:
    """A network with loopback alone, and a Python that has Mooncake and runs there."""
    python = mooncake_python()
    if os.geteuid():
        yield "", python
        return
    held = subprocess.Popen(
        ending_with_us(["unshare", "--net", sys.executable, "-c", _HOLD]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        if cast("IO[bytes]", held.stdout).readline() != b"ready\n":
            raise SetupFailed("no network namespace can be made for Mooncake")
        network, inside = f"/proc/{held.pid}/ns/net", folder / "python-in-the-pools-network"
        inside.write_text(f'#!/bin/sh\nexec nsenter --net={network} -- {python} "$@"\n')
        inside.chmod(0o755)
        yield network, inside
    finally:
        held.kill()
        held.communicate()


@contextmanager
def serving(folder: Path, mebibytes: int) -> Iterator[Pool]:
    """Run a master and a client that gives memory, as root in a network of their own.

    Args:
        folder: for their logs.
        mebibytes: of memory.

    Raises:
        SetupFailed: they do not come up; the message has the end of the log.
    """
    at, metrics, port = free_port(), free_port(), free_port()
    here = mooncake_python().parent.parent / "lib" / f"python{PYTHON_VERSION}" / "site-packages"
    programs = here / "mooncake"
    master = [
        *(str(programs / "mooncake_master"), "-rpc_address", "127.0.0.1"),
        *("-rpc_port", str(at), "-metrics_host", "127.0.0.1", "-metrics_port", str(metrics)),
        *("-rpc_thread_num", "1", "-logtostderr"),
    ]
    client = [
        *(str(programs / "mooncake_client"), "-host", "127.0.0.1", "-port", str(port)),
        *("-global_segment_size", f"{mebibytes} MB", "-master_server_address", f"127.0.0.1:{at}"),
        *("-metadata_server", "P2PHANDSHAKE", "-protocol", "tcp", "-logtostderr"),
    ]
    made: list[subprocess.Popen[bytes]] = []
    log = folder / "mooncake.log"
    with _own_network(folder) as (network, python):
        inside = ["nsenter", f"--net={network}", "--"] if network else []
        try:
            with log.open("wb") as file:
                for line, listens in ((master, at), (client, port)):
                    whole = ending_with_us([*inside, *line])
                    made.append(
                        subprocess.Popen(whole, stdout=file, stderr=file, start_new_session=True)
                    )
                    _wait_for(listens, log, network)
            address, figures = f"127.0.0.1:{at}", f"http://127.0.0.1:{metrics}/metrics"
            yield Pool(address, figures, tuple(made), python, network)
        finally:
            for one in reversed(made):
                one.send_signal(signal.SIGKILL)
                one.wait()


def _wait_for(port: int, log: Path, network: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with namespace(network), socket.socket() as asked:
            if not asked.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise SetupFailed(f"Mooncake does not come up:\n{log.read_text(errors='replace')[-2000:]}")


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_dev.mooncake_environment``."""
    parser = argparse.ArgumentParser(prog="rose_dev.mooncake_environment", description=__doc__)
    parser.parse_args(argv)
    return ENGINE.command(print_only=False)


if __name__ == "__main__":
    sys.exit(main())
