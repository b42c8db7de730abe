"""Serving pods that attack whoever reads them, beside the real guard with its confined readers.

Nothing but processes is needed: the pods are ``hostile``, the node is that of the guard's tests.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest

from rose_core.wire.sync import PoolPolicy
from tests.agent.node import Node, node, tap_refusal

pytestmark = [
    pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "-"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

HOSTILE = Path(__file__).with_name("hostile.py")
TRICKS = ("bomb", "endless", "slow", "shrink", "sparse", "exchange", "names")
POOL = "evil/pool"
LIMIT = 384 << 20
"""Memory of the guard's container, by the chart's values."""


@contextlib.asynccontextmanager
async def beside_hostile_pods(root: Path) -> AsyncIterator[tuple[Node, dict[str, int]]]:
    """A node whose pool has a replica per trick; their ports."""
    async with node(root) as found:
        evil = PoolPolicy(pool=POOL, mode="Lend", labels={"app": "evil"}, port=1)
        found.operator.others = (evil,)
        ports = {}
        for trick in TRICKS:
            process = await found.spawn(trick, str(HOSTILE), trick, "0")
            log = root / f"{trick}.log"
            await found.until(partial(is_listening, log), f"{trick} listens")
            ports[trick] = port = int(log.read_text().split("port=")[1])
            entry = {"uid": trick, "pool": POOL, "port": port, "pids": [process.pid]}
            found.neighbours.append({**entry, "interfaces": ["lo"]})
        found.write_replicas()
        pids = [str(found.processes[trick].pid) for trick in TRICKS]
        yield found, ports
    sweep(pids)


def is_listening(log: Path) -> bool:
    """Whether a hostile pod has told its port."""
    return "port=" in log.read_text()


def sweep(pids: list[str]) -> None:
    """What these processes left in shared memory; there it would stay."""
    for left in Path("/dev/shm").iterdir():
        if any(pid in left.name for pid in pids) and left.name.startswith(("sglang_", "pipe_")):
            left.unlink(missing_ok=True)


async def asked(found: Node, port: int) -> int:
    """How often the guard has read this replica's page."""
    try:
        async with found.http.get(f"http://127.0.0.1:{port}/asked") as page:
            return int(await page.text())
    except (aiohttp.ClientError, ValueError):
        return 0


def peak(pid: int) -> int:
    """The most memory that a process ever held, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def held(pid: int) -> int:
    """What a process and its children hold together, shared pages once, in bytes."""
    total = 0
    for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    return total


async def test_the_guard_reads_on_beside_pods_that_attack_their_readers(short_dir: Path) -> None:
    async with beside_hostile_pods(short_dir) as (found, ports):
        guard = found.processes["agent"]

        async def read_again() -> bool:
            return all([await asked(found, port) >= 2 for port in ports.values()])

        await found.until(read_again, "each of them was read and read again", seconds=300)
        assert guard.returncode is None
        assert peak(guard.pid) < LIMIT
        assert held(guard.pid) < LIMIT
        # Its neighbour's signals go on.
        await found.until(lambda: is_known(found), "the other replica's signals are believed")
        report = await found.report()
        assert {one["pod"] for one in report["replicas"]} >= {*TRICKS, "serving-0"}


async def is_known(found: Node) -> bool:
    """Whether the guard believes what it sees of the replica that attacks nobody."""
    replicas = (await found.report())["replicas"]
    (one,) = (one for one in replicas if one["pod"] == "serving-0")
    return one["doubt"] is None and one["verified"] is True
