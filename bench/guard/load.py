"""Serving load: slices of traces, and a steady load that is never idle; measured as its client.

Lengths are scaled to a small model: a twelfth of the trace's, prompt <= 350, output <= 50. The
steady load keeps requests overlapping; its rate is a share of what the engine makes when it is
saturated. Prompts are drawn anew for every window, so nothing is answered from a prefix cache.
Next step: ``rollouts`` for the other engine's load, ``windows`` for both together.
"""

from __future__ import annotations

import asyncio
import csv
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.guard.dialects import SGLANG, Dialect

TRACES = Path(__file__).parent.parent / "traces"
_TRACE_SECONDS = 120.0
_SCALE = 12


@dataclass(frozen=True)
class Load:
    """One kind of serving load.

    Attributes:
        trace: file of the trace; empty = steady.
        keep: share of the trace's requests that is kept.
        share: steady load as a share of the saturated rate.
        lead_s: unmeasured seconds before, in which a steady load builds up.
    """

    name: str
    trace: str = ""
    keep: float = 0.0
    share: float = 0.0
    lead_s: float = 0.0

    @property
    def steady(self) -> bool:
        """Never idle."""
        return not self.trace


LOADS = {
    load.name: load
    for load in (
        Load("conv", trace="azure2023_conv_120s.csv", keep=0.32),
        Load("code", trace="azure2023_code_120s.csv", keep=0.4),
        Load("steady-40", share=0.4, lead_s=6.0),
        Load("steady-60", share=0.6, lead_s=6.0),
    )
}


@dataclass(frozen=True)
class Arrival:
    """One request; ``at_s`` from the beginning of the measured window, negative in the lead."""

    at_s: float
    prompt: int
    output: int


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; seconds of the monotonic clock, 0 = not yet."""

    arrival: Arrival
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Sent to first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Served:
    """The serving side of one window.

    Attributes:
        answers: every request, in the order of the schedule.
        live: requests under way, for a gate that sees them as the client does.
        began_s: when the measured window began.
    """

    answers: list[Answer] = field(default_factory=list)
    live: dict[int, Answer] = field(default_factory=dict)
    began_s: float = 0.0
    failed: int = 0


def schedule(load: Load, seconds: float, number: int, rate: float) -> list[Arrival]:
    """The arrivals of a window; the same for every condition of round ``number``.

    Args:
        load: which load.
        seconds: length of the measured window.
        number: the round; a trace is followed from round to round, and begins anew at its end.
        rate: tokens per second of the saturated engine, for steady loads.
    """
    draw = random.Random(f"{load.name} {number}")
    if load.steady:
        return _steady(load, seconds, rate, draw)
    offset = (number * seconds) % max(1.0, _TRACE_SECONDS - seconds)
    with (TRACES / load.trace).open() as file:
        rows = list(csv.DictReader(file))
    return [
        Arrival(
            float(row["t_s"]) - offset,
            min(350, max(4, int(row["in_tokens"]) // _SCALE)),
            min(50, max(2, int(row["out_tokens"]) // _SCALE)),
        )
        for row in rows
        if offset <= float(row["t_s"]) < offset + seconds and draw.random() < load.keep
    ]


def _steady(load: Load, seconds: float, rate: float, draw: random.Random) -> list[Arrival]:
    output = 80
    gap = output / (load.share * rate)
    arrivals, at = [], -load.lead_s
    while at < seconds:
        arrivals.append(Arrival(at, draw.randint(48, 80), draw.randint(output - 16, output + 16)))
        at += gap * draw.uniform(0.6, 1.4)
    return arrivals


async def serve(
    url: str,
    arrivals: list[Arrival],
    served: Served,
    *,
    seed: str,
    seconds: float = 0.0,
    lead_s: float = 0.0,
    dialect: Dialect = SGLANG,
) -> None:
    """Send the schedule; returns when ``seconds`` have passed and every answer has ended."""
    draw = random.Random(seed)
    began = served.began_s = time.monotonic() + lead_s
    # Idle connections end before the engine closes them (5 s).
    connector = aiohttp.TCPConnector(keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def one(number: int, arrival: Arrival, prompt: list[int]) -> None:
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            answer = Answer(arrival, time.monotonic())
            served.live[number] = answer
            try:
                await _ask(http, url, dialect, prompt, answer)
            except (aiohttp.ClientError, TimeoutError):
                served.failed += 1
                return
            finally:
                answer.ended_s = time.monotonic()
                del served.live[number]
            served.answers.append(answer)

        prompts = [[draw.randrange(10, 200) for _ in range(a.prompt)] for a in arrivals]
        await asyncio.gather(
            *(one(n, a, p) for n, (a, p) in enumerate(zip(arrivals, prompts, strict=True)))
        )
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    served.answers.sort(key=lambda answer: answer.arrival.at_s)


async def _ask(
    http: aiohttp.ClientSession, url: str, dialect: Dialect, prompt: list[int], answer: Answer
) -> None:
    body = dialect.body(prompt, answer.arrival.output)
    async with http.post(f"{url}{dialect.path}", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            tokens = dialect.count(line, answer.tokens)
            if tokens:
                answer.tokens, answer.last_s = tokens, time.monotonic()
                answer.first_s = answer.first_s or answer.last_s
    if not answer.first_s:
        raise aiohttp.ClientPayloadError("the answer ended without a token")
