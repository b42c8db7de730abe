"""``python -m bench.keys``: what keys cost the processors on their way from node to node.

Two processes play two nodes. What the folder of one holds is written to a Mooncake store on this
machine over TCP, and read from there by the other: the processes that engines have beside them
(``rose_engines.kv.pool_process``), pages of an 8B's size, looked up by name, sealed, checked. Each
round does both, and two things more: it reads the same pages from their own folder, as an engine
does whose node has them; and it opens sealed pages, which is what is left of a pull for the
processors where RDMA brings the bytes. Writes ``out/bench/keys.json``. CPU is that of all processes
together, of both sides; what an engine then does with a page is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from bench.record import Figure, log, record
from rose_dev.mooncake_environment import Pool, install, serving
from rose_engines.kv.pages import PageFolder
from rose_engines.kv.pool import WRITTEN_AT_ONCE
from rose_engines.kv.pool_process import AT_ONCE, PoolSetup, checksum
from rose_engines.kv.seal import SEAL_BYTES, Seal
from rose_wire import flags

PAGE_BYTES = 2 << 20
"""16 tokens of an 8B's keys in bfloat16, 128 KiB each."""

_MEMORY = Path("/dev/shm")  # noqa: S108  # as on a node: folders of keys lie in memory
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Of one round, for each GB.

    Attributes:
        wall: seconds.
        cpu: seconds of all processes.
    """

    wall: float
    cpu: float


class Mover:
    """A process that moves pages, as an engine has one.

    Args:
        python: that has Mooncake.
        setup: what it is told first.
    """

    def __init__(self, python: Path, setup: PoolSetup) -> None:
        pipe, memory = subprocess.PIPE, os.memfd_create("rose-keys")
        os.ftruncate(memory, AT_ONCE * PAGE_BYTES)
        self.process = subprocess.Popen(
            [str(python), "-m", "rose_engines.kv.pool_process"],
            stdin=pipe,
            stdout=pipe,
            env=os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))},
            pass_fds=[memory],
        )
        self._send(replace(setup, shared=memory).line())
        self._reply()

    def do(self, what: str, pages: Sequence[str]) -> None:
        """Move pages, a few at a time.

        Raises:
            RuntimeError: some were not moved.
        """
        most = WRITTEN_AT_ONCE if what == "push" else AT_ONCE
        for place in range(0, len(pages), most):
            some = list(pages[place : place + most])
            self._send(json.dumps({"do": what, "pages": some}))
            if self._reply()["done"] != len(some):
                raise RuntimeError(f"{what}: not all of {len(some)} pages were moved")

    def _send(self, line: str) -> None:
        stdin = cast("IO[bytes]", self.process.stdin)
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def _reply(self) -> dict[str, Any]:
        line = cast("IO[bytes]", self.process.stdout).readline()
        if not line:
            raise RuntimeError("the process beside the engine has ended; its reason is above")
        found: dict[str, Any] = json.loads(line)
        return found


def parser() -> argparse.ArgumentParser:
    """The knobs."""
    made = argparse.ArgumentParser(prog="python -m bench.keys", description=__doc__)
    made.add_argument("--rounds", type=flags.one_or_more, default=8)
    made.add_argument("--pages", type=flags.one_or_more, default=64, help="of a round, 2 MiB each")
    return made


def cpu_seconds(pids: Sequence[int]) -> float:
    """What processes have taken so far."""
    if list(pids) == [os.getpid()]:
        return time.process_time()  # finer than the kernel's ticks
    taken = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        taken += (int(fields[11]) + int(fields[12])) / _TICKS
    return taken


def measured(work: Callable[[], None], pids: Sequence[int], gigabytes: float) -> Cost:
    """What some work costs."""
    cpu, began = cpu_seconds(pids), time.monotonic()
    work()
    wall = time.monotonic() - began
    return Cost(wall / gigabytes, (cpu_seconds(pids) - cpu) / gigabytes)


@contextmanager
def movers(folder: Path, pool: Pool, most: int) -> Iterator[tuple[Mover, Mover]]:
    """The processes of two nodes of one lease."""
    secret = secrets.token_hex(16)
    made = []
    for name in ("here", "there"):
        setup = PoolSetup(pool.master, "tcp", secret, str(folder / name), most, PAGE_BYTES)
        made.append(Mover(pool.python, setup))
    try:
        yield made[0], made[1]
    finally:
        for one in made:
            one.process.kill()
            one.process.wait()


def rounds(given: argparse.Namespace, folder: Path) -> dict[str, list[Cost]]:
    """Every round's costs, by what was done."""
    most = 2 * given.pages * (PAGE_BYTES + 1024)
    for name in ("here", "there"):
        (folder / name).mkdir()
    here = PageFolder(folder / "here", most, checksum)
    found: dict[str, list[Cost]] = {name: [] for name in ("write", "pull", "read here", "open")}
    room = (given.rounds + 1) * given.pages * PAGE_BYTES * 5 // 4 >> 20
    with serving(folder, room) as pool, movers(folder, pool, most) as (first, second):
        pids = [one.pid for one in (*pool.processes, first.process, second.process)]
        for number in range(given.rounds + 1):  # the first one warms up
            log(f"round {number} of {given.rounds}")
            pages = [f"{number}-{place}" for place in range(given.pages)]
            for page in pages:
                here.put(page, memoryview(os.urandom(PAGE_BYTES)))
            work: dict[str, tuple[Callable[[], None], Sequence[int]]] = {
                "write": (partial(first.do, "push", pages), pids),
                "pull": (partial(second.do, "pull", pages), pids),
                "read here": (partial(_read, here, pages), [os.getpid()]),
                "open": (partial(_open, *_sealed(), len(pages)), [os.getpid()]),
            }
            for name, (done, by) in work.items():
                cost = measured(done, by, len(pages) * PAGE_BYTES / 1e9)
                found[name] += [cost] if number else []
    return found


def _read(folder: PageFolder, pages: Sequence[str]) -> None:
    into = memoryview(bytearray(PAGE_BYTES))
    for page in pages:
        folder.get(page, into)


def _sealed() -> tuple[Seal, memoryview]:
    seal, sealed = Seal(secrets.token_hex(16)), memoryview(bytearray(PAGE_BYTES + SEAL_BYTES))
    seal.close("page", memoryview(os.urandom(PAGE_BYTES)), sealed)
    return seal, sealed


def _open(seal: Seal, sealed: memoryview, pages: int) -> None:
    into = memoryview(bytearray(PAGE_BYTES))
    for _ in range(pages):
        if not seal.open("page", sealed, into):
            raise RuntimeError("a page is not opened by who has sealed it")


def figures(found: dict[str, list[Cost]]) -> list[Figure]:
    """Medians over the rounds, and least and most."""
    made = []
    for name, costs in found.items():
        for what in ("cpu", "wall"):
            values = [getattr(cost, what) for cost in costs]
            made.append(Figure(f"{name}, {what}, median", statistics.median(values), "s/GB"))
            made.append(Figure(f"{name}, {what}, least", min(values), "s/GB"))
            made.append(Figure(f"{name}, {what}, most", max(values), "s/GB"))
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write down."""
    given = parser().parse_args(argv)
    install()
    with tempfile.TemporaryDirectory(prefix="rose-keys-", dir=_MEMORY) as name:
        found = rounds(given, Path(name))
    notes = (
        f"{given.rounds} rounds of {given.pages} pages, 2 MiB each; both nodes, the store and its "
        "master on this machine, over TCP",
    )
    record("keys", figures(found), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
