"""``rose tap`` against a real engine process in another network namespace, request by request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rose_agent.tap import frames
from rose_agent.tap.frames import Watch
from rose_core.telemetry.book import Book, Finished
from rose_core.telemetry.events import Arrived, Health, How, TapEvent
from tests.agent.node import tap_refusal
from tests.tap.inside import ABORTED, PLAIN, SHORT, STREAMED

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "can tap"),
]
PATIENCE = 60.0
EXPECTED = STREAMED + PLAIN + SHORT + ABORTED


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield started
    finally:
        if started.stdin is not None:
            started.stdin.close()
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            await asyncio.wait_for(started.wait(), 5)
        if started.returncode is None:
            started.kill()
        await started.wait()


async def line(from_process: asyncio.subprocess.Process) -> str:
    assert from_process.stdout is not None
    text = await asyncio.wait_for(from_process.stdout.readline(), PATIENCE)
    return text.decode().strip()


async def connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(str(path))
        await asyncio.sleep(0.1)
    raise AssertionError("the tap never listened")


async def next_events(reader: asyncio.StreamReader) -> list[TapEvent]:
    return await asyncio.wait_for(frames.read(reader, frames.events), PATIENCE)


async def next_health(reader: asyncio.StreamReader) -> Health:
    while True:
        for event in await next_events(reader):
            if isinstance(event, Health):
                return event


async def test_every_request_as_the_client_saw_it(short_dir: Path) -> None:
    run = ("-m", "rose_cli.main", "tap", "--rundir", str(short_dir))
    async with (
        process("-m", "tests.tap.inside") as inside,
        process(*run, "--http-host", "127.0.0.1", "--http-port", "0") as tap,
    ):
        port = int((await line(inside)).split()[1])
        reader, writer = await connected(short_dir / "tap.sock")
        writer.write(frames.pack([Watch("pod", inside.pid, port)]))
        health = await next_health(reader)
        assert health.problem == ""
        (parser,) = psutil.Process(tap.pid).children()
        for name in ("CapEff", "CapPrm"):
            assert capability(parser.pid, name) == 0, "the parser has given up everything"

        events: list[TapEvent] = []
        assert inside.stdin is not None
        inside.stdin.write(b"go\n")
        answer = asyncio.create_task(line(inside))
        while not answer.done():
            events += await next_events(reader)
        client = json.loads(await answer)
        events.append(await next_health(reader))
        writer.close()
        judge(events, client["streamed"])

        # The namespace goes away with the pod: the tap says so instead of claiming emptiness.
        reader, writer = await connected(short_dir / "tap.sock")
        writer.write(frames.pack([Watch("lost", 2**22 - 1, port)]))
        while (await next_health(reader)).problem == "":
            pass
        writer.close()


def capability(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0], 16)


def judge(events: list[TapEvent], streamed: list[dict[str, int]]) -> None:
    book = Book(0)
    done = [f for e in events if isinstance(f := book.apply(e, 0), Finished)]
    arrivals = [e for e in events if isinstance(e, Arrived)]
    assert len(arrivals) == EXPECTED
    assert len(done) == EXPECTED
    assert book.live == {}
    last = [e for e in events if isinstance(e, Health)][-1]
    assert (last.in_flight, last.lost_ns, last.problem) == (0, 0, "")
    assert last.counts == {"/generate": EXPECTED, "/metrics": 3}
    how = Counter(f.how for f in done)
    assert how[How.COMPLETE] == EXPECTED - ABORTED

    by_arrival = sorted((f for f in done if f.first_ns), key=lambda f: f.arrived_ns)[:STREAMED]
    by_sending = sorted(streamed, key=lambda c: c["sent"])
    # Where response segments were sampled in the kernel the count is an estimate from bytes.
    counted, true = sum(f.tokens for f in by_arrival), sum(c["tokens"] for c in by_sending)
    assert counted == pytest.approx(true, rel=0.15)
    # The client shares its core with everything else, so only the medians are compared.
    ttft = statistics.median(f.ttft_s or 0 for f in by_arrival)
    client_ttft = statistics.median((c["first"] - c["sent"]) / 1e9 for c in by_sending)
    assert 0 < ttft <= client_ttft + 0.05
    tpot = statistics.median(f.tpot_s or 0 for f in by_arrival)
    client_tpot = statistics.median(
        (c["last"] - c["first"]) / 1e9 / (c["tokens"] - 1) for c in by_sending
    )
    assert tpot == pytest.approx(client_tpot, rel=0.5, abs=0.005)
