"""``python -m bench.flood``: a router under floods, and what its other callers notice.

A hundred tenants ask for turns at a steady rate, in windows with and without a flood that take
turns, so that a slow minute of the machine hits both. Each flood comes from one process of its own
and is bounded in count, time and memory:

| flood | what comes |
|---|---|
| bodies | bodies of 16 MiB that become the most objects per byte, eight at a time |
| answers | requests of 6.7 MB, a million ids, for 4,096 answers each, two at a time |
| loris | 1,000 connections that send a byte of their head, or of their body, each second |
| connections | 10,000 connections, or as many as the process may have, that say nothing |

What counts is the router's peak of memory against its limit, turns of others that were refused,
broke or took more than a minute, tenants without any answer, the ratio of the turns' 99th
percentiles, and the processor time that the router took for each second of a window.

On a small machine callers, flood, engine and router share the cores, so a part of that ratio is the
flood's own sending. How large it is a third window of each round shows: there the same flood goes
to a router beside, of another lease.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from bench.record import Figure, figure, record
from bench.router.routes import Route, process, rose, stub
from rose_core.api import RolloutLease
from rose_core.rollouts.capacity.router_size import RouterSize
from rose_core.stats import paired_ratio, quantile
from rose_operator.apply import routers
from tests.api.objects import LEASE, changed

MIB = 1 << 20
_PAST_SECONDS = 1.0
"""From a flood's being under way to its window, and from its end to the next one."""
_UNDER_WAY = "under way"
_PATIENT = aiohttp.ClientTimeout(total=60)
_SPARE_FILES = 200


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--per-second", type=float, default=40.0, help="turns of all tenants")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of windows per flood")
    parser.add_argument(
        "--beside",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a window in which the flood goes elsewhere, too",
    )
    parser.add_argument("--context-tokens", type=int, default=32_768, help="of the lease")
    parser.add_argument("--slots", type=int, default=16, help="of the lease; else as by default")
    parser.add_argument("--only", nargs="*", choices=sorted(FLOODS), default=sorted(FLOODS))
    parser.add_argument("--flood", choices=sorted(FLOODS), help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    return parser


def _print_under_way() -> None:
    """Importing takes a second of the cores, and what connecting costs ``connections`` measures."""
    sys.stdout.write(f"{_UNDER_WAY}\n")
    sys.stdout.flush()


async def _posts(url: str, body: bytes, at_once: int) -> None:
    """The same request again and again, whatever is answered."""

    async def one(http: aiohttp.ClientSession) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(f"{url}/generate", data=io.BytesIO(body)) as reply:
                    await reply.read()

    async with aiohttp.ClientSession(timeout=_PATIENT) as http:
        _print_under_way()
        await asyncio.gather(*(one(http) for _ in range(at_once)))


async def bodies(url: str) -> None:
    """Large bodies of small objects."""
    large = b'{"input_ids":[1],"x":[' + b"{}," * (5 * MIB) + b"{}]}"
    await _posts(url, large[: 16 * MIB - 1], 8)


async def answers(url: str) -> None:
    """A prompt of a million ids, four thousand times."""
    ids = ",".join(str(100_000 + number % 1000) for number in range(1_000_000))
    body = f'{{"input_ids":[{ids}],"sampling_params":{{"max_new_tokens":1,"n":4096}}}}'
    await _posts(url, body.encode(), 2)


async def _open(url: str, count: int) -> list[asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    made: list[asyncio.StreamWriter] = []
    for _ in range(count):
        try:
            made.append((await asyncio.open_connection(host, int(port)))[1])
        except OSError:
            break  # no more files here, or no more room there
    return made


async def loris(url: str) -> None:
    """Callers that are never done with their request."""
    opened = await _open(url, 1000)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
    for number, writer in enumerate(opened):
        writer.write(head + (b"Content-Length: 9999\r\n\r\n" if number % 2 else b"X-A: "))
    _print_under_way()
    while True:
        await asyncio.sleep(1)
        for writer in opened:
            if not writer.is_closing():
                writer.write(b"a")


async def connections(url: str) -> None:
    """Connections without a word, which are opened again when they are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(10_000, max(soft, hard) - _SPARE_FILES)
    _print_under_way()
    while True:
        opened = await _open(url, most)
        await asyncio.sleep(_PAST_SECONDS)
        for writer in opened:
            writer.transport.abort()


FLOODS: dict[str, Callable[[str], Awaitable[None]]] = {
    one.__name__: one for one in (bodies, answers, loris, connections)
}


@dataclass
class Others:
    """What turns of the tenants took in one window."""

    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    served: set[int] = field(default_factory=set)
    cpu: float = 0.0
    """Of the router they came over, in seconds per second."""


async def others(url: str, given: argparse.Namespace) -> Others:
    """Turns at a steady rate, each of the next tenant; late answers do not slow the rate down."""
    found = Others()
    body = msgspec.json.encode(
        {
            "input_ids": list(range(1, 201)),
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        }
    )

    async def turn(http: aiohttp.ClientSession, number: int) -> None:
        tenant = number % given.tenants
        headers = {"X-Rose-Job": f"tenant-{tenant}"}
        began = time.perf_counter()
        try:
            async with http.post(f"{url}/generate", data=body, headers=headers) as reply:
                await reply.read()
                outcome = str(reply.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        if outcome == "200":
            found.seconds.append(time.perf_counter() - began)
            found.served.add(tenant)
        else:
            found.failed[outcome] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=_PATIENT) as http,
        asyncio.TaskGroup() as running,
    ):
        began = time.perf_counter()
        for number in range(int(given.seconds * given.per_second)):
            due = began + number / given.per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.create_task(turn(http, number))
    return found


def peak(route: Route) -> int:
    """The most memory that the router ever held, in bytes."""
    text = Path(f"/proc/{route.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", text)
    if found is None:
        raise RuntimeError("the kernel tells no peak of memory")
    return int(found[1]) * 1024


def _size(given: argparse.Namespace) -> RouterSize:
    """What the operator gives the router of such a lease."""
    wanted = {"spec.contextTokens": given.context_tokens, "spec.slots.max": given.slots}
    return routers.size(RolloutLease.model_validate(changed(LEASE, wanted)), None)


async def measure(given: argparse.Namespace) -> list[Figure]:
    """Every flood, against a router of its own."""
    figures: list[Figure] = []
    for name in given.only:
        size = _size(given)
        limit = size.memory_bytes
        own = (
            f"--memory-bytes={limit}",
            f"--max-connections={size.connections}",
            f"--context-tokens={given.context_tokens}",
        )
        async with contextlib.AsyncExitStack() as stack:
            engine = stack.enter_context(stub(0.001))
            route = await stack.enter_async_context(rose(engine, 4096, *own))
            beside = None
            if given.beside:
                beside = await stack.enter_async_context(rose(engine, 4096, *own))
            figures += await _one(name, route, beside, limit, given)
    return figures


async def _one(
    name: str, route: Route, other: Route | None, limit: int, given: argparse.Namespace
) -> list[Figure]:
    quiet: list[Others] = []
    flooded: list[Others] = []
    beside: list[Others] = []
    await others(route.url, given)  # connections, caches
    for _ in range(given.rounds):
        quiet.append(await _window(route, given))
        flooded.append(await _during(name, route, route, given))
        if other is not None:
            beside.append(await _during(name, other, route, given))
    for where, windows in (("quiet", quiet), ("beside", beside)):
        if failed := sum((one.failed for one in windows), Counter[str]()):
            sys.stderr.write(f"{name}, {where}: turns of others met {dict(failed)}\n")
    failed = sum((one.failed for one in flooded), Counter[str]())
    served = len(set[int]().union(*(one.served for one in flooded)))
    refused = sum(count for outcome, count in failed.items() if outcome.isdigit())
    for outcome, count in failed.items():
        sys.stderr.write(f"{name}: {count} turns of others met {outcome}\n")
    figures = [
        figure(f"{name}: peak of the router", peak(route) / MIB, "MiB", at_most=limit / MIB),
        figure(f"{name}: refused turns of others", refused, "turns", at_most=0),
        figure(f"{name}: tenants without an answer", given.tenants - served, "", at_most=0),
        figure(f"{name}: broken or late ones", failed.total() - refused, "turns", at_most=0),
    ]
    for label, windows in (("quiet", quiet), ("flooded", flooded)):
        cpu = 1e3 * sum(one.cpu for one in windows) / len(windows)
        figures.append(figure(f"{name}: processor time of the router, {label}", cpu, "ms/s"))
    for percent, aim in ((50, None), (99, 1.25)):
        figures += _latencies(name, percent, aim, (quiet, flooded, beside))
    return figures


def _latencies(
    name: str, percent: int, aim: float | None, windows: tuple[list[Others], ...]
) -> list[Figure]:
    """Turns of others while nothing floods, in the flood, and where it floods another router."""
    turns = f"{name}: p{percent} of others"
    alone, with_it, without = (
        [quantile(one.seconds, percent / 100) for one in several] for several in windows
    )
    compared: list[tuple[str, list[float], list[float], float | None]] = [
        ("flooded to quiet", with_it, alone, aim)
    ]
    if without:
        compared += [
            ("flood beside to quiet", without, alone, None),
            ("flooded to flood beside", with_it, without, aim),
        ]
    figures = []
    for label, ours, theirs, most in compared:
        ratio = paired_ratio(ours, theirs)
        ends = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
        figures.append(figure(f"{turns}, {label}", ratio.mean, "", at_most=most, interval=ends))
    return [*figures, figure(f"{turns}, quiet", 1e3 * min(alone), "ms")]


async def _window(route: Route, given: argparse.Namespace) -> Others:
    began, cpu = time.perf_counter(), route.cpu_seconds()
    found = await others(route.url, given)
    found.cpu = (route.cpu_seconds() - cpu) / (time.perf_counter() - began)
    return found


async def _during(name: str, victim: Route, route: Route, given: argparse.Namespace) -> Others:
    """Turns over ``route`` while a flood goes to ``victim``."""
    command = (sys.executable, "-m", "bench.flood", f"--flood={name}", f"--url={victim.url}")
    with process(*command, speaks=True) as child:
        line = "" if child.stdout is None else await asyncio.to_thread(child.stdout.readline)
        if line.strip() != _UNDER_WAY:
            raise RuntimeError(f"the flood {name} ended before it began")
        await asyncio.sleep(_PAST_SECONDS)
        found = await _window(route, given)
        if child.poll() is not None:
            raise RuntimeError(f"the flood {name} ended by itself with {child.returncode}")
    await asyncio.sleep(_PAST_SECONDS)  # what was in flight is over
    return found


def main() -> int:
    """Measure, or flood as a child of that."""
    given = flags().parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.flood:
            runner.run(_bounded(given))
            return 0
        figures = runner.run(measure(given))
    note = (
        f"{given.tenants} tenants, {given.per_second:g} turns/s, {given.rounds} pairs of windows of"
    )
    record(
        "flood", figures, notes=[f"{note} {given.seconds:g} s; a router with the lease's limits"]
    )
    return 0


async def _bounded(given: argparse.Namespace) -> None:
    """A flood ends by itself, should its parent not end it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(given.seconds + 60):
            await FLOODS[given.flood](given.url)


if __name__ == "__main__":
    sys.exit(main())
