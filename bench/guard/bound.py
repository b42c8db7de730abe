"""``python -m bench.guard.bound``: TTFT beside lending against its bound, on real engines.

``docs/bound.md`` proves TTFT lent <= TTFT alone + D + S + C. Two SGLang engines share a core, one
serves and one has rollouts without an end; tap, guard and engine host are production's. The guard
withholds every second window of a second, as ``rose agent --crossover-seconds`` does, so the same
prompts come at an open gate and while nothing is lent, within the same seconds. Which of the two a
request meets is decided by the clock, when it comes by chance.

| part | is here |
|---|---|
| TTFT alone | of requests that came while nothing was lent, in the same minutes: their largest |
| D, can be | the longest that rollouts may go on whatever hangs, by the node's own limits |
| D, learned | the longest stop that the guard remembers, as it learns it (``Envelope``) |
| D, own | what stopping took for this request: its first segment to the host's report |
| S | nothing: the replica was empty |
| C | what the guard predicts for the prefill of one that was sent close behind; else nothing |

No request is known both alone and lent, so the largest of many stands for one's own, and quantiles
beside it. A dead tap is believed, then the enforcer looks, then an iteration ends: that is the most
that D can be. What a request alone takes beyond the same line is the machine's own: it is compared
with the largest of the *others* alone, which is as hard for it as for one that met an open gate.
The guard's own promise, next + D at the 99th percentile, is counted beside.

Runs add up: each request lies in ``out/bench`` within seconds, so a run that was ended has lost
little. ``--fresh`` begins anew. The slowest are kept with the guard's records of them.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from bench.guard.beyond import LEVEL, Findings, Look, Promised, Request, causes, figures_of
from bench.guard.measured import cpu_usage, strangers
from bench.guard.node import POOL, Bench, running
from bench.guard.rollouts import Rollouts
from bench.guard.serving import SERVING
from bench.record import FOLDER, record
from rose_core.guard.certificate import Envelope
from rose_core.wire.sync import SignalSource

LOOKS = FOLDER / "bound-engines-looks.jsonl"
SLOWEST = FOLDER / "bound-engines-slowest.jsonl"
WINDOW_S = 1.0
"""Lent or withheld: some ten requests, so that other people's load is the same for both."""

_SLO_MS = 20_000  # so far off that the certificate never shuts the gate
_PART_S = 240.0  # the machine changes, so the largest alone of an hour ago says nothing
_LOOK_S = 20.0  # the guard's ring of records holds some minutes of this load
_REST_S = 0.4  # before and after the guard is asked for its records, which takes its loop's time
_PROMPT, _OUTPUT = 200, 2  # tokens
_BEHIND = 0.25  # share of requests with another close behind, else C would be nothing
_BEHIND_S = 0.003
_GAP_S, _SHORT_GAP_S = (0.056, 0.08), (0.006, 0.05)
_SHORT = 0.15
"""Share of gaps in which the gate has only just opened. With a quarter of them below 55 ms the
guard would wait for longer before it opens."""
_AT_REST_S = 0.05  # since the gate shut, for a request to count as alone
_EARLY_S = 0.001  # between two clocks' readings of one arrival
_SLOW = 2  # requests of each kind whose records are kept, at each look
_START_SECONDS = 600.0

Entry = dict[str, Any]
"""Of the guard's flight recorder, as ``/trace`` has it."""


class Certificate(msgspec.Struct, rename="camel"):
    """Of the pool, as the guard's report has it."""

    level: float
    ceiling_seconds: float
    text: str
    requests: int
    exceeded: int
    allowed: float


class _Pool(msgspec.Struct):
    pool: str
    certificate: Certificate | None = None


class _Page(msgspec.Struct):
    pools: list[_Pool]


@dataclass(frozen=True)
class Asked:
    """One request as its client knows it; seconds, two of them of CLOCK_MONOTONIC."""

    sent_s: float
    ttft_s: float
    ended_s: float
    behind: bool
    waited_s: float = 0.0
    rollouts_s: float = 0.0


class Reader:
    """Reads requests out of the guard's records, and follows what it has learned of stops."""

    def __init__(self) -> None:
        self._envelope = Envelope()
        self._shut_ns = 0
        self._open = False

    def read(self, entries: Iterable[Entry], asked: Sequence[Asked]) -> Look:
        """Join what clients saw with what the guard recorded.

        Args:
            entries: since the last call, of requests that have all ended.
            asked: those that met an empty replica, in the order of their time.

        Returns:
            Each that is clear, and how many are not.
        """
        ordered = deque(sorted(entries, key=lambda entry: entry["t"]))
        closed = {e["arrival"]: e["after_ns"] for e in ordered if e["what"] == "closed"}
        opened = [e["t"] for e in ordered if e["what"] == "gate" and e["open"]]
        stops = {e["arrival"]: e for e in ordered if e["what"] == "stopped"}
        costs = {e["request"]: e["alone"] for e in ordered if e["what"] == "predicted"}
        done = sorted(
            (e for e in ordered if e["what"] == "finished"), key=lambda entry: entry["arrived"]
        )
        look = Look(0.0)
        for one in asked:
            mine = _led_by(one, done)
            if not mine or mine[0]["ttft"] is None:
                look.lost += 1
                continue
            arrived = mine[0]["arrived"]
            self._advance(ordered, arrived)
            lent = arrived in closed
            at_rest = not self._open and arrived - self._shut_ns >= _AT_REST_S * 1e9
            if not lent and not (at_rest and mine[0]["window"] == "withheld"):
                look.unclear += 1
                continue
            learned_s, promised_s = self._learned()
            stop = stops.get(arrived) if lent else None
            shut_ns = arrived + closed.get(arrived, 0)  # it may have opened just before
            look.requests.append(
                Request(
                    lent,
                    one.behind,
                    mine[0]["ttft"],
                    one.ttft_s,
                    sum(costs.get(other["request"], 0.0) for other in mine[1:]),
                    closed[arrived] / 1e9 if lent else None,
                    stop["after_ns"] / 1e9 if stop else None,
                    stop["answered"] if stop else True,
                    learned_s,
                    promised_s,
                    one.waited_s,
                    one.rollouts_s if _shut_until(opened, shut_ns, one.ended_s) else None,
                )
            )
        self._advance(ordered, 1 << 62)
        return look

    def _advance(self, ordered: deque[Entry], until_ns: int) -> None:
        """Take what happened before that moment, and leave the rest."""
        while ordered and ordered[0]["t"] < until_ns:
            entry = ordered.popleft()
            if entry["what"] == "stopped":
                self._envelope.note_stop(entry["after_ns"] / 1e9)
            elif entry["what"] == "gate":
                if self._open and not entry["open"]:
                    self._shut_ns = entry["t"]
                self._open = entry["open"]

    def _learned(self) -> tuple[float | None, float | None]:
        certificate = self._envelope.certificate(
            _SLO_MS / 1e3, round(100 * LEVEL), 1e-9, whole=True
        )
        if certificate.level < LEVEL:
            return None, None
        return self._envelope.longest_stop_s, certificate.stop_s


def _shut_until(opened: Sequence[int], shut_ns: int, ended_s: float) -> bool:
    """Whether the gate has not opened again between the two moments."""
    index = bisect.bisect_right(opened, shut_ns)
    return index == len(opened) or opened[index] > ended_s * 1e9


def _led_by(one: Asked, done: Sequence[Entry]) -> list[Entry]:
    """The request, first, and what came before its first token; nothing if it is not there."""
    low, high = (one.sent_s - _EARLY_S) * 1e9, (one.sent_s + one.ttft_s) * 1e9
    # One that was sent behind it may come after its first token: C has it all the same.
    high = max(high, (one.sent_s + 10 * _BEHIND_S) * 1e9) if one.behind else high
    return [entry for entry in done if low <= entry["arrived"] <= high]


class Counter:
    """What the guard counts of its own promise, between two looks."""

    def __init__(self) -> None:
        self._before: Certificate | None = None

    def take(self, now: Certificate | None, alone_s: Sequence[float]) -> Promised:
        """Take the guard's count, and the TTFTs alone since the last one.

        Returns:
            What counts: nothing, unless the certificate claimed the percentile at both looks.
        """
        before, self._before = self._before, now
        if before is None or now is None or min(before.level, now.level) < LEVEL:
            return Promised()
        return Promised(
            now.requests - before.requests,
            now.exceeded - before.exceeded,
            now.allowed - before.allowed,
            len(alone_s),
            sum(one > before.ceiling_seconds for one in alone_s),
        )


class Cores:
    """The kernel's account of two engines: who computed, and who waited for a core.

    The files stay open, so that a look takes less than a millisecond.
    """

    def __init__(self, node: Bench) -> None:
        file = node.engine()
        if file is None:
            raise RuntimeError("the rollout engine is gone")
        self._serving = _accounts(node.processes["serving"].pid)
        self._rollouts = _accounts(file.pids[0])

    def read(self) -> tuple[float, float]:
        """Seconds that serving's threads have waited for a core, and that rollouts computed."""
        waited = sum(_account(file)[1] for file in self._serving)
        return waited / 1e9, sum(_account(file)[0] for file in self._rollouts) / 1e9

    def close(self) -> None:
        """Close the files."""
        for file in (*self._serving, *self._rollouts):
            os.close(file)


def _accounts(pid: int) -> tuple[int, ...]:
    """The open accounts of each thread of a process and its children."""
    root = psutil.Process(pid)
    pids = [pid, *(child.pid for child in root.children(recursive=True))]
    threads = (path for one in pids for path in Path(f"/proc/{one}/task").iterdir())
    return tuple(os.open(path / "schedstat", os.O_RDONLY) for path in threads)


def _account(file: int) -> tuple[int, int]:
    """Nanoseconds that a thread has had a core, and has waited for one."""
    with contextlib.suppress(OSError):  # it has ended
        had, waited, _ = os.pread(file, 100, 0).split()
        return int(had), int(waited)
    return 0, 0


class Client:
    """Sends the load."""

    def __init__(self, http: aiohttp.ClientSession, node: Bench, draw: random.Random) -> None:
        self._http, self._node, self._draw = http, node, draw
        self._cores = Cores(node)

    def close(self) -> None:
        """End the client."""
        self._cores.close()

    async def send(self) -> Asked:
        """One request after an idle time, with or without another behind, to their ends."""
        draw = self._draw
        await asyncio.sleep(draw.uniform(*(_SHORT_GAP_S if draw.random() < _SHORT else _GAP_S)))
        behind, first, other = draw.random() < _BEHIND, self._prompt(), self._prompt()
        before, sent = self._cores.read(), time.monotonic()
        async with asyncio.TaskGroup() as both:
            mine = both.create_task(self._ask(first))
            if behind:
                await asyncio.sleep(_BEHIND_S)
                both.create_task(self._ask(other))
        after, ended = self._cores.read(), time.monotonic()
        waited, had = (late - early for early, late in zip(before, after, strict=True))
        return Asked(sent, mine.result() - sent, ended, behind, waited, had)

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(3, 250) for _ in range(_PROMPT)]  # nothing of it is cached

    async def _ask(self, prompt: list[int]) -> float:
        """One request to its end; the moment of its first token."""
        dialect, url = SERVING["sglang"].dialect, self._node.serving_url
        first = 0.0
        async with self._http.post(
            f"{url}{dialect.path}", json=dialect.body(prompt, _OUTPUT)
        ) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not first and dialect.count(line, 0):
                    first = time.monotonic()
        return first


async def _certificate(node: Bench) -> Certificate | None:
    page = msgspec.convert(await node.page("report"), _Page)
    return next((one.certificate for one in page.pools if one.pool == POOL), None)


async def _look(client: Client) -> tuple[list[Asked], int]:
    """Send for one look; the requests, and how many have failed."""
    ends, asked, failed = time.monotonic() + _LOOK_S, [], 0
    while time.monotonic() < ends:
        try:
            asked.append(await client.send())
        except* aiohttp.ClientError:  # a machine that stalls for seconds loses connections
            failed += 1
    return asked, failed


async def _count(node: Bench, run: float, seconds: float) -> None:
    """Send requests until the time is up, and write down what they say."""
    reader, counter, began = Reader(), Counter(), time.monotonic()
    ends, since_ns = began + seconds, time.monotonic_ns()
    # Idle connections end before the engine closes them (5 s).
    idle = aiohttp.TCPConnector(keepalive_timeout=2.0)
    async with (
        aiohttp.ClientSession(connector=idle) as http,
        contextlib.AsyncExitStack() as closing,
    ):
        client = Client(http, node, random.Random(run))  # a load's randomness
        closing.callback(client.close)
        while time.monotonic() < ends:
            part, used = (time.monotonic() - began) // _PART_S, cpu_usage()
            asked, failed = await _look(client)
            others = strangers(used, cpu_usage())
            await asyncio.sleep(_REST_S)
            until_ns = time.monotonic_ns()
            noted = (await node.page("trace"))["entries"]
            entries = [one for one in noted if since_ns <= one["t"] < until_ns]
            since_ns = until_ns
            look = reader.read(entries, asked)
            alone = [one.ttft_s for one in look.requests if not one.lent]
            look.lost += failed
            look.part, look.strangers = run + part * _PART_S, others
            look.load = os.getloadavg()[0]
            look.promised = counter.take(await _certificate(node), alone)
            await asyncio.to_thread(_keep, look, slowest(asked, entries))
            await asyncio.sleep(_REST_S)


def slowest(asked: Sequence[Asked], entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The slowest requests of a look with the guard's records of them, for whoever asks why.

    Those at an open gate whose stop was not reported in time are there as well.
    """
    closed = {e["arrival"] for e in entries if e["what"] == "closed"}
    stopped = {e["arrival"] for e in entries if e["what"] == "stopped" and e["answered"]}
    done = sorted((e for e in entries if e["what"] == "finished"), key=lambda e: e["arrived"])
    led = [(one, mine[0]) for one in asked if (mine := _led_by(one, done))]
    led.sort(key=lambda pair: -(pair[1]["ttft"] or 0.0))
    lent = [pair for pair in led if pair[1]["arrived"] in closed]
    kinds: dict[str, list[tuple[Asked, Entry]]] = {
        "lent": lent[:_SLOW],
        "alone": [pair for pair in led if pair not in lent][:_SLOW],
        "unreported": [pair for pair in lent if pair[1]["arrived"] not in stopped][:_SLOW],
    }
    found = []
    for kind, pairs in kinds.items():
        for one, its in pairs:
            low, high = (one.sent_s - 0.15) * 1e9, its["t"] + 5e7
            kept = [entry for entry in entries if low <= entry["t"] <= high]
            found.append({"kind": kind, "asked": one, "entries": kept})
    return found


async def measure(run: float, model: str, seconds: float) -> None:
    """One run, which is added to what is on disk."""
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with running(Path(folder), model) as node:
            async with asyncio.timeout(_START_SECONDS):
                rollouts = Rollouts(await node.rollouts_ready())
            task = asyncio.create_task(rollouts.run())
            try:
                node.window_s = WINDOW_S
                await node.guarded_anew(tuple(SignalSource), (_SLO_MS, 0))
                await _count(node, run, seconds)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def _known() -> list[Look]:
    lines = LOOKS.read_bytes().splitlines() if LOOKS.exists() else []
    return [msgspec.json.decode(line, type=Look) for line in lines]


def _keep(look: Look, slow: Sequence[dict[str, Any]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with SLOWEST.open("ab") as file:
        file.writelines(msgspec.json.encode({"part": look.part} | one) + b"\n" for one in slow)
    with LOOKS.open("ab") as file:
        file.write(msgspec.json.encode(look) + b"\n")


def main() -> int:
    """Measure, add up, record."""
    parser = argparse.ArgumentParser(prog="python -m bench.guard.bound", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of requests; 0 = only add up")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have seen")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the engines too
    if missing := SERVING["sglang"].missing():
        sys.stderr.write(f"{missing}\n")
        return 1
    if options.fresh:
        for path in (LOOKS, SLOWEST):
            path.unlink(missing_ok=True)
    if options.minutes:
        asyncio.run(measure(time.time(), options.model, 60 * options.minutes))
    looks = _known()
    parts = len({look.part for look in looks})
    notes = (
        f"{parts} parts of four minutes; serving and rollouts on one core; no GPU",
        "alone: withheld windows of the same part; no request is known both alone and lent",
        "beyond a line, alone: what the machine does by itself",
    )
    record("bound-engines", figures_of(looks), notes=notes)
    sys.stdout.writelines(f"{line}\n" for line in causes(Findings(looks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
