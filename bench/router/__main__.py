"""``python -m bench.router``: the router beside sglang-router (where installed) and no router.

Every process has one thread of Python; on two cores client, router and stub share them, so figures
with and without router are taken the same way and the differences count, not the sums.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import aiohttp
import msgspec
import uvloop

from bench.record import Figure, figure, log, record
from bench.router.reader import SERVERS
from bench.router.routes import (
    Route,
    Stub,
    has_sglang_router,
    passer,
    reader,
    rose,
    sglang_router,
    stub,
)
from rose_core.stats import paired_ratio, quantile

_ADDED_MS: Mapping[int, float | None] = {50: 1.0, 99: 3.0}
_ADDED_MS_LONG: Mapping[int, float | None] = {50: None, 99: 30.0}
_NO_AIMS: Mapping[int, float | None] = {50: None, 99: None}
_LONG_TOKEN_SECONDS = 0.02
_LIKE_OURS = "aiohttp"
_BARE = f"deciding nothing, {_LIKE_OURS}"
_DIRECT_TLS = "direct by TLS"
_TWO_BARE = f"two {_BARE}"
"""What two processes cost each other that share nothing but the machine: neither knows of another,
as the two routers do not."""


@dataclass(frozen=True)
class Result:
    """What a run of turns took.

    Attributes:
        seconds: of each turn, from request to last byte.
        first: of each stream, from request to first event; empty for plain turns.
        wall: of the whole run.
    """

    seconds: list[float]
    first: list[float]
    wall: float

    @property
    def per_second(self) -> float:
        """Turns per second."""
        return len(self.seconds) / self.wall


async def turns(
    route: Route,
    *,
    count: int,
    at_once: int,
    tokens: int,
    prompt: int,
    stream: bool,
    spread: float = 0.0,
) -> Result:
    """Ask for ``count`` turns, ``at_once`` at a time, callers starting over ``spread`` seconds.

    By TLS all have shaken hands before, as a router has with its engines.

    Raises:
        RuntimeError: a turn came back short or refused.
    """
    body = msgspec.json.encode(
        {
            "input_ids": list(range(1, prompt + 1)),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
            "return_logprob": True,
            "stream": stream,
        }
    )
    left = iter(range(count))
    seconds: list[float] = []
    first: list[float] = []
    last_id = str(tokens - 1).encode()

    async def caller(http: aiohttp.ClientSession, delay: float) -> None:
        await asyncio.sleep(delay)
        for _ in left:
            began = time.perf_counter()
            data = b""
            async with http.post(f"{route.url}/generate", data=body) as reply:
                async for chunk in reply.content.iter_any():
                    if stream and not data:
                        first.append(time.perf_counter() - began)
                    data = (data + chunk)[-65536:]
                if reply.status != 200 or last_id not in data:
                    message = f"{route.url}: HTTP {reply.status}: {data[-300:]!r}"
                    raise RuntimeError(message)
            seconds.append(time.perf_counter() - began)

    async def shake_hands(http: aiohttp.ClientSession) -> None:
        async with http.get(f"{route.url}/health") as reply:
            await reply.read()

    tls = aiohttp.Fingerprint(bytes.fromhex(route.pin)) if route.pin else True
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        if route.pin:
            await asyncio.gather(*(shake_hands(http) for _ in range(at_once)))
        began = time.perf_counter()
        delays = [spread * number / at_once for number in range(at_once)]
        await asyncio.gather(*(caller(http, delay) for delay in delays))
        return Result(seconds, first, time.perf_counter() - began)


def _first(result: Result) -> list[float]:
    return result.first


def _whole(result: Result) -> list[float]:
    return result.seconds


_PARTS = (("first event", _first), ("turn", _whole))
PARTS = ("throughput", "latency", "long-prompts", "memory")


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--turns", type=int, default=600, help="answered at once, per round")
    parser.add_argument("--rounds", type=int, default=7, help="in which routes take turns")
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--stream-rounds", type=int, default=3, help="in which routes take turns")
    parser.add_argument("--stream-tokens", type=int, default=20)
    parser.add_argument("--token-seconds", type=float, default=0.25)
    parser.add_argument("--long-streams", type=int, default=5000, help="0 leaves this part out")
    parser.add_argument("--long-tokens", type=int, default=5)
    parser.add_argument("--long-token-seconds", type=float, default=8.0)
    parser.add_argument("--long-prompt", type=int, default=32_000, help="tokens")
    parser.add_argument("--long-turns", type=int, default=100, help="per round; 0 leaves it out")
    parser.add_argument("--cumulative", action="store_true", help="engine repeats earlier tokens")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument(
        "--sglang-router-python", default=sys.executable, help="Python that has sglang-router"
    )
    parser.add_argument(
        "--router-python", default=sys.executable, help="Python that runs this router"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="parts; all by default")
    return parser


async def _routes(
    stack: AsyncExitStack, given: argparse.Namespace, token_seconds: float
) -> dict[str, Route]:
    # By default the way to engines is TLS by a pinned certificate; sglang-router's is plain text.
    engine = stack.enter_context(stub(token_seconds, cumulative=given.cumulative))
    pinned = stack.enter_context(stub(token_seconds, cumulative=given.cumulative, tls=True))
    routes = {"direct": Route(engine.url)}
    if token_seconds:
        routes[_DIRECT_TLS] = Route(pinned.url, pin=pinned.pin)
    routes["rose"] = await stack.enter_async_context(_ours(pinned, given))
    routes["rose, plain text"] = await stack.enter_async_context(_ours(engine, given))
    if has_sglang_router(given.sglang_router_python):
        other = sglang_router(given.sglang_router_python, engine.url)
        routes["sglang-router"] = await stack.enter_async_context(other)
    return routes


def _ours(
    engine: Stub, given: argparse.Namespace, cap: int = 4096
) -> AbstractAsyncContextManager[Route]:
    return rose(engine, cap, python=given.router_python)


async def _paced_routes(
    stack: AsyncExitStack, given: argparse.Namespace, token_seconds: float
) -> dict[str, Route]:
    """For streams, also what passing on costs that looks at nothing."""
    routes = await _routes(stack, given, token_seconds)
    routes["bytes passed on"] = stack.enter_context(passer(routes["direct"].url))
    return routes


async def throughput(given: argparse.Namespace) -> list[Figure]:
    """Turns that are answered at once, 32 at a time; routes take turns, so that load hits all."""
    async with AsyncExitStack() as stack:
        single = await _routes(stack, given, 0)
        routes: dict[str, list[Route]] = {name: [route] for name, route in single.items()}
        pinned = stack.enter_context(stub(0, cumulative=given.cumulative, tls=True))
        again = await stack.enter_async_context(_ours(pinned, given))
        routes["two of rose"] = [*routes["rose"], again]
        for server in SERVERS:
            bare = reader(single["direct"].url, server, python=given.router_python)
            routes[f"deciding nothing, {server}"] = [stack.enter_context(bare)]
        plain = stack.enter_context(stub(0, cumulative=given.cumulative))
        bare = reader(plain.url, _LIKE_OURS, python=given.router_python)
        routes[_TWO_BARE] = [*routes[_BARE], stack.enter_context(bare)]
        rates: dict[str, list[float]] = {name: [] for name in routes}
        costs: dict[str, list[float]] = {name: [] for name in routes}
        for number in range(given.rounds + 1):
            for name, among in routes.items():
                rate, cost = await _at_once(among, given)
                log(f"turns, round {number} of {given.rounds}, {name}: {rate:.0f} a second")
                rates[name].append(rate)
                costs[name].append(cost)
    # The first round warms connections up.
    return _throughput(
        {name: values[1:] for name, values in rates.items()},
        {name: values[1:] for name, values in costs.items() if name != "direct"},
    )


async def _at_once(routes: Sequence[Route], given: argparse.Namespace) -> tuple[float, float]:
    """Turns per second, and processor seconds per turn, of routes with as many callers each.

    On two cores two routers, callers and stub do not do twice the turns of one; what two processes
    cost each other shows in the processor time of a turn. Each has the callers that one alone has:
    with fewer it would find less to do whenever it looks, and that costs more per turn.
    """
    burnt = sum(route.cpu_seconds() for route in routes)
    results = await asyncio.gather(
        *(
            turns(
                route,
                count=given.turns,
                at_once=32,
                tokens=8,
                prompt=given.prompt,
                stream=False,
            )
            for route in routes
        )
    )
    done = sum(len(result.seconds) for result in results)
    burnt = sum(route.cpu_seconds() for route in routes) - burnt
    return done / max(result.wall for result in results), burnt / done


def _throughput(rates: dict[str, list[float]], costs: dict[str, list[float]]) -> list[Figure]:
    figures = []
    for name, values in rates.items():
        figures.append(figure(f"turns per second, {name}", statistics.median(values), "1/s"))
    for name, values in costs.items():
        each = 1 / max(statistics.median(values), 1e-9)
        least = 1000 if name == "rose" else None
        figures.append(figure(f"turns per second of CPU, {name}", each, "1/s", at_least=least))
    for name, over, aim in (
        ("rose", "sglang-router", 0.5),
        ("rose, plain text", "sglang-router", 0.5),
        ("rose", "rose, plain text", None),
        ("two of rose", "rose", 0.9),
        (_TWO_BARE, _BARE, None),
        *((f"deciding nothing, {server}", "sglang-router", None) for server in SERVERS),
    ):
        if over in costs:
            # Round by round: what else the machine does in a round hits both.
            ratio = paired_ratio(costs[over], costs[name])
            low, high = ratio.low, ratio.high
            figures.append(
                figure(
                    f"the same, {name} to {over}",
                    ratio.mean,
                    "",
                    at_least=aim,
                    interval=None if low is None or high is None else (low, high),
                )
            )
    return figures


async def memory(given: argparse.Namespace) -> list[Figure]:
    """Many slow streams at once: all must end whole; what each holds of the router's memory."""
    count = given.long_streams
    if not count:
        return []
    _allow_files(count * 2 + 256)
    log(f"{count} streams at once")
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(
            stub(given.long_token_seconds, cumulative=given.cumulative, tls=True)
        )
        router = await stack.enter_async_context(_ours(engine, given, count))
        before = router.resident_bytes()
        asked = asyncio.create_task(
            turns(
                router,
                count=count,
                at_once=count,
                tokens=given.long_tokens,
                prompt=given.prompt,
                stream=True,
                spread=given.long_token_seconds * given.long_tokens / 4,
            )
        )
        highest = before
        while not asked.done():
            await asyncio.wait({asked}, timeout=0.25)
            highest = max(highest, router.resident_bytes())
        whole = len(asked.result().seconds)
    return [
        figure("long streams held, all whole", whole, "", at_least=5000),
        figure("memory per long stream", (highest - before) / count / 1024, "KiB", at_most=100),
    ]


def _allow_files(wanted: int) -> None:
    """Sockets of callers and children; children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))


async def latency(given: argparse.Namespace) -> list[Figure]:
    """Streams at a set pace: how much later first events and ends come than without a router."""
    async with AsyncExitStack() as stack:
        routes = await _paced_routes(stack, given, given.token_seconds)
        found: dict[str, list[Result]] = {name: [] for name in routes}
        for _ in range(given.stream_rounds):
            for name, route in routes.items():
                result = await turns(
                    route,
                    count=given.streams * 2,
                    at_once=given.streams,
                    tokens=given.stream_tokens,
                    prompt=given.prompt,
                    stream=True,
                    spread=given.token_seconds * given.stream_tokens,
                )
                found[name].append(result)
                log(f"streams, {name}: {len(result.seconds)} in {result.wall:.0f} s")
    rows = [row for name in routes for row in _against(name, found[name], found["direct"])]
    # Of what is added by TLS the engine's own TLS is a part, whoever asks the engine.
    rows += _against("rose", found["rose"], found[_DIRECT_TLS], to=_DIRECT_TLS, most=_NO_AIMS)
    return rows + _beside(found) if "sglang-router" in found else rows


async def long_prompts(given: argparse.Namespace) -> list[Figure]:
    """Long prompts, two at a time: what a router adds to the first event of a stream."""
    count, prompt = given.long_turns, given.long_prompt
    if not count:
        return []
    async with AsyncExitStack() as stack:
        routes = await _paced_routes(stack, given, _LONG_TOKEN_SECONDS)
        found: dict[str, list[Result]] = {name: [] for name in routes}
        for _ in range(given.stream_rounds):
            for name, route in routes.items():
                result = await turns(
                    *(route,), count=count, at_once=2, tokens=4, prompt=prompt, stream=True
                )
                found[name].append(result)
                log(f"long prompts, {name}: {count} in {result.wall:.0f} s")
    base, prefix = found.pop("direct"), f"prompts of {prompt} tokens: "
    return [
        row
        for name, results in found.items()
        for row in _against(
            name, results, base, prefix=prefix, most=_ADDED_MS_LONG, parts=_PARTS[:1]
        )
    ]


def _beside(found: dict[str, list[Result]]) -> list[Figure]:
    """How much later the slowest hundredth is than through sglang-router, inside each round."""
    rows = []
    for name, (what, of) in itertools.product(("rose", "rose, plain text"), _PARTS):
        pairs = zip(found[name], found["sglang-router"], strict=True)
        later = [quantile(of(ours), 0.99) - quantile(of(theirs), 0.99) for ours, theirs in pairs]
        title = f"{what} p99, {name} less sglang-router"
        rows.append(figure(title, 1000 * statistics.median(later), "ms", at_most=0))
    return rows


def _against(
    name: str,
    results: list[Result],
    base: list[Result],
    *,
    prefix: str = "",
    to: str = "",
    most: Mapping[int, float | None] = _ADDED_MS,
    parts: Sequence[tuple[str, Callable[[Result], list[float]]]] = _PARTS,
) -> list[Figure]:
    """Medians over the rounds; what is added is compared inside each round.

    Args:
        name: of the route.
        results: of its rounds.
        base: of the route that they are compared with, which may be the same.
        prefix: of the figures' names.
        to: name of the other route, where it is none without a router in plain text.
        most: what ``rose`` may add in ms, by percentile.
        parts: of a turn, with their times.
    """
    figures = []
    for percent, aim in most.items():
        for what, of in parts:
            values = [quantile(of(one), percent / 100) for one in results]
            if results is not base:
                without = (quantile(of(one), percent / 100) for one in base)
                values = [with_ - alone for with_, alone in zip(values, without, strict=True)]
            word = "" if results is base else "added "
            title = f"{prefix}{word}{what} p{percent}, {name}{f' to {to}' if to else ''}"
            held = aim if name == "rose" else None
            figures.append(figure(title, 1000 * statistics.median(values), "ms", at_most=held))
    return figures


async def run(given: argparse.Namespace) -> list[Figure]:
    """All parts."""
    parts = dict(zip(PARTS, (throughput, latency, long_prompts, memory), strict=True))
    return [one for name in given.only or PARTS for one in await parts[name](given)]


def _python(path: str) -> str:
    """Version and build of a Python."""
    program = "import platform; print(platform.python_version(), *platform.python_build())"
    made = subprocess.run([path, "-c", program], check=True, capture_output=True, text=True)
    return made.stdout.strip()


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(run(given))
    notes = [
        f"{given.streams} streams, starts spread evenly, {given.stream_tokens} tokens each, "
        f"one per {given.token_seconds * 1000:.0f} ms, prompts of {given.prompt} tokens",
        f"the router runs on Python {_python(given.router_python)}",
    ]
    if not has_sglang_router(given.sglang_router_python):
        notes.append("sglang-router is not installed; --sglang-router-python names a Python")
    record("router", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
