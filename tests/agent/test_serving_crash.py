"""A serving engine that crashes: lending stops, and nobody blames the rollouts without evidence."""

from __future__ import annotations

import time
from dataclasses import replace

from rose_agent.guard.flight.recorder import BlackBox, dumps
from rose_agent.guard.loop import Guard
from rose_core.identity import PodUid
from rose_core.telemetry.events import Arrived, Ended, EndKind, FirstToken
from rose_core.wire.sync import PoolPolicy, SyncReply
from rose_engines.node.permit import Permit
from tests.agent.test_guard import GRANT, KEY, guard, is_open

POD = PodUid("pod")

__all__ = ["guard"]
S, MS = 10**9, 10**6
PID = 4711
REQUESTS = 60  # twice what the breaker asks for before it judges
GOAL = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, ttft_milliseconds=1, tpot_milliseconds=1)


def co_running(made: Guard, how: EndKind) -> None:
    """Requests that were slow beside an open gate, and ended like this."""
    replica = made.replicas[POD]
    now = time.monotonic_ns()
    replica.outcomes.open_time.note(now + 60 * S, now)
    for number in range(REQUESTS):
        late = now + 20 * MS
        for event in (
            Arrived(POD, number, now, "/generate"),
            FirstToken(POD, number, late),
            Ended(POD, number, late + 20 * MS, 2, 200, how),
        ):
            replica.take(event, event.time_ns)


async def crashed(made: Guard, how: EndKind) -> None:
    made.on_reply(SyncReply(1, True, (GRANT,), (GOAL,)), time.monotonic())
    made.blackbox = BlackBox(made.rundir.root / "flight", made.recorder, after_seconds=0.0)
    replica = made.replicas[POD]
    replica.pod = replace(replica.pod, pids=(PID,))
    replica.outcomes._on_breach = made.blackbox.breach
    co_running(made, how)
    made._note_exit(PID)
    await made.blackbox.settle()


async def test_requests_that_a_crash_cut_are_no_evidence(guard: tuple[Guard, Permit]) -> None:
    made, permit = guard
    made.step_all()
    assert is_open(permit)
    await crashed(made, EndKind.RESET)
    assert permit.until_ns == 0, "lending stops inside the call that hears of the end"
    assert made.slots[KEY.uid].verdict.reason.value == "ServingGone"
    exits = [entry for entry in made.recorder.entries() if entry[2] == "serving-exit"]
    assert [entry[3]["pid"] for entry in exits] == [PID]
    now = time.monotonic_ns()
    assert not made.replicas[POD].outcomes.pool.breaker.open(now)
    assert dumps(made.rundir.root / "flight") == []


async def test_requests_that_were_whole_and_slow_before_it_are(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    await crashed(made, EndKind.COMPLETE)
    assert made.replicas[POD].outcomes.pool.breaker.open(time.monotonic_ns())
    assert len(dumps(made.rundir.root / "flight")) == 1
