"""``python -m bench.batches``: serving beside the lines of a batch, on real engines.

A lease of frozen weights runs an OpenAI batch file on a lent SGLang, while a stock SGLang serves
bursts of a conversation trace; both are pinned to one core, as in ``bench.guard``. In each round
serving meets the same arrivals alone, alone once more, and beside lines, in an order that a seed
draws; latencies are compared request by request. Between two windows the lent engine is killed.

The lent engine has the grant that a lease with ``weights: {frozen: true}`` gets: weight-sync
attests its base's digest, the agent attaches it to the lease's router, and lines reach it by
nothing else.

Ends with 1 when a line was lost, doubled or of another length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.guard import analysis
from bench.guard.load import LOADS, Load, Served, schedule, serve
from bench.guard.measured import Window, cpu_usage, strangers
from bench.guard.node import Bench, grant_of, running
from bench.guard.report import LATENCIES, MANY, MANY_AT_TAIL, QUIET, compared
from bench.record import Figure, figure, log, record
from bench.rewards.killed import running as processes
from rose_core.identity import FROZEN_RUN
from rose_core.stats import quantile
from rose_core.wire.sync import Grant, RouterProof, SignalSource, WeightSource
from rose_dev import engine_environment
from rose_dev.models import make_named
from tests.batches.processes import COMPLETIONS, Pair, pair
from tests.router.conftest import LEASE

if TYPE_CHECKING:
    import openai

CONDITIONS = ("alone", "control", "beside")
"""``control`` is serving alone once more: what differs from ``alone`` there is chance."""
_LEARNING_SECONDS, _LEARNING_ROUND = 6.0, 500
_REST_SECONDS = 1.0
# Short lines: 10,000 of them took twelve minutes on a busy machine, windows without lines included.
TOKENS: Final = 8
_PROMPT: Final = 16
_UNDER_WAY: Final = 64  # rose batches' own default
_TOKEN: Final = "secret"  # noqa: S105  # of a router on the loopback
_PATIENCE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 1800.0


def line_file(count: int) -> bytes:
    """Lines of token ids, each another prompt."""
    lines = (
        {
            "custom_id": f"n{number}",
            "method": "POST",
            "url": COMPLETIONS,
            "body": {
                "model": "policy",
                "prompt": [10 + number % 190, 10 + number // 190, *range(10, 8 + _PROMPT)],
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass
class Ended:
    """What came of the batch.

    Attributes:
        wrong: lines by how.
    """

    asked: int
    wrong: Counter[str]


@dataclass
class Lease:
    """The running lease.

    Attributes:
        pid: of the lent engine as it was last seen ready.
    """

    node: Bench
    two: Pair
    http: aiohttp.ClientSession
    client: openai.OpenAI
    count: int
    pid: int = 0
    batch: str = ""
    kills: int = 0

    async def begin(self, folder: Path) -> None:
        """Upload the file and make the batch, as OpenAI's page shows it."""
        path = folder / "in.jsonl"
        path.write_bytes(line_file(self.count))

        def ask() -> str:
            with path.open("rb") as opened:
                file = self.client.files.create(file=opened, purpose="batch")
            made = self.client.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
            return made.id

        self.batch = await asyncio.to_thread(ask)

    async def done(self) -> int:
        """Lines that have an answer."""
        found = await asyncio.to_thread(self.client.batches.retrieve, self.batch)
        counts = found.request_counts
        return 0 if counts is None else counts.completed + counts.failed

    async def tokens(self) -> float:
        """Output tokens that the router has seen so far."""
        async with self.http.get(f"{self.two.url}/metrics") as reply:
            text = await reply.text()
        name = "rose_router_tokens_total{"
        return sum(float(one.split()[-1]) for one in text.splitlines() if one.startswith(name))

    async def flowing(self) -> None:
        """Wait until the lent engine is ready, on its core, and has made tokens of lines.

        Raises:
            TimeoutError: it does not.
            RuntimeError: no line is left.
        """
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await self.node.rollouts_ready()
            file = self.node.engine()
            self.pid = file.pids[0] if file is not None else 0
            before = await self.tokens()
            while await self.tokens() == before:
                if await self.done() == self.count:
                    raise RuntimeError("no line is left for this window; give more (--lines)")
                await asyncio.sleep(_POLL_SECONDS)

    async def kill(self) -> None:
        """Kill the lent engine amid lines; returns when another one makes tokens."""
        os.kill(self.pid, signal.SIGKILL)
        self.kills += 1
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while (file := self.node.engine()) is None or self.pid in file.pids:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        await self.flowing()

    async def ended(self) -> Ended:
        """Wait for the end of the batch, and look at each line.

        Raises:
            TimeoutError: it has no end.
        """
        until = time.monotonic() + _LONGEST_SECONDS
        while True:
            batch = await asyncio.to_thread(self.client.batches.retrieve, self.batch)
            if batch.status in {"completed", "failed", "expired", "cancelled"}:
                break
            if time.monotonic() > until:
                raise TimeoutError(f"the batch is {batch.status}, {batch.request_counts}")
            await asyncio.sleep(1.0)
        text = ""
        if batch.output_file_id is not None:
            answer = await asyncio.to_thread(self.client.files.content, batch.output_file_id)
            text = answer.text
        return judged([json.loads(line) for line in text.splitlines()], self.count)


def judged(lines: Sequence[Mapping[str, Any]], count: int) -> Ended:
    """What is wrong with the lines of an output file, of so many asked."""
    names = Counter(one["custom_id"] for one in lines)
    wrong = Counter(
        {
            "lost": count - len(names),
            "doubled": names.total() - len(names),
            "of another length": sum(
                one["response"]["body"]["usage"]["completion_tokens"] != TOKENS for one in lines
            ),
        }
    )
    return Ended(count, wrong)


def grant(model: str, attach: int) -> Grant:
    """Of a lease whose weights are frozen, with a router."""
    return msgspec.structs.replace(
        grant_of(model),
        lease=LEASE,
        weights=WeightSource("", FROZEN_RUN),
        router=f"127.0.0.1:{attach}",
        proof=RouterProof(_TOKEN),
    )


@contextlib.asynccontextmanager
async def lent(root: Path, model: str, count: int) -> AsyncIterator[Lease]:
    """Start everything, begin a batch of so many lines; end everything."""
    import openai  # noqa: PLC0415  # slow to import, and tests read this module without it

    two = pair(root, lines=_UNDER_WAY)
    asked = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=5, timeout=60)
    async with (
        running(root, model, grant=grant(make_named(model).name, two.attach)) as node,
        processes(two.router, two.batches),
        aiohttp.ClientSession() as http,
    ):
        await node.rose("sync", "weight-sync")
        lease = Lease(node, two, http, asked, count)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not await _answers(http, f"{two.url}/v1/batches"):  # noqa: ASYNC110  # a process
                await asyncio.sleep(_POLL_SECONDS)
        await lease.begin(root)
        await lease.flowing()
        yield lease


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(url) as reply:
            return reply.status == 200
    return False


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    add = parser.add_argument
    add("--model", default="mid")
    add("--load", choices=[one.name for one in LOADS.values() if not one.steady], default="conv")
    add("--rounds", type=int, default=8)
    add("--seconds", type=float, default=8.0, help="measured seconds of a window")
    add(
        "--lines",
        type=int,
        default=10_000,
        help="of the batch; too few end before the windows do: 150 a round and more",
    )
    add("--seed", type=int, default=7, help="of the order of conditions")
    return parser


async def _play(lease: Lease, load: Load, condition: str, number: int, seconds: float) -> Window:
    """One window; lines flow in ``beside`` alone, because no guard opens their gate otherwise."""
    node, served = lease.node, Served()
    seed = f"{load.name} {condition} {number} {time.monotonic_ns()}"
    if condition == "beside":
        await node.guarded_anew(tuple(SignalSource), (0, 0))
        await lease.flowing()
        # A guard lives for days: what it learns at first is not measured.
        learning = schedule(load, _LEARNING_SECONDS, _LEARNING_ROUND + number, 0.0)
        await serve(
            node.serving_url,
            learning,
            Served(),
            seed=f"learning {seed}",
            seconds=_LEARNING_SECONDS,
        )
    else:
        await node.guarded(up=False)
        await asyncio.sleep(_REST_SECONDS)
    before, machine = await lease.tokens(), cpu_usage()
    arrivals = schedule(load, seconds, number, 0.0)
    await serve(node.serving_url, arrivals, served, seed=seed, seconds=seconds)
    made = round(await lease.tokens() - before)
    window = Window(
        load.name, condition, number, seconds, served.began_s, served.answers, served.failed, made
    )
    window.strangers = strangers(machine, cpu_usage())
    return window


async def measure(
    options: argparse.Namespace, load: Load
) -> tuple[list[Window], Ended, list[int], int]:
    """All windows, what came of the batch, lines left after each window beside it, and kills."""
    windows: list[Window] = []
    left: list[int] = []
    with tempfile.TemporaryDirectory(prefix="rose") as folder:
        async with lent(Path(folder), options.model, options.lines) as lease:
            await _play(lease, load, "alone", options.rounds, options.seconds)  # to warm up
            for number in range(options.rounds):
                order = list(CONDITIONS)
                random.Random(f"{options.seed} {number}").shuffle(order)
                for condition in order:
                    window = await _play(lease, load, condition, number, options.seconds)
                    windows.append(window)
                    log(f"round {number + 1} {condition}: {len(window.measured)} requests")
                    if condition == "beside":
                        left.append(options.lines - await lease.done())
                        if not lease.kills:
                            await lease.kill()
                            log("killed the lent engine; another one works")
            await lease.node.guarded_anew(tuple(SignalSource), (0, 0))
            return windows, await lease.ended(), left, lease.kills


def figures(
    windows: Sequence[Window], ended: Ended, left: Sequence[int], kills: int
) -> list[Figure]:
    """What is recorded."""
    of = {one: [w for w in windows if w.condition == one] for one in CONDITIONS}
    others = statistics.fmean(window.strangers for window in windows)
    requests = sum(len(window.measured) for window in of["beside"])
    rows = [
        figure("machine: share used by other processes", others, "share", at_most=QUIET),
        figure("serving: requests beside lines", requests, "requests"),
        figure("lines: asked", ended.asked, "lines"),
        *(figure(f"lines: {how}", n, "lines", at_most=0) for how, n in ended.wrong.items()),
        figure("lines: lent engine killed", kills, "times", at_least=1),
        figure("lines: left after the last window", min(left), "lines", at_least=1),
        figure("lines: tokens beside serving", analysis.harvest(of["beside"]), "tokens/s"),
    ]
    for name, what, q, aim in LATENCIES:
        for condition, found in of.items():
            values = [value for window in found for value in window.values(what)]
            rows.append(figure(f"{condition}: {name}", 1e3 * quantile(values, q), "ms"))
            if condition != "alone":
                ratio = analysis.ratio(analysis.pairs(of["alone"], found, what), q)
                limit = aim if condition == "beside" and others <= QUIET else None
                rows += compared(f"{condition} / alone: {name}", ratio, q, limit)
    failed = sum(window.failed for window in windows)
    rows.append(figure("serving: failed requests", failed, "requests", at_most=0))
    return rows


def notes(options: argparse.Namespace) -> list[str]:
    """What a reader of the figures must know."""
    return [
        "two real engines on one CPU core: the control path, not GPU interference",
        f"SGLang {engine_environment.SGLANG_VERSION}; load {options.load}, {options.rounds} rounds "
        f"of {options.seconds:g} s",
        "ratios are paired by request, intervals 95 % (bootstrap); one decides from "
        f"{MANY} pairs on, at the 99th percentile from {MANY_AT_TAIL} on",
        "control: serving alone once more; what it adds or spares is chance",
        f"where others use more than {QUIET:.0%} of the machine, latencies are held against no aim",
        "the kill comes between two windows: what an engine's start costs serving is not in them",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a line has not its one answer."""
    options = flags().parse_args(argv)
    if not engine_environment.is_ready():
        log("bench.batches: skipped, SGLang is not installed here: run `make engine`")
        return 0
    windows, ended, left, kills = asyncio.run(measure(options, LOADS[options.load]))
    record("batches", figures(windows, ended, left, kills), notes=notes(options))
    return int(bool(ended.wrong.total()))


if __name__ == "__main__":
    sys.exit(main())
