"""The agent's processes together on one node, with fake engines and a real wire tap.

What must hold is asked of the rollout engine itself: its token counter, or where it is frozen and
cannot answer, its processes' CPU time. A second of grace (the promise is 250 ms) keeps a busy test
machine from deciding. Starting a node takes seconds, so
each test tells a longer story.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.node import Node, node, tap_refusal

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "can tap"),
]

GRACE_SECONDS = 1.0
# A busy rollout engine uses far more in a second.
IDLE_CPU_SECONDS = 0.05
STARTING = {"Starting", "Pending", "Releasing", "Gone"}


@pytest.fixture
async def lent(short_dir: Path) -> AsyncIterator[Node]:
    """A node whose slot's engine is computing."""
    async with node(short_dir) as n:
        feeder = await n.keep_rollouts_busy()
        await n.until(lambda: computes(n), "the rollout engine is lent and computes")
        yield n
        feeder.cancel()


async def computes(n: Node) -> bool:
    """The slot's engine makes tokens: one that is still starting uses CPU as well."""
    slot = n.operator.slot
    if slot is None or slot.state in STARTING or not n.engine():
        return False
    before = await n.tokens()
    await asyncio.sleep(0.5)
    after = await n.tokens()
    return before is not None and after is not None and after > before


async def stands_still(n: Node) -> None:
    """After the grace the engine makes no token for a second, or cannot even be asked."""
    await asyncio.sleep(GRACE_SECONDS)
    tokens, cpu = await n.tokens(), n.cpu_seconds()
    await asyncio.sleep(1.0)
    if tokens is not None and (after := await n.tokens()) is not None:
        # It stands in its own permit check, looking at the clock now and then.
        assert after == tokens
    else:
        assert n.cpu_seconds() - cpu <= IDLE_CPU_SECONDS


async def test_serving_comes_first(lent: Node) -> None:
    # An arrival closes the gate, the end of the response opens it.
    request = asyncio.create_task(lent.generate(600))  # three seconds of serving
    await lent.until(lambda: lent.gate(is_open=False), "an arrival closes the gate")
    await stands_still(lent)
    assert await request == 600
    await lent.until(lambda: computes(lent), "the engine computes again")
    trace = await lent.trace()
    closed = [e for e in trace if e["what"] == "closed"]
    assert closed, "the flight recorder has the closing"
    (finished,) = [e for e in trace if e["what"] == "finished"]
    assert finished["tokens"] == pytest.approx(600, rel=0.1), "an estimate, should it be sampled"
    arrival = closed[0]["arrival"]
    assert any(e["what"] == "stopped" and e["arrival"] == arrival for e in trace)

    # Without the tap nothing is known.
    await lent.kill("tap")
    await lent.until(lambda: lent.gate(is_open=False), "no tap, no open gate")
    await stands_still(lent)
    await lent.start_tap()
    await lent.until(lambda: computes(lent), "the tap is back and verified")

    # The stop button gives everything back.
    lent.rundir.stop.touch()
    await stands_still(lent)
    await lent.until(lambda: not lent.engine_processes(), "everything is given back")
    lent.rundir.stop.unlink()
    await lent.until(lambda: computes(lent), "and lent again afterwards")

    # A serving process that exits finds its GPU vacated.
    await lent.kill("serving")
    await lent.until(lambda: not lent.engine_processes(), "the engine has left the GPU")
    await lent.start_serving()
    await lent.until(lambda: computes(lent), "lending resumes after serving has settled")


async def test_no_death_leaves_a_computing_engine(lent: Node) -> None:
    for victims in (("agent",), ("host",), ("agent", "host")):
        for victim in victims:
            lent.signal(victim, signal.SIGSTOP)
        await stands_still(lent)
        assert await lent.generate(20) == 20, "serving is untouched"
        for victim in victims:
            lent.signal(victim, signal.SIGCONT)
        await lent.until(lambda: computes(lent), f"{victims} go on")
    for victims in (("agent",), ("host",), ("agent", "host")):
        for victim in victims:
            await lent.kill(victim)
        await stands_still(lent)
        assert await lent.generate(20) == 20, "serving is untouched"
        for victim in victims:
            await (lent.start_agent if victim == "agent" else lent.start_host)()
        await lent.until(lambda: computes(lent), f"{victims} are back and repair")


async def test_only_a_living_grant_of_the_highest_term_counts(short_dir: Path) -> None:
    async with node(short_dir) as n:
        n.operator.ttl_seconds = 3.0
        n.operator.term = 5
        feeder = await n.keep_rollouts_busy()
        await n.until(lambda: computes(n), "the rollout engine is lent and computes")

        # A deposed planner can neither renew nor take back; the grant then lapses by itself.
        n.operator.term = 4
        seen = len(n.operator.requests)
        await n.until(lambda: len(n.operator.requests) > seen + 2, "the deposed planner answers")
        assert n.operator.requests[-1].highest_term == 5
        await n.until(lambda: not n.engine_processes(), "the grant lapses")

        # A guard that was killed comes back, remembers the term, and ends what nobody granted.
        n.operator.term = 6
        await n.until(lambda: computes(n), "the new planner's grant is obeyed")
        await n.kill("agent")
        n.operator.granted = False
        await n.start_agent()
        await n.until(lambda: not n.engine_processes(), "a slot without a grant is stopped")
        assert n.operator.requests[-1].highest_term == 6
        feeder.cancel()


async def test_an_engine_that_ignores_its_permit_is_stopped_from_outside(short_dir: Path) -> None:
    async with node(short_dir) as n:
        n.operator.arguments = {**n.operator.arguments, "ignore-permit": "true"}
        feeder = await n.keep_rollouts_busy()
        await n.until(lambda: computes(n), "the rollout engine is lent and computes")

        # The engine host stops its tree when the permit closes.
        request = asyncio.create_task(n.generate(600))
        await n.until(lambda: n.gate(is_open=False), "an arrival closes the gate")
        await stands_still(n)
        assert await request == 600
        await n.until(lambda: computes(n), "the engine computes again")

        # Without the host the guard does, by itself.
        n.signal("host", signal.SIGSTOP)
        await stands_still(n)
        assert any(e.get("order") == "FREEZE" for e in await n.trace())
        n.signal("host", signal.SIGCONT)
        await n.until(lambda: computes(n), "the host goes on")
        feeder.cancel()
