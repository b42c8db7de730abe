"""A replica over two nodes, with real guards, tap, engine host and permits, over a bad network.

A permit's end is a promise to compute no longer. So what must hold is read there: after a fault
none reaches further beyond it than a word is good for, whatever the test machine does meanwhile;
and while the leader's engine has a request, the follower's permit is closed.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rose_core.guard.following import MAX_LEASE_NS
from tests.agent.node import tap_refusal
from tests.agent.pair import MS, Pair, pair
from tests.tap.net import link_refusal
from tests.tap.wire import Weather

_REFUSAL = tap_refusal() or link_refusal()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL or "-"),
]

PROMISE_NS = MAX_LEASE_NS + 10 * MS  # a signal arrives a moment after it was sent
# From a request until its guards have heard, on a busy test machine.
GRACE_NS = 500 * MS
IDLE_CPU_SECONDS = 0.05
REQUESTS = 3

WEATHERS = {
    "clear": Weather(),
    "delay": Weather(delay=0.02),
    "loss": Weather(delay=0.002, loss=0.1),
    "reordering": Weather(delay=0.002, jitter=0.02),
}


@pytest.fixture
async def two(short_dir: Path) -> AsyncIterator[Pair]:
    async with pair(short_dir) as found:
        yield found


def requests(two: Pair) -> list[tuple[int, int]]:
    """When each request of the test was sent, and had its whole answer."""
    log = (two.leader.root / "client.log").read_text()
    sent, ended = (
        list(map(int, re.findall(rf"{state} (\d+)", log))) for state in ("sent", "ended")
    )
    return list(zip(sent, ended, strict=True))


async def test_the_follower_stands_while_the_leader_serves_in_any_weather(two: Pair) -> None:
    for weather in WEATHERS.values():
        two.wire.weather = weather
        for _ in range(REQUESTS):
            await two.opens("the follower's gate opens")
            await two.serve(tokens=300)
    found = requests(two)
    assert len(found) == REQUESTS * len(WEATHERS)
    for sent, ended in found:
        assert ended - sent > 2 * GRACE_NS  # else nothing below would be looked at
        reached = [until for seen, until in two.watch.entries if sent + GRACE_NS < seen < ended]
        assert max(reached, default=0) <= sent + GRACE_NS + PROMISE_NS
        before = [until for seen, until in two.watch.entries if seen <= sent + GRACE_NS]
        assert before[-1] <= sent + GRACE_NS
    assert two.wire.seen["lost"] > 0
    assert two.wire.seen["reordered"] > 0


async def cut(two: Pair) -> None:
    two.wire.weather = Weather(cut=True)


async def mend(two: Pair) -> None:
    two.wire.weather = Weather()


async def killed(two: Pair) -> None:
    await two.leader.kill("agent")


async def started(two: Pair) -> None:
    await two.leader.start_agent()


async def stopped(two: Pair) -> None:
    two.leader.signal("agent", signal.SIGSTOP)


async def continued(two: Pair) -> None:
    two.leader.signal("agent", signal.SIGCONT)


async def tap_killed(two: Pair) -> None:
    await two.leader.kill("tap")


async def tap_started(two: Pair) -> None:
    await two.leader.start_tap()


Deed = Callable[[Pair], Awaitable[None]]
FAULTS: dict[str, tuple[Deed, Deed]] = {
    "partition": (cut, mend),
    "the leader's guard is killed": (killed, started),
    "the leader's guard is stopped": (stopped, continued),
}


async def test_no_permit_outlasts_the_leaders_silence_and_all_goes_on_afterwards(
    two: Pair,
) -> None:
    for name, (break_, mend_) in FAULTS.items():
        await two.opens(f"the follower's gate opens before: {name}")
        await break_(two)
        since_ns = time.monotonic_ns()
        await two.follower.until(
            lambda: shows(two, "LeaderSilent"), f"the follower says LeaderSilent: {name}"
        )
        used = two.follower.cpu_seconds()
        await asyncio.sleep(1.0)
        assert two.follower.cpu_seconds() - used < IDLE_CPU_SECONDS, name
        assert two.watch.latest_ns() <= since_ns + PROMISE_NS, name
        await mend_(two)
    await two.opens("the follower's gate opens at the end")


async def shows(two: Pair, state: str) -> bool:
    return bool((await two.follower.slot()).get("reason") == state)


async def test_a_leader_whose_tap_is_dead_gives_no_word(two: Pair) -> None:
    await tap_killed(two)
    since_ns = time.monotonic_ns()
    await two.follower.until(lambda: two.follower.gate(is_open=False), "the leader knows nothing")
    # Its own permits would end with what the tap said last; the follower's do not outlast them.
    assert two.watch.latest_ns() <= since_ns + 200 * MS + PROMISE_NS
    await tap_started(two)
    await two.opens("the follower's gate opens again")


async def test_a_pod_that_is_of_the_group_no_more_is_not_answered(two: Pair) -> None:
    two.operator.follows = False
    await two.follower.until(lambda: shows(two, "LeaderSilent"), "nobody is followed")
    since_ns = time.monotonic_ns()
    await asyncio.sleep(0.5)
    assert two.watch.latest_ns() <= since_ns + PROMISE_NS
