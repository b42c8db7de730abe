"""Faults the guard meets without processes: its neighbours' sockets, its clocks, its namespaces."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rose_agent.guard.flight.recorder import BlackBox, dumps
from rose_agent.guard.links.taplink import TapLink
from rose_agent.guard.loop import Guard
from rose_agent.guard.slots import slot as slot_module
from rose_agent.guard.sync.report import slot_report
from rose_agent.pods.model import ServingPod
from rose_agent.tap import frames
from rose_core.devices.memory import MemorySum
from rose_core.guard.gate import GateLimits
from rose_core.guard.slot import decide
from rose_core.identity import PodUid
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import (
    Arrived,
    Ended,
    EndKind,
    FirstToken,
    Health,
    Progress,
    Sized,
    TapEvent,
)
from rose_core.telemetry.signal import SignalLimits
from rose_core.wire.sync import PoolPolicy, SignalSource, SyncReply
from rose_engines.node.permit import Permit
from tests.agent.test_guard import GRANT, KEY, guard, health, is_open

POD = PodUid("pod")

__all__ = ["guard"]
S = 10**9
MS = 10**6

Parts = tuple[Guard, Permit]


def reason(made: Guard) -> str:
    return made.slots[KEY.uid].verdict.reason.value


@pytest.mark.parametrize(
    "problem",
    [
        "cannot enter the network namespace of pid 4711: no such process",
        "interface eth0 is gone or down",
    ],
)
async def test_a_pod_that_can_no_longer_be_heard_is_unknown(guard: Parts, problem: str) -> None:
    made, permit = guard
    made.step_all()
    now = time.monotonic_ns()
    made.on_tap([Health(POD, now, problem, 0, False, 0, {}, 0)], now)
    made.step_all()
    assert permit.until_ns == 0
    assert reason(made) == "SignalLost"


async def test_an_interface_that_goes_down_in_a_burst_keeps_the_gate_closed_until_it_is_heard(
    guard: Parts,
) -> None:
    made, permit = guard
    made.step_all()
    now = time.monotonic_ns()
    made.on_tap([Arrived(POD, 1, now, "/generate")], now)
    down = Health(POD, now, "interface eth0 is gone or down", 0, False, 0, {}, 0)
    made.on_tap([down], now)
    made.step_all()
    assert not made.replicas[POD].book.live, "nobody knows whether it is still under way"
    made.on_tap([health()], now + MS)
    made._step_replica(POD, now + MS, 0)
    assert permit.until_ns == 0, "what passed unheard may still be under way"
    made._step_replica(POD, now + 3 * S, 0)
    assert permit.until_ns > 0
    gates = [entry[3]["reason"] for entry in made.recorder.entries() if entry[2] == "gate"]
    assert gates[-4:] == ["Idle", "ServingBusy", "SignalLost", "Idle"]


async def test_a_guard_that_was_suspended_opens_nothing_on_its_old_knowledge(guard: Parts) -> None:
    made, permit = guard
    made.replicas[POD].limits = SignalLimits()
    now = time.monotonic_ns()
    made.on_tap([health()], now)
    made.replicas[POD].book.blind_ns = 0
    made._step_replica(POD, now, 0)
    assert is_open(permit)
    # The monotonic clock has gone on by a minute; the tap's word is as old.
    made._step_replica(POD, now + 60 * S, 0)
    assert permit.until_ns == 0
    assert reason(made) == "SignalStale"


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_jump_of_the_wall_clock_neither_settles_a_pod_nor_closes_its_gate(
    guard: Parts, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, permit = guard
    fresh = ServingPod(
        POD,
        *("chat", "pod", "chat/pool", "127.0.0.1", 9),
        restarted=True,
        ready_since_s=time.time() - 1.0,
    )
    made.step_all()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    made.step_all()
    assert is_open(permit)
    assert not made.is_settled(fresh), "Ready for a second, whatever the clock says"


async def test_memory_kept_back_for_a_slot_is_in_what_its_guard_reports(guard: Parts) -> None:
    made, _ = guard
    made.step_all()
    slot = made.slots[KEY.uid]
    slot.reserve = MemorySum(total=80, serving=50, headroom=10, settled=3)
    before, began = slot_report(slot), slot.totals.last_ns
    made._step_replica(POD, began + 4 * S, 0)
    after = slot_report(slot)
    assert before is not None
    assert after is not None
    assert after.lent_milliseconds - before.lent_milliseconds == 4000
    assert after.reserved_milliseconds - before.reserved_milliseconds == 1000, "a quarter of it"


async def test_tokens_that_serving_had_beside_a_slot_are_in_what_its_guard_reports(
    guard: Parts,
) -> None:
    made, _ = guard
    replica, slot = made.replicas[POD], made.slots[KEY.uid]

    def counted(read: int | None, written: int | None, ended: int) -> tuple[int, ...]:
        replica.outcomes.counters.finished = ended
        page = Figures(0, 0, input_tokens=read, output_tokens=written)
        replica.note_figures(SignalSource.METRICS, page, time.monotonic_ns())
        made.step_all()
        found = slot_report(slot)
        assert found is not None
        return (
            found.serving_input_tokens,
            found.serving_output_tokens,
            found.serving_requests_with_tokens,
        )

    assert counted(9000, 700, 50) == (0, 0, 0), "from before the slot"
    assert counted(9600, 740, 54) == (600, 40, 4)
    assert counted(None, 745, 55) == (600, 40, 4), "a page that does not say it counts nothing"
    assert counted(9700, 750, 56) == (700, 50, 6)


async def test_a_never_idle_replica_is_paced_inside_a_period(guard: Parts) -> None:
    made, permit = guard
    goal = PoolPolicy(
        "chat/pool", "Lend", {"a": "b"}, 1, ttft_milliseconds=60_000, tpot_milliseconds=18
    )
    made.on_reply(SyncReply(1, True, (GRANT,), (goal,)), time.monotonic())
    replica = made.replicas[POD]
    period = GateLimits().period_ns
    now = time.monotonic_ns()
    start = now - now % period + period
    first = start - 7 * S
    # What the stream has saved is kept for another prefill as long as its own.
    replica.take(Arrived(POD, 1, first, "/generate"), first)
    replica.take(Sized(POD, 1, 64 << 10, "/generate"), first)
    replica.take(FirstToken(POD, 1, first), first)
    replica.take(Progress(POD, 1, start, 600), start)
    assert replica.gaps.share(start) == 0.0
    made._step_replica(POD, start, 0)
    duty = made.slots[KEY.uid].verdict.duty
    assert reason(made) == "Slack"
    assert 0.1 < duty < 1.0
    lapse = start + int(duty * period)
    assert permit.until_ns == lapse, "it lapses by itself"
    assert made._timers.fires_soon(POD, start + period - 1), (
        "nobody is woken before the next period"
    )
    opened = made.slots[KEY.uid].totals.open_ns
    made._step_replica(POD, lapse + 20_000_000, 0)
    assert permit.until_ns == 0
    assert made.slots[KEY.uid].totals.open_ns - opened == lapse - start, "looked at late, told true"
    gates = [time_ns for time_ns, _, what, _ in made.recorder.entries() if what == "gate"]
    assert gates[-2:] == [start, lapse]
    assert made.slots[KEY.uid].gate_open, "a pause of the duty cycle is no news for the router"
    assert made._timers.is_set(POD), "the next period needs no tick"


async def test_inside_a_whole_period_arrivals_and_heartbeats_leave_the_slot_as_it_is(
    guard: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, permit = guard
    goal = PoolPolicy(
        "chat/pool", "Lend", {"a": "b"}, 1, ttft_milliseconds=60_000, tpot_milliseconds=1000
    )
    made.on_reply(SyncReply(1, True, (GRANT,), (goal,)), time.monotonic())
    replica, slot = made.replicas[POD], made.slots[KEY.uid]
    period = GateLimits().period_ns
    now = time.monotonic_ns()
    start = now - now % period + period
    for number in range(5):
        replica.take(Arrived(POD, number, start - 7 * S, "/generate"), start - 7 * S)
        replica.take(Sized(POD, number, 400, "/generate"), start - 7 * S)
        replica.take(FirstToken(POD, number, start - 6 * S), start - 6 * S)
        replica.take(Progress(POD, number, start, 90), start)
    decided: list[int] = []

    def counting(*arguments: Any) -> Any:  # noqa: ANN401  # as they are
        decided.append(arguments[-1])
        return decide(*arguments)

    monkeypatch.setattr(slot_module, "decide", counting)
    made._step_replica(POD, start, 0)
    until = permit.until_ns
    assert (reason(made), until) == ("Slack", start + period + GateLimits().overlap_ns)
    made._step_replica(POD, start, 0)  # what it saw of the engine has not changed by now
    decided.clear()
    for number, late in enumerate(range(MS, period, 9 * MS), 5):
        arrived = start + late
        made.on_tap([Arrived(POD, number, arrived, "/generate")], arrived)
        assert (permit.until_ns, slot.verdict.reason.value) == (until, "Slack")
    assert not decided, "judged at each arrival, and the permit stands already"
    made._step_replica(POD, start + period, 0)
    assert len(decided) == 1, "the next period's permit"
    assert permit.until_ns == until + period
    permit.beat_host(start)
    made._step_replica(POD, start + period + 60 * MS, 0)
    assert len(decided) == 2, "its host is silent"
    assert permit.until_ns == 0


async def test_a_heartbeat_just_before_a_period_leaves_the_step_to_it(
    guard: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = guard
    beaten: list[bool] = []

    def beat() -> bool:
        beaten.append(True)
        return True

    monkeypatch.setattr(made._pulse, "beat", beat)
    now = time.monotonic_ns()
    made._timers.set(POD, now + 3_000_000, now)
    made.on_tap([health()], now)
    assert not beaten
    made._step_again(POD)
    assert beaten == [True], "and the period steps every slot"
    made.on_tap([health()], now + 50_000_000)
    assert beaten == [True, True]


async def test_a_co_running_request_over_its_slo_leaves_a_dump(guard: Parts) -> None:
    made, permit = guard
    goal = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, ttft_milliseconds=1, tpot_milliseconds=1)
    made.on_reply(SyncReply(1, True, (GRANT,), (goal,)), time.monotonic())
    made.blackbox = BlackBox(made.rundir.root / "flight", made.recorder, after_seconds=0.0)
    replica = made.replicas[POD]
    replica.outcomes._on_breach = made.blackbox.breach
    made.step_all()
    assert is_open(permit)
    now = time.monotonic_ns()
    replica.outcomes.open_time.note(now + 60 * S, now)
    late = now + 20 * MS
    for event in (
        Arrived(POD, 1, now, "/generate"),
        FirstToken(POD, 1, late),
        Ended(POD, 1, late + 20 * MS, 2, 200, EndKind.COMPLETE),
    ):
        replica.take(event, late if isinstance(event, FirstToken) else event.time_ns)
    await made.blackbox.settle()
    (path,) = dumps(made.rundir.root / "flight")
    entries = json.loads(path.read_bytes())["entries"]
    (outcome,) = [entry for entry in entries if entry["what"] == "finished"]
    assert outcome["shared"] == 1.0
    assert (await asyncio.to_thread(path.stat)).st_mode & 0o077 == 0, "for the node's owner only"


# --- the tap's socket


class EventLog:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.events: list[TapEvent] = []
        self.lost = 0
        self.changed = asyncio.Event()

    def on_tap(self, events: list[TapEvent], now_ns: int) -> None:
        self.events += events
        self.changed.set()

    def on_tap_lost(self, now_ns: int) -> None:
        self.lost += 1
        self.changed.set()


@pytest.fixture
async def link(short_dir: Path) -> AsyncIterator[tuple[EventLog, list[asyncio.StreamWriter]]]:
    """A link to a tap that the test plays."""
    received, writers = EventLog(), list[asyncio.StreamWriter]()
    path = short_dir / "tap.sock"

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(frames.pack([health()]))

    server = await asyncio.start_unix_server(serve, str(path))
    task = asyncio.create_task(TapLink(path, received).run())
    yield received, writers
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for writer in writers:
        writer.close()
    server.close()


async def until(received: EventLog, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            received.changed.clear()
            await received.changed.wait()


async def test_a_closed_tap_socket_is_noticed_at_once_and_connected_again(
    link: tuple[EventLog, list[asyncio.StreamWriter]],
) -> None:
    received, writers = link
    await until(received, lambda: bool(received.events))
    assert received.lost == 0
    writers[0].close()
    await until(received, lambda: received.lost == 1)
    await until(received, lambda: len(received.events) == 2)


async def test_garbage_on_the_tap_socket_is_a_lost_tap(
    link: tuple[EventLog, list[asyncio.StreamWriter]],
) -> None:
    received, writers = link
    await until(received, lambda: bool(received.events))
    writers[0].write(b"\x05\x00\x00\x00hello, this is no frame at all")
    await until(received, lambda: received.lost >= 1)
    await until(received, lambda: len(received.events) == 2)


@pytest.mark.parametrize("silent_s", [0, 2])
async def test_an_engine_is_hardly_asked_for_its_load_while_the_tap_sees_its_requests_live(
    guard: Parts, monkeypatch: pytest.MonkeyPatch, silent_s: int
) -> None:
    replica = guard[0].replicas[POD]
    now = time.monotonic_ns()
    began = now - silent_s * 10**9
    replica.take(Arrived(POD, 1, began, "/generate"), now)
    replica.take(FirstToken(POD, 1, began), now)
    replica.take(health(1), now)
    asked: list[float] = []
    clock = time.monotonic()

    async def loads() -> Figures:
        asked.append(time.monotonic())
        return Figures(1, 0)

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        if len(pauses) == 11:
            raise asyncio.CancelledError
        pauses.append(seconds)

    async def compare() -> bool:
        return True

    pauses: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(replica.reader, "loads", loads)
        patch.setattr(replica, "compare", compare)
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(time, "monotonic", lambda: clock)
        with pytest.raises(asyncio.CancelledError):
            await replica.poll()
    assert pauses == [1.0] * 11
    assert len(asked) == (12 if silent_s else 3), "all the more when one says nothing"
