"""A batch on engines whose gates a serving burst shuts, as production's guard would.

The guard of the simulator is production's. It meets the arrivals of ``normal`` (a conversation
trace) on replicas that lend; when it opens and shuts their gates is played here again, to the
second, to real processes: a router, ``rose batches``, and fake engines that compute only while
their gate is open. What lines cost serving is not in it: an engine's gate does not ask what it
computes, and ``make bench-guard`` measures that.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from bench.rewards.killed import running
from bench.scenarios import scenario
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_engines.fake.scheduler import FakeScheduler
from rose_engines.fake.server import FakeServer
from rose_engines.weights.session import WeightSession
from rose_simulate.model.clock import SECOND
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.model.simulation import Simulation
from tests.batches.helpers import Caller
from tests.batches.processes import COMPLETIONS, ask, check_answers, pair, token_file
from tests.router.conftest import LEASE, VERSION

_ENGINES: Final = 2
_WARM_S, _PLAYED_S, _LOOK_S = 120.0, 120.0, 0.005
_TOKEN_S: Final = 0.005
_LONGEST_S: Final = 1800.0  # a busy machine takes many times as long as an idle one

Moves = list[tuple[float, bool]]
"""Seconds from the beginning, and whether the gate opens."""


@dataclass
class Burst:
    """What came of a batch.

    Attributes:
        wrong: lines by how.
        closures: gates that were shut.
        shut_share: of the engines' time.
        begun_shut: iterations that an engine began while its gate was shut.
    """

    asked: int
    seconds: float = 0.0
    closures: int = 0
    shut_share: float = 0.0
    begun_shut: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


def gates(seed: int) -> list[Moves]:
    """When production's guard opens and shuts the gates of the busiest replicas that lend."""
    chosen, material = scenario("normal")
    world = Simulation(chosen, RULES[Regime.OURS], seed, material)
    world.clock.run(round(_WARM_S * SECOND))
    found: list[Moves] = [[(0.0, one.gate.is_open)] for one in world.replicas]
    for look in range(1, round(_PLAYED_S / _LOOK_S)):
        world.clock.run(round((_WARM_S + look * _LOOK_S) * SECOND))
        for moves, one in zip(found, world.replicas, strict=True):
            if moves[-1][1] != one.gate.is_open:
                moves.append((look * _LOOK_S, one.gate.is_open))
    return sorted(found, key=len)[-_ENGINES:]


@contextlib.asynccontextmanager
async def _engine(attach: int, name: str, moves: Moves, burst: Burst) -> AsyncIterator[None]:
    """A fake engine whose gate moves again and again as it did."""
    is_open = moves[0][1]
    scheduler = FakeScheduler(
        WeightSession({}, VERSION), lambda: is_open, token_seconds=_TOKEN_S, max_running=64
    )
    runner = web.AppRunner(FakeServer(scheduler).application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    update = EngineUpdate(
        name, EngineKind.BORROWED, LEASE, url, gate_open=is_open, cap=64, version=VERSION
    )

    async def play() -> None:
        nonlocal is_open
        began = time.monotonic()
        shut_at = 0
        while True:
            for at_s, opens in moves:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                if opens == is_open:
                    continue
                is_open = opens
                if opens:
                    # The iteration under way when the gate shut may end, and none may begin.
                    begun = scheduler.counters.iterations - shut_at
                    burst.begun_shut += max(0, begun - 1)
                else:
                    shut_at = scheduler.counters.iterations
                    burst.closures += 1
                mine.send(gate_open=opens)
            began += _PLAYED_S

    async with owner(attach, update, "secret") as mine:
        task = asyncio.create_task(play())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runner.cleanup()


async def batch(count: int, seed: int) -> Burst:
    """A batch of so many lines, while gates move."""
    burst, moves = Burst(count), gates(seed)
    burst.shut_share = sum(map(_shut_s, moves)) / (_PLAYED_S * len(moves))
    with tempfile.TemporaryDirectory(prefix="rose-bench-bursts-") as name:
        two = pair(Path(name), lines=128)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(two.router, two.batches))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            team = Caller(two.url, http, {})
            while await ask(http, f"{two.url}/v1/batches") is None:  # noqa: ASYNC110  # other processes
                await asyncio.sleep(0.05)
            for number, one in enumerate(moves):
                engine = _engine(two.attach, f"engine-{number}", one, burst)
                await stack.enter_async_context(engine)
            began = time.monotonic()
            made = await team.begin(token_file(count), endpoint=COMPLETIONS)
            ended = await team.ended(made, within_s=_LONGEST_S)
            burst.seconds = time.monotonic() - began
            lines = await team.lines(ended["output_file_id"])
    names = Counter(one["custom_id"] for one in lines)
    burst.wrong["lost"] = count - len(names)
    burst.wrong["doubled"] = names.total() - len(names)
    if not burst.wrong.total():
        check_answers(lines, count)
    return burst


def _shut_s(moves: Sequence[tuple[float, bool]]) -> float:
    ends = [at_s for at_s, _ in moves[1:]] + [_PLAYED_S]
    return sum(end - at_s for (at_s, opens), end in zip(moves, ends, strict=True) if not opens)
