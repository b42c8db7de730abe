"""``rose tap`` against a real engine process in another network namespace, request by request."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.tap.watcher import Listener, process, tap_process
from rose_agent.tap.frames import TapWatch
from rose_core.identity import PodUid
from rose_core.telemetry.book import Book, FinishedRequest
from rose_core.telemetry.events import Arrived, EndKind, Health, TapEvent
from tests.agent.node import tap_refusal
from tests.tap.inside import ABORTED, PLAIN, SHORT, STREAMED, TOKEN_SECONDS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "can tap"),
]
PATIENCE = 60.0
EXPECTED = STREAMED + PLAIN + SHORT + ABORTED
SAME_NS = 5_000_000
"""The kernel stamps packets by another clock of the same machine."""


async def line(from_process: asyncio.subprocess.Process) -> str:
    assert from_process.stdout is not None
    text = await asyncio.wait_for(from_process.stdout.readline(), PATIENCE)
    return text.decode().strip()


async def beat(listener: Listener, until_ns: int = 0) -> Health:
    return await asyncio.wait_for(listener.beat(until_ns), PATIENCE)


async def test_every_request_as_the_client_saw_it(short_dir: Path) -> None:
    async with process("-m", "tests.tap.inside") as inside:
        port = int((await line(inside)).split()[1])
        async with tap_process(short_dir, TapWatch(PodUid("pod"), inside.pid, port)) as (
            listener,
            parser,
        ):
            assert (await beat(listener)).problem == ""
            for name in ("CapEff", "CapPrm"):
                assert capability(parser.pid, name) == 0, "the parser has given up everything"
            events = listener.events = []
            assert inside.stdin is not None
            inside.stdin.write(b"go\n")
            answer = asyncio.create_task(line(inside))
            while not answer.done():
                await beat(listener)
            client = json.loads(await answer)
            await beat(listener, time.monotonic_ns())
            judge(events, client["streamed"])


async def test_a_namespace_that_goes_away_is_told_and_not_taken_for_emptiness(
    short_dir: Path,
) -> None:
    async with tap_process(short_dir, TapWatch(PodUid("lost"), 2**22 - 1, 30000)) as (listener, _):
        while (await beat(listener)).problem == "":
            pass


def capability(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0], 16)


def judge(events: list[TapEvent], streamed: list[dict[str, int]]) -> None:
    book = Book(0)
    done = [f for e in events if isinstance(f := book.apply(e, 0), FinishedRequest)]
    arrivals = [e for e in events if isinstance(e, Arrived)]
    assert len(arrivals) == EXPECTED
    assert len(done) == EXPECTED
    assert book.live == {}
    last = [e for e in events if isinstance(e, Health)][-1]
    assert (last.in_flight, last.lost_ns, last.problem) == (0, 0, "")
    assert last.counts == {"/generate": EXPECTED, "/metrics": 3}
    how = Counter(f.how for f in done)
    assert how[EndKind.COMPLETE] == EXPECTED - ABORTED

    by_arrival = sorted((f for f in done if f.first_ns), key=lambda f: f.arrived_ns)[:STREAMED]
    by_sending = sorted(streamed, key=lambda c: c["sent"])
    # Where response segments were sampled in the kernel the count is an estimate from bytes.
    counted, true = sum(f.tokens for f in by_arrival), sum(c["tokens"] for c in by_sending)
    assert counted == pytest.approx(true, rel=0.15)
    # Whatever else the machine does: nothing is on the wire before it was sent, and nothing comes
    # to the client before it was there. How much later it comes is the machine's.
    for seen, client in zip(by_arrival, by_sending, strict=True):
        assert client["sent"] <= seen.arrived_ns + SAME_NS
    for seen_by_tap, seen_by_client in (
        (sorted(f.first_ns for f in by_arrival), sorted(c["first"] for c in by_sending)),
        (sorted(f.ended_ns for f in by_arrival), sorted(c["done"] for c in by_sending)),
    ):
        for there, here in zip(seen_by_tap, seen_by_client, strict=True):
            assert there <= here + SAME_NS
    assert all(f.arrived_ns < f.first_ns < f.ended_ns for f in by_arrival)
    # No engine is faster than it is told to be.
    tpot = statistics.median(f.tpot_s or 0 for f in by_arrival)
    assert tpot > 0.5 * TOKEN_SECONDS
