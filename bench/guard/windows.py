"""Runs one window: a condition, a load, a round; and the probes that come before.

Next step: ``analysis`` turns windows into figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np

from bench.guard import gates, reactions
from bench.guard.gates import Profile
from bench.guard.load import Arrival, Load, Served, schedule, serve
from bench.guard.measured import Cost, Window, cpu_usage, strangers
from bench.guard.node import Bench
from bench.guard.rollouts import Rollouts
from bench.guard.serving import KV_TOKENS, RUNNING
from rose_core.wire.sync import SignalSource

CONDITIONS = ("alone", "control", "unguarded", "static-duty", "polled", "rose-paper", "ours")
"""``control`` is serving alone once more: what differs from ``alone`` there is chance."""
WITHOUT = ("alone", "control")
GUARDED = ("polled", "ours")
_PATIENCE_SECONDS = 60.0
_REST_SECONDS = 4.0
_LEARNING_SECONDS = 6.0
_LEARNING_ROUND = 500
_SOLO_SECONDS = 1.5
SHARES = {"static-duty": 0.5, "duty-12": 0.12, "duty-25": 0.25, "duty-37": 0.37, "duty-75": 0.75}
"""Fixed shares; all but the first run once, on steady loads, for the offline search."""
SEARCHED = ("duty-25", "duty-37", "duty-12", "duty-75")
"""In the order of the search; one that cannot be the best any more is passed over (``pace``)."""


@dataclass(frozen=True)
class Goal:
    """SLO of a load (seconds): twice the 99th percentile of serving alone."""

    ttft_s: float
    tpot_s: float

    @property
    def milliseconds(self) -> tuple[int, int]:
        """As a policy carries it."""
        return round(1000 * self.ttft_s), round(1000 * self.tpot_s)


@dataclass(frozen=True)
class Solo:
    """What the probes found.

    Attributes:
        rollout_rate: tokens per second of the rollout engine alone.
        serving_rate: tokens per second of the saturated serving engine.
    """

    rollout_rate: float
    serving_rate: float
    profile: Profile


class Runner:
    """Runs windows on one bench."""

    def __init__(self, bench: Bench, rollouts: Rollouts) -> None:
        self.bench, self.rollouts = bench, rollouts

    async def solo(self, seconds: float) -> Solo:
        """Probe each engine alone; no guard may be running."""
        rate = await self.rollout_rate(seconds)
        saturated = Rollouts(self.bench.serving_url, RUNNING, self.bench.serving.dialect)
        task = asyncio.create_task(saturated.run())
        await asyncio.sleep(1.5)
        now = time.monotonic()
        await asyncio.sleep(seconds)
        serving = saturated.made(now, now + seconds) / seconds
        await _ended(task)
        await asyncio.sleep(0.5)
        return Solo(rate, serving, await self.profile())

    async def rollout_rate(self, seconds: float) -> float:
        """Rollout tokens per second while serving has nothing to do."""
        async with self.bench.permit() as permit, gates.gate(permit, gates.always, self.bench.bell):
            opened = time.monotonic()
            while self.rollouts.first_after(opened) is None:
                if time.monotonic() - opened > _PATIENCE_SECONDS:
                    raise TimeoutError("the rollout engine makes no token under an open permit")
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            now = time.monotonic()
            await asyncio.sleep(seconds)
            return self.rollouts.made(now, now + seconds) / seconds

    async def profile(self) -> Profile:
        """Costs of serving alone, from prompts of several lengths, one after another."""
        served = Served()
        for number, prompt in enumerate((16, 200, 400, 700) * 2):
            arrival = Arrival(0.0, prompt, 12)
            await serve(
                self.bench.serving_url,
                [arrival],
                served,
                seed=f"probe {number}",
                dialect=self.bench.serving.dialect,
            )
        sizes = np.array([a.arrival.prompt for a in served.answers], dtype=float)
        times = np.array([a.ttft_s for a in served.answers])
        slope, base = np.polyfit(sizes, times, 1)
        step = float(np.median([a.tpot_s or 0.0 for a in served.answers]))
        return Profile(max(0.0, float(base)), max(0.0, float(slope)), step)

    async def window(
        self,
        load: Load,
        condition: str,
        number: int,
        *,
        seconds: float,
        solo: Solo,
        goal: Goal | None,
    ) -> Window:
        """Run one."""
        served = Served()
        self.rollouts.halved = False
        arrivals = schedule(load, seconds, number, solo.serving_rate)
        seed = f"{load.name} {condition} {number} {time.monotonic_ns()}"
        async with self._conditions(load, condition, served, solo, goal) as spans:
            if condition in GUARDED:
                await self._warm_up(load, number, solo)
            rested = await self._rested() if condition == "ours" and not load.steady else None
            used = self._used() if condition == "ours" else None
            sent, machine = time.monotonic(), cpu_usage()
            await serve(
                self.bench.serving_url,
                arrivals,
                served,
                seed=seed,
                seconds=seconds,
                lead_s=load.lead_s,
                dialect=self.bench.serving.dialect,
            )
            began = served.began_s
            made = 0 if condition in WITHOUT else self.rollouts.made(began, began + seconds)
            window = Window(
                load.name, condition, number, seconds, began, served.answers, served.failed, made
            )
            window.opened = list(spans)
            window.idle_tokens = sum(self.rollouts.made(*gap) for gap in window.gaps)
            window.strangers = strangers(machine, cpu_usage())
            if used is not None:
                resting_s, resting_cpu_s = rested or (0.0, 0.0)
                cost = self._cost(used[0], sent, served)
                window.cost = replace(cost, resting_s=resting_s, resting_cpu_s=resting_cpu_s)
            if condition in GUARDED:
                noted = (await self.bench.page("trace"))["entries"]
                reactions.read(noted, window, self.rollouts)
        if condition == "alone" and not load.steady:
            # The machine's speed changes over minutes: what idle time could give is asked there.
            window.solo_rate = await self.rollout_rate(_SOLO_SECONDS)
        return window

    async def _warm_up(self, load: Load, number: int, solo: Solo) -> None:
        """Some unmeasured seconds of the same kind of load.

        A guard lives for days, not for one window, so what it learns of its replica at first does
        not belong to each window anew.
        """
        arrivals = schedule(load, _LEARNING_SECONDS, _LEARNING_ROUND + number, solo.serving_rate)
        await serve(
            self.bench.serving_url,
            [arrival for arrival in arrivals if arrival.at_s >= 0],
            Served(),
            seed=f"learning {load.name} {number} {time.monotonic_ns()}",
            seconds=_LEARNING_SECONDS,
            dialect=self.bench.serving.dialect,
        )

    def _cost(self, cpu_before_s: float, since_s: float, served: Served) -> Cost:
        now = time.monotonic()
        cpu, rss, pss = self._used()
        tokens = self.rollouts.made(since_s, now) + sum(a.tokens for a in served.answers)
        return Cost(now - since_s, tokens, cpu - cpu_before_s, rss, pss)

    async def _rested(self) -> tuple[float, float]:
        """Seconds without a request to serving, and the CPU of guard and tap in them."""
        before, began = self._used()[0], time.monotonic()
        await asyncio.sleep(_REST_SECONDS)
        return time.monotonic() - began, self._used()[0] - before

    @contextlib.asynccontextmanager
    async def _conditions(
        self, load: Load, condition: str, served: Served, solo: Solo, goal: Goal | None
    ) -> AsyncIterator[gates.Spans]:
        """Set it up; yields when the gate stood open, where the benchmark moves it itself."""
        if condition in GUARDED:
            sources = (SignalSource.LOADS,) if condition == "polled" else tuple(SignalSource)
            milliseconds = goal.milliseconds if goal and load.steady else (0, 0)
            await self.bench.guarded_anew(sources, milliseconds)
            yield []
            return
        await self.bench.guarded(up=False)
        if condition in WITHOUT:
            yield []
            return
        rule: gates.Rule = gates.always
        if condition in SHARES:
            rule = gates.duty(SHARES[condition])
        elif condition == "rose-paper" and goal is not None:
            aims = (goal.ttft_s, goal.tpot_s)
            rule = gates.paper(served, solo.profile, aims, KV_TOKENS, self.rollouts).rule
        async with (
            self.bench.permit() as permit,
            gates.gate(permit, rule, self.bench.bell) as spans,
        ):
            await asyncio.sleep(0.5)
            yield spans

    def _used(self) -> tuple[float, int, int]:
        """CPU seconds, RSS and PSS of guard and tap."""
        cpu, rss, pss = 0.0, 0, 0
        for process in self.bench.guard_processes():
            times, memory = process.cpu_times(), process.memory_full_info()
            cpu += times.user + times.system
            rss, pss = rss + memory.rss, pss + memory.pss
        return cpu, rss, pss


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
