"""The agent's processes together on one node, with fake engines and a real wire tap.

What must hold is asked of the rollout engine itself: its processes' CPU time. A second of grace
(the promise is 250 ms) keeps a busy test machine from deciding.
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
# One step of the engine under test is 2 ms, so a second of computing would show as far more.
IDLE_CPU_SECONDS = 0.05


@pytest.fixture
async def lent(short_dir: Path) -> AsyncIterator[Node]:
    """A node whose slot's engine is computing."""
    async with node(short_dir) as n:
        await n.until(lambda: _computes(n), "the rollout engine is lent and open")
        feeder = await n.keep_rollouts_busy()
        await n.until(lambda: _grows(n), "the rollout engine computes")
        yield n
        feeder.cancel()


async def _computes(n: Node) -> bool:
    slot = await n.slot()
    file = n.engine()
    return bool(
        slot.get("gateOpen")
        and file
        and file.url
        and n.operator.slot
        and n.operator.slot.state not in {"Starting", "Pending"}
    )


async def _grows(n: Node) -> bool:
    before = n.cpu_seconds()
    await asyncio.sleep(0.5)
    return n.cpu_seconds() > before + 0.02


async def stands_still(n: Node) -> None:
    """After the grace the engine uses no CPU for a second."""
    await asyncio.sleep(GRACE_SECONDS)
    before = n.cpu_seconds()
    await asyncio.sleep(1.0)
    assert n.cpu_seconds() - before <= IDLE_CPU_SECONDS


async def test_request_closes_the_gate_and_its_end_opens_it(lent: Node) -> None:
    request = asyncio.create_task(lent.generate(600))  # three seconds of serving
    await lent.until(lambda: lent.gate(is_open=False), "an arrival closes the gate")
    await stands_still(lent)
    assert await request == 600
    await lent.until(lambda: _grows(lent), "the engine computes again")
    trace = await lent.trace()
    closed = [e for e in trace if e["what"] == "closed"]
    assert closed, "the flight recorder has the closing"
    finished = [e for e in trace if e["what"] == "finished"]
    assert [e["tokens"] for e in finished] == [600]
    arrival = closed[0]["arrival"]
    assert any(e["what"] == "stopped" and e["arrival"] == arrival for e in trace)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victims", [("agent",), ("host",), ("agent", "host")])
async def test_no_death_leaves_a_computing_engine(
    lent: Node, victims: tuple[str, ...], number: signal.Signals
) -> None:
    for victim in victims:
        lent.signal(victim, number)
    await stands_still(lent)
    assert await lent.generate(20) == 20, "serving is untouched"


async def test_tap_lost_closes_and_comes_back(lent: Node) -> None:
    await lent.kill("tap")
    await lent.until(lambda: lent.gate(is_open=False), "no tap, no open gate")
    await stands_still(lent)
    await lent.start_tap()
    await lent.until(lambda: _grows(lent), "the tap is back and verified")


async def test_serving_exit_vacates_before_it_is_back(lent: Node) -> None:
    engine = lent.engine_processes()
    assert engine
    await lent.kill("serving")
    await lent.until(lambda: not lent.engine_processes(), "the engine has left the GPU")
    await lent.start_serving()
    await lent.until(lambda: _computes(lent), "lending resumes after serving has settled")


async def test_grants_lapse_without_the_operator(lent: Node) -> None:
    lent.operator.ttl_seconds = 2.0
    await lent.until(lambda: len(lent.operator.requests) > 3, "a short grant was taken")
    await asyncio.sleep(1)
    lent.operator.silent = True
    await lent.until(lambda: not lent.engine_processes(), "the lapsed grant ends the engine", 90)


async def test_stop_button(lent: Node) -> None:
    lent.rundir.stop.touch()
    await stands_still(lent)
    await lent.until(lambda: not lent.engine_processes(), "everything is given back")
    lent.rundir.stop.unlink()
    await lent.until(lambda: _computes(lent), "and lent again afterwards")


async def test_orphan_of_a_killed_guard_is_ended(lent: Node) -> None:
    await lent.kill("agent")
    lent.operator.granted = False
    await lent.start_agent()
    await lent.until(lambda: not lent.engine_processes(), "a slot without a grant is stopped")


async def test_older_term_is_refused(lent: Node) -> None:
    lent.operator.term = 5
    await lent.until(lambda: lent.operator.requests[-1].highest_term == 5, "the new term is obeyed")
    lent.operator.term, lent.operator.granted = 4, False
    seen = len(lent.operator.requests)
    await lent.until(lambda: len(lent.operator.requests) > seen + 3, "the deposed planner answers")
    assert lent.operator.requests[-1].highest_term == 5
    assert lent.engine_processes(), "a deposed planner takes nothing back"
