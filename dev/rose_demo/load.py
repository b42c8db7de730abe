"""Open-loop load on serving replicas, measured at the client: ``python -m rose_demo.load``.

Runs as a process of its own, so that nothing else the demo does delays a send or a stamp. Requests
go out at their planned times whatever the replicas do (an overloaded replica is not spared), are
streamed, and every chunk is stamped as it arrives. One JSON line per finished request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TextIO

import aiohttp
import msgspec

from rose_demo.records import Request, Role
from rose_demo.trace import (
    Arrival,
    Scale,
    busiest_window,
    default_trace,
    read_trace,
    schedule,
    slice_seconds,
    twice,
)

# Ids 16..239 are plain bytes in the byte-level tokenizers of the demo's models.
_LOWEST_ID, _HIGHEST_ID = 16, 239
_IDLE_SECONDS = 2.0
# Tokens after the first that a time per token needs, and bunches that they come in: a starved
# detokeniser hands over all of an answer at once, and then the time between them says nothing.
_LEAST_TOKENS, _LEAST_BUNCHES, _BUNCH_S = 4, 3, 0.001
_GIVE_UP_SECONDS = 60.0


def prompt(arrival: Arrival, seed: int) -> list[int]:
    """Random token ids, different for every request: no prefix is shared."""
    source = random.Random(f"{seed} {arrival.at_s}")  # noqa: S311  # load, nothing secret
    return source.choices(range(_LOWEST_ID, _HIGHEST_ID + 1), k=arrival.prompt_tokens)


async def token_counts(lines: AsyncIterator[bytes]) -> AsyncIterator[int]:
    """Cumulative output tokens after each event of an SGLang stream."""
    async for line in lines:
        text = line.strip()
        if text.startswith(b"data:") and text != b"data: [DONE]":
            event = msgspec.json.decode(text[5:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            yield int(event["meta_info"]["completion_tokens"])


def measured(
    role: Role, arrival: Arrival, sent_s: float, stamps: Sequence[tuple[float, int]], error: str
) -> Request:
    """A request from its stamps: (time, cumulative tokens), in order.

    TPOT is (last - first) / (n - 1) over the whole answer.
    """
    first = next(((at, count) for at, count in stamps if count > 0), None)
    last = stamps[-1] if stamps else None
    tpot = None
    bunches = sum(at - before > _BUNCH_S for (before, _), (at, _) in itertools.pairwise(stamps))
    if first and last and last[1] - first[1] >= _LEAST_TOKENS and bunches >= _LEAST_BUNCHES:
        tpot = (last[0] - first[0]) / (last[1] - first[1])
    return Request(
        role=role,
        at_s=round(sent_s, 4),
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=last[1] if last else 0,
        ttft_s=None if first is None else first[0] - sent_s,
        tpot_s=tpot,
        end_s=round(last[0] if last else sent_s, 4),
        late_s=max(sent_s - arrival.at_s, 0.0),
        error=error or ("" if first else "no token"),
        number=arrival.number,
    )


async def send(
    session: aiohttp.ClientSession, url: str, role: Role, arrival: Arrival, origin: float
) -> Request:
    """Send one request at its time and measure it."""
    body = {
        "input_ids": prompt(arrival, len(role)),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": arrival.output_tokens,
            "ignore_eos": True,
        },
        "stream": True,
    }
    await asyncio.sleep(max(origin + arrival.at_s - time.monotonic(), 0.0))
    sent, stamps, error = time.monotonic() - origin, [], ""
    try:
        async with session.post(f"{url}/generate", json=body) as reply:
            reply.raise_for_status()
            async for count in token_counts(aiter(reply.content)):
                stamps.append((time.monotonic() - origin, count))  # noqa: PERF401  # kept on errors
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as caught:
        error = f"{type(caught).__name__}: {caught}"[:200]
    return measured(role, arrival, sent, stamps, error)


async def replay(
    plans: Sequence[tuple[Role, str, Sequence[Arrival]]], origin: float, out: TextIO
) -> None:
    """Send every plan's requests; writes a line as each finishes."""
    timeout = aiohttp.ClientTimeout(total=_GIVE_UP_SECONDS)
    # Idle connections end before the engine closes them (5 s): a request sent just then would look
    # like one that serving had failed.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)

    async def one(role: Role, url: str, arrival: Arrival) -> None:
        request = await send(session, url, role, arrival, origin)
        out.write(msgspec.json.encode(request).decode() + "\n")

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(
            *(one(role, url, arrival) for role, url, arrivals in plans for arrival in arrivals)
        )


def plan(
    trace: Path, *, seconds: float, window_s: float, scale: Scale, control_share: float
) -> dict[Role, list[Arrival]]:
    """What each replica gets: the same window of the trace, the control a thinner share of it.

    Lent and withheld windows of ``window_s`` get the same load; with 0 every request is sent once,
    at its time.
    """
    lent = burst(trace, span_seconds(seconds, window_s), scale)
    source = random.Random(2)  # noqa: S311  # load, nothing secret
    plans = {
        Role.LENT: lent,
        Role.CONTROL: [arrival for arrival in lent if source.random() < control_share],
    }
    if not window_s:
        return plans
    return {role: twice(rows, window_s=window_s, seconds=seconds) for role, rows in plans.items()}


def burst(trace: Path, seconds: float, scale: Scale) -> list[Arrival]:
    """The trace's busiest part of this length, scaled."""
    arrivals = read_trace(trace)
    start = busiest_window(arrivals, seconds)
    return schedule(arrivals, start_s=start, seconds=seconds, scale=scale, seed=1)


def span_seconds(seconds: float, window_s: float) -> float:
    """How much of the trace is sent: with windows each part twice, and their ends stay free."""
    return seconds // (2 * window_s) * slice_seconds(window_s) if window_s else seconds


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m rose_demo.load", description=__doc__)
    result.add_argument("--lent", required=True, help="URL of the replica that is lent")
    result.add_argument("--control", required=True, help="URL of the replica that never is")
    result.add_argument("--trace", type=Path, default=default_trace())
    result.add_argument("--seconds", type=float, required=True)
    result.add_argument("--origin", type=float, default=None, help="monotonic start, seconds")
    result.add_argument("--keep", type=float, default=Scale.keep, help="share of requests kept")
    result.add_argument("--shorter", type=float, default=1.0, help="divides all lengths")
    result.add_argument("--control-share", type=float, default=0.5)
    result.add_argument("--window-seconds", type=float, default=0.0, help="send twice, in pairs")
    result.add_argument("--out", type=Path, required=True)
    return result


def main(argv: list[str] | None = None) -> int:
    """Replay; ends with the last response."""
    arguments = parser().parse_args(argv)
    scale = Scale(keep=arguments.keep).shorter(arguments.shorter)
    plans = plan(
        arguments.trace,
        seconds=arguments.seconds,
        window_s=arguments.window_seconds,
        scale=scale,
        control_share=arguments.control_share,
    )
    urls = {Role.LENT: arguments.lent, Role.CONTROL: arguments.control}
    origin = time.monotonic() if arguments.origin is None else arguments.origin
    with arguments.out.open("a", buffering=1) as out:
        asyncio.run(replay([(role, urls[role], plans[role]) for role in Role], origin, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
