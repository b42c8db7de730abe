"""``python -m bench.fire``: ten thousand turns while engines die, pause, leave and change weights.

Two leases on stubs and, with ``--real``, one on SGLang engines, each with a router process of its
own. Ends with 1 when a turn was wrong, lost or doubled, or when something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.fire.callers import MOST_TOKENS, PROMPTS, Callers, prompt_of
from bench.fire.deeds import Fire
from bench.fire.engines import MODEL, start_real, start_stub
from bench.fire.fleet import Lease, lease
from bench.fire.poison import poisoned
from bench.record import Figure, figure, record
from rose_agent.host.memory.sizing import vocabulary
from rose_dev.models import make_named

_SETTLE_SECONDS = 20


@dataclass
class Burnt:
    """What came of one lease.

    Attributes:
        growth: memory of its router, in bytes, from the middle of the run to its end.
    """

    name: str
    turns: int
    tokens: int = 0
    moved: int = 0
    growth: int = 0
    redone: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.fire", description=__doc__)
    add = parser.add_argument
    add("--turns", type=int, default=10_000, help="over all leases")
    add("--engines", type=int, default=4, help="stubs per lease")
    add("--real", type=int, default=0, help="SGLang engines of a third lease; 0 leaves it out")
    add("--real-turns", type=int, default=1000, help="how many of the turns are theirs")
    add("--at-once", type=int, default=32, help="callers per lease")
    add("--seed", type=int, default=1)
    return parser


@dataclass(frozen=True)
class Plan:
    """How one lease is burnt.

    Attributes:
        gap: shortest and longest time between two deeds, in seconds.
        kills: weight of the deeds that end a process.
    """

    turns: int
    at_once: int
    gap: tuple[float, float] = (0.05, 0.4)
    kills: float = 1.0


async def burn(given: argparse.Namespace) -> list[Burnt]:
    """All leases at once."""
    real = min(given.real_turns, given.turns) if given.real else 0
    halves = {"left": (given.turns - real) // 2, "right": (given.turns - real + 1) // 2}
    with tempfile.TemporaryDirectory(prefix="rose-fire-") as name:
        async with AsyncExitStack() as stack:
            work = []
            for number, (half, turns) in enumerate(halves.items()):
                made = lease(f"fire/{half}", Path(name) / half, start_stub, given.engines)
                made_lease = await stack.enter_async_context(made)
                chance = random.Random(given.seed * 10 + number)
                work.append(_one(made_lease, Plan(turns, given.at_once), chance))
            if real:
                vocabulary_size, folder = vocabulary(make_named(MODEL)), Path(name) / "real"
                made = lease(
                    "fire/real", folder, start_real, given.real, vocabulary=vocabulary_size
                )
                burning = await stack.enter_async_context(made)
                burning.reference = await reference(burning)
                chance = random.Random(given.seed * 10 + 9)
                # Starting a real engine takes half a minute.
                plan = Plan(real, at_once=8, gap=(0.3, 1.5), kills=0.1)
                work.append(_one(burning, plan, chance))
            return list(await asyncio.gather(*work))


async def reference(made: Lease) -> dict[tuple[int, ...], list[int]]:
    """What one engine answers while nothing happens to it."""
    answers = {}
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        for number in range(PROMPTS):
            prompt = prompt_of(number)
            sampling = {"max_new_tokens": MOST_TOKENS, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            async with http.post(f"{made.engines[0].url}/generate", json=body) as reply:
                answers[tuple(prompt)] = (await reply.json())["output_ids"]
    return answers


async def _one(made: Lease, plan: Plan, chance: random.Random) -> Burnt:
    callers = Callers(made, chance, plan.at_once)
    fire = Fire(made, chance, plan.gap, plan.kills)
    done = asyncio.Event()
    files = await made.files()
    burning = asyncio.create_task(fire.run(done))
    try:
        await callers.run(range(plan.turns // 2))
        memory = made.resident_bytes()
        await callers.run(range(plan.turns // 2, plan.turns))
    finally:
        done.set()
        await burning
    out = callers.outcome
    burnt = Burnt(made.name, out.begun, out.tokens, out.moved, ended=out.ended, deeds=fire.deeds)
    burnt.wrong = [*out.wrong, *await _settled(made, files)]
    burnt.growth = made.resident_bytes() - memory
    totals = (await made.page("/turns"))["totals"]
    burnt.redone = totals["redone_tokens"]
    if totals["turns"] != out.begun or totals["failed_turns"] != out.failed:
        burnt.wrong.append(f"{out.begun} turns were begun, the router ended {totals}")
    if made.vocabulary:
        burnt.wrong += await poisoned(made.http, made.url, made.secret, made.ended)
    return burnt


async def _settled(made: Lease, files: int) -> list[str]:
    """What is still there some seconds after the last turn."""
    left: list[str] = []
    for _ in range(_SETTLE_SECONDS * 4):
        left = await _left(made, files)
        if not left:
            break
        await asyncio.sleep(0.25)
    return left


async def _left(made: Lease, files: int) -> list[str]:
    engines = (await made.page("/engines"))["engines"]
    live = (await made.page("/turns"))["live"]
    fences = sum(engine["pending_aborts"] for engine in engines)
    legs = sum(engine["live"] for engine in engines)
    found = [f"{len(live)} turns, {legs} legs, {fences} aborts are left"]
    left = [] if not (live or legs or fences) else found
    more = await made.files() - files
    left += [f"{more} more files are open than before the run"] if more > 0 else []
    for engine in made.engines:
        loads: Any = await _running(made, engine.url)
        left += [f"{engine.name} still runs {loads} requests"] if loads else []
    return left


async def _running(made: Lease, url: str) -> int:
    async with made.http.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    names = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(names))


def figures_of(results: list[Burnt]) -> list[Figure]:
    """The result as figures."""
    ended = sum((one.ended for one in results), Counter[str]())
    deeds = sum((one.deeds for one in results), Counter[str]())
    turns = sum(one.turns for one in results)
    growth = sum(one.growth for one in results)
    wrong = sum(len(one.wrong) for one in results)
    tokens = sum(one.tokens for one in results)
    redone = sum(one.redone for one in results)
    return [
        figure("turns", turns, ""),
        *(figure(f"turns {name}", count, "") for name, count in sorted(ended.items())),
        *(figure(f"deeds: {name}", count, "") for name, count in sorted(deeds.items())),
        figure("turns that moved", sum(one.moved for one in results), ""),
        figure("tokens", tokens, ""),
        figure("tokens sampled again", redone, ""),
        figure("complaints", wrong, "", at_most=0),
        figure("router memory per turn, second half", growth / max(1, turns) * 2 / 1024, "KiB"),
    ]


def main() -> int:
    """Burn and report."""
    given = flags().parse_args()
    results = asyncio.run(burn(given))
    for one in results:
        for line in one.wrong[:20]:
            sys.stdout.write(f"{one.name}: {line}\n")
    record("fire", figures_of(results))
    return 1 if any(one.wrong for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
