"""``python -m bench.tap``: CPU of the tap per 1,000 tokens/s, and agreement with the client.

The real ``rose tap`` follows a server in another network namespace over real packets: token streams
with every segment read, the same sampled, the same counted in the kernel, and thousands of short
connections. Then a node with guard and tap does, by either reader (``readers``).
With ``--against URL`` it is a running SGLang or vLLM instead, whose own request count has to agree
as well. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.record import Figure, figure, log, record
from bench.tap.against import against
from bench.tap.readers import TOKENS, compare
from bench.tap.traffic import Order, Seen
from bench.tap.watcher import Watched, watching
from rose_core.stats import quantile
from rose_core.telemetry.book import FinishedRequest
from rose_core.telemetry.dialects import METRICS
from rose_core.telemetry.events import EndKind

_STREAMS = 40
_READERS = {
    "every segment": ("--tokens", "packets", "--sample-from", "0"),
    "sampled": ("--tokens", "packets"),
    "counted in the kernel": ("--tokens", "kernel"),
}


def streaming(tokens_per_second: float, seconds: float) -> Order:
    """Streams that make so many tokens together, in requests of about a second."""
    interval = _STREAMS / tokens_per_second
    tokens = max(2, round(1.0 / interval))
    return Order(_STREAMS, tokens, interval, requests=max(1, round(seconds)))


def _errors(
    watched: Watched, of_tap: Callable[[FinishedRequest], float], of_client: Callable[[Seen], float]
) -> list[float]:
    return [of_tap(watched.tap[c.path]) - of_client(c) for c in watched.client]


def agreement(name: str, watched: Watched) -> list[Figure]:
    """The differences to the client, request by request; streamed ones have a first token."""
    lost = [one for one in watched.client if one.path not in watched.tap]
    if lost:
        raise RuntimeError(f"{name}: the tap never ended {len(lost)} requests, as {lost[0].path}")
    streamed = replace(watched, client=[c for c in watched.client if c.first])
    arrival = _errors(watched, lambda t: t.arrived_ns / 1e6, lambda c: c.sent / 1e6)
    ttft = _errors(streamed, lambda t: 1e3 * (t.ttft_s or 0), lambda c: (c.first - c.sent) / 1e6)
    tpot = _errors(
        streamed,
        lambda t: 1e3 * (t.tpot_s or 0),
        lambda c: (c.last - c.first) / 1e6 / max(1, c.tokens - 1),
    )
    delays = [
        (watched.received_ns[watched.tap[c.path].arrived_ns] - c.sent) / 1e6 for c in watched.client
    ]
    counted = sum(watched.tap[c.path].tokens for c in watched.client)
    return [
        figure(f"{name}: tokens counted", counted / watched.tokens, "ratio"),
        figure(f"{name}: arrival stamped after the client's send, p50", _mid(arrival), "ms"),
        figure(f"{name}: arrival known to the guard, p50", _mid(delays), "ms"),
        figure(f"{name}: arrival known to the guard, p99", quantile(delays, 0.99), "ms"),
        figure(f"{name}: TTFT, tap - client, p50", _mid(ttft), "ms"),
        figure(f"{name}: TPOT, tap - client, p50", _mid(tpot), "ms"),
        figure(f"{name}: requests compared", len(watched.client), "count"),
    ]


def cost(name: str, watched: Watched) -> list[Figure]:
    """CPU of the tap's parser, and what it had to read."""
    seconds = watched.cpu_s / watched.tokens * 1e3
    return [
        figure(f"{name}: CPU", seconds, "s/1,000 tokens", at_most=0.03),
        figure(f"{name}: segments read", watched.packets / watched.tokens, "per token"),
    ]


def _mid(values: list[float]) -> float:
    return statistics.median(values)


def short_figures(watched: Watched, connections: int) -> list[Figure]:
    """Ends, memory and cost of short connections."""
    complete = sum(t.how is EndKind.COMPLETE for t in watched.tap.values())
    assert watched.health is not None  # noqa: S101  # the order has been carried out
    lossy = float(bool(watched.health.lost_ns))
    return [
        figure("short connections: ends seen", complete, "count", at_least=connections),
        figure("short connections: in flight after", watched.health.in_flight, "count", at_most=0),
        figure("short connections: segments were lost", lossy, "0 or 1", at_most=0),
        figure("short connections: CPU", watched.cpu_s / connections * 1e3, "s/1,000"),
        figure("short connections: memory grown", watched.grown_bytes / 2**20, "MiB", at_most=32),
    ]


async def measure(tokens_per_second: float, seconds: float, connections: int) -> list[Figure]:
    """Every figure."""
    figures: list[Figure] = []
    order = streaming(tokens_per_second, seconds)
    for name, flags in _READERS.items():
        with tempfile.TemporaryDirectory(prefix="rose") as folder:
            async with watching(Path(folder), *flags) as watcher:
                log(f"{name}: {seconds:.0f} s of {tokens_per_second:,.0f} tokens/s")
                watched = await watcher.run(order)
                figures += cost(name, watched) + agreement(name, watched)
                if name == "counted in the kernel":
                    storm = await watcher.run(Order(32, short=connections))
                    figures += short_figures(storm, connections)
    return figures


def beside(url: str, model: str, engine: str, requests: int) -> int:
    """Compare on a running engine."""
    watched = asyncio.run(against(url, model, engine, requests, aborts=5))
    notes = [f"{engine}, {requests} requests, 5 aborted; the engine's own count agrees"]
    record(f"tap-{engine.lower()}", agreement(engine, watched), notes=notes)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="bench.tap", description=__doc__)
    parser.add_argument("--tokens-per-second", type=float, default=2000.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of streaming per condition")
    parser.add_argument("--connections", type=int, default=10_000, help="short ones")
    parser.add_argument("--against", metavar="URL", help="a running engine on this machine instead")
    parser.add_argument("--engine", default="SGLang", choices=sorted(METRICS))
    parser.add_argument("--model", default="", help="the name it serves")
    parser.add_argument("--requests", type=int, default=120)
    options = parser.parse_args(argv)
    if options.against:
        return beside(options.against, options.model, options.engine, options.requests)
    figures = asyncio.run(measure(options.tokens_per_second, options.seconds, options.connections))
    figures += asyncio.run(compare(options.seconds))
    notes = [
        f"{_STREAMS} streams, {options.tokens_per_second:g} tokens/s offered, one event a segment",
        "server, client and tap share the machine; the client's lateness is in the differences",
        f"CPU of the first rows is the parser's; guard, its readers and tap: {TOKENS} tokens a"
        " request, an idle lent replica beside the busy ones",
        "not lent: nothing beside those; gates shut: a slot, but they answer no page, so that none"
        " is verified; gates open: a slot whose permit is paced by their tokens",
        "what the program in the kernel takes is spent by whoever sends: counted by itself, on top",
    ]
    record("tap", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
