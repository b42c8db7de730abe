"""The guard's loop without processes: what reaches a permit when events arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from rose_agent.devices.static import StaticDriver
from rose_agent.guard import loop
from rose_agent.guard.loop import Guard, Settings
from rose_agent.guard.slots.slot import GuardedSlot
from rose_agent.pods.static import StaticPods
from rose_agent.signals.reader import DirectReaders
from rose_core.guard.certificate import CHUNK_DIVISORS
from rose_core.guard.gate import GateLimits, GateVerdict, ReplicaFacts, judge
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import Slack
from rose_core.guard.slot import SlotMachine, SlotPhase
from rose_core.host_reasons import HostReason
from rose_core.identity import GpuUuid, GrantKey, PodUid, SlotKey, SlotUid
from rose_core.rollouts.engines.kv_store import pool_secret
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
from rose_core.telemetry.verify import SignalVerification
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine
from rose_core.wire.sync import (
    EngineSpec,
    FollowerPod,
    Grant,
    PoolPolicy,
    ReplicaGroup,
    RouterProof,
    Sharing,
    SignalSource,
    SleepTerms,
    SyncReply,
    WeightSource,
)
from rose_engines.node.permit import BUSY_LANE, FIRST_LANE, Permit
from rose_engines.node.rundir import RunDir, write_json
from rose_wire.errors import WireError

POD = PodUid("pod")

KEY = SlotKey(SlotUid("slot"), 1)
POLICY = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1)
GRANT = Grant(
    key=GrantKey(1, KEY),
    ttl_seconds=60.0,
    slot_name="slot",
    lease="ns/lease",
    pool="chat/pool",
    pod_uid=POD,
    pod_name="pod",
    gpu_uuids=(GpuUuid("GPU-0"),),
    engine=EngineSpec("fake", "m"),
    weights=WeightSource("h:1", "run"),
    router="",
)


def health(in_flight: int = 0) -> Health:
    return Health(
        POD, time.monotonic_ns(), "", 0, opaque=False, in_flight=in_flight, counts={}, packets=0
    )


@contextlib.asynccontextmanager
async def guarding(
    root: Path, *, token: str = "", identity: Path | None = None, **place: object
) -> AsyncIterator[tuple[Guard, Permit]]:
    """A guard with one verified idle replica and one granted engine the host lists.

    Args:
        root: an empty folder.
        token, identity: by which other nodes' guards know it.
        place: the replica's, where it is one of several pods.
    """
    rundir = RunDir(root / "run").create()
    permit = Permit.create(rundir.slot(KEY.uid).create().permit)
    replicas = root / "replicas.yaml"
    entry = {"uid": "pod", "pool": "chat/pool", "port": 9, "gpus": ["GPU-0"], **place}
    replicas.write_text(yaml.safe_dump({"replicas": [entry]}))
    async with aiohttp.ClientSession() as session:
        settings = Settings("node", token, gate=GateLimits(reopen_ns=0), identity=identity)
        order = EnsureEngine(KEY, "slot", GRANT.engine, GRANT.weights)
        write_json(rundir.slot(KEY.uid).slot, order)  # as the host does
        made = Guard(rundir, settings, StaticDriver(None), DirectReaders(session))
        made.pods = StaticPods(replicas)
        made.on_reply(SyncReply(1, True, (GRANT,), (POLICY,)), time.monotonic())
        made.host.engines = {KEY.uid: EngineStatus(KEY, EngineState.SERVING)}
        made.host.asked_ns = made.host.answered_ns = time.monotonic_ns() + 10**12
        replica = made.replicas[POD]
        replica.verification = SignalVerification(verified=True)
        # A busy test machine must not make the tap look stale.
        replica.limits = SignalLimits(tap_stale_ns=10**12)
        made.on_tap([health()], time.monotonic_ns())
        replica.book.blind_ns = 0
        permit.beat_host(time.monotonic_ns() + 10**12)
        # No engine has a counter to compare with. Looked for in vain, it made the tap unverified
        # after seconds: on a busy machine before the test was there.
        for task in made.pollers.values():
            task.cancel()
        yield made, permit
        for task in made.pollers.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for slot in made.slots.values():
            await slot.detach()
        made.groups.close()
        made.close()
        await made.host._channel.close()
    permit.detach()


@pytest.fixture
async def guard(short_dir: Path) -> AsyncIterator[tuple[Guard, Permit]]:
    async with guarding(short_dir) as found:
        yield found


def is_open(permit: Permit) -> bool:
    """Extended and not closed since; whether it has lapsed by now is the machine's speed."""
    return permit.until_ns > 0


async def test_the_end_of_a_call_steps_its_own_slot_and_is_told(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    received: list[str] = []
    made.on_transition = lambda: received.append("soon")
    made._report_change(SlotUid("forgotten"))
    assert not is_open(permit)
    made._report_change(KEY.uid)
    assert is_open(permit)
    del made.replicas[POD]
    made._report_change(KEY.uid)
    assert not is_open(permit), "a slot whose replica has gone is looked at too"
    assert received == ["soon"] * 3


async def test_an_arrival_closes_the_permit_inside_the_call_that_hears_of_it(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    made.step_all()
    assert is_open(permit)
    # Long, so that the flight recorder has a closing to tell of, however slow the machine.
    permit.extend(time.monotonic_ns() + 5 * 10**9)
    now = time.monotonic_ns()
    made.on_tap([Arrived(POD, 1, now, "/generate")], now)
    assert permit.until_ns == 0
    assert made.slots[KEY.uid].machine.rung.name == "STOP"
    made.on_tap([Ended(POD, 1, now, 5, 200, EndKind.COMPLETE), health()], time.monotonic_ns())
    assert is_open(permit), "empty again"
    what = [entry[2] for entry in made.recorder.entries()]
    assert what.count("arrived") == what.count("closed") == what.count("finished") == 1


async def test_the_right_to_compute_moves_to_the_other_engine_through_a_closed_permit(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    two = Sharing("MPS", 50, busy_percent=20)
    made.slots[KEY.uid].grant = msgspec.structs.replace(
        GRANT, engine=msgspec.structs.replace(GRANT.engine, sharing=two)
    )
    made.host.engines = {KEY.uid: EngineStatus(KEY, EngineState.SERVING, lanes=(BUSY_LANE,))}
    made.step_all()
    assert (permit.lane, permit.until_ns) == (BUSY_LANE, 0), "nobody computes for a step"
    made.step_all()
    assert is_open(permit)
    assert made.slots[KEY.uid].is_computing(permit.until_ns - 1), "lent, whichever engine it is"
    made.on_tap_lost(time.monotonic_ns())
    assert permit.until_ns == 0


async def test_a_slot_with_one_engine_moves_no_permit_whatever_its_host_lists(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    made.host.engines = {KEY.uid: EngineStatus(KEY, EngineState.SERVING, lanes=(BUSY_LANE,))}
    made.step_all()
    assert permit.lane == FIRST_LANE
    assert is_open(permit)


async def test_short_chunks_reach_the_permit_of_an_engine_that_can_cut_them(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    envelope = made.replicas[POD].outcomes.experience.lessons.envelope
    for _ in range(20):
        envelope.note_next(0.35)
        for chunk_divisor, seconds in zip(CHUNK_DIVISORS, (0.06, 0.02), strict=True):
            envelope.note_stop(seconds, chunk_divisor)
    limited = msgspec.structs.replace(POLICY, ttft_milliseconds=400)
    follower = FollowerPod(PodUid("follower"), "elsewhere")
    group = ReplicaGroup(POD, "node", "127.0.0.1:1", (follower,))
    spread = msgspec.structs.replace(GRANT, engine=EngineSpec("fake", "m", ranks=2))
    for grant, groups in ((GRANT, (group,)), (spread, ())):
        made.on_reply(SyncReply(1, True, (GRANT,), (limited,)), time.monotonic())
        assert is_open(permit)
        assert permit.chunk_divisor == CHUNK_DIVISORS[-1]
        reported = SyncReply(1, True, (grant,), (limited,), groups=groups)
        made.on_reply(reported, time.monotonic())
        assert not is_open(permit), "other nodes' engines, or its ranks, keep whole chunks"
        assert made._verdicts[POD].reason is GateReason.NOT_CERTIFIED


async def test_the_owners_share_of_a_second_closes_the_permit_of_an_idle_replica(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    limited = msgspec.structs.replace(POLICY, max_compute_percent=30)
    made.on_reply(SyncReply(1, True, (GRANT,), (limited,)), time.monotonic())
    assert is_open(permit)
    now = time.monotonic_ns()
    assert permit.until_ns <= now + 300_000_000, "never further than what is left"
    spent = ((now - 300_000_000, now),)
    made.replicas[POD].compute = replace(made.replicas[POD].compute, spans=spent)
    permit.close_now()
    made.step_all()
    assert not is_open(permit)
    slot = made.slots[KEY.uid]
    assert slot.verdict.reason is GateReason.COMPUTE_LIMIT
    assert slot.gate_open, "a pause of a moment: routers go on sending turns"


async def test_a_lost_tap_closes(guard: tuple[Guard, Permit]) -> None:
    made, permit = guard
    made.step_all()
    assert permit.until_ns > 0
    made.on_tap_lost(time.monotonic_ns())
    assert permit.until_ns == 0


async def test_a_request_under_way_is_not_kept_when_the_tap_may_no_longer_be_heard(
    guard: tuple[Guard, Permit],
) -> None:
    """Its end would never be told, and the replica would look busy for ever."""
    made, _ = guard
    made.on_tap([Arrived(POD, 1, time.monotonic_ns(), "/generate")], time.monotonic_ns())
    assert made.replicas[POD].book.live
    figures = msgspec.structs.replace(POLICY, allowed_signals=(SignalSource.LOADS,))
    made.on_reply(SyncReply(1, True, (GRANT,), (figures,)), time.monotonic())
    made.match()
    assert not made.replicas[POD].book.live


async def test_every_tick_extends_the_permits_of_an_idle_replica(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    made.step_all()
    before_ns = permit.until_ns
    made._matched_s = time.monotonic()  # this tick matches nothing
    made._tick()
    assert permit.until_ns > before_ns > 0


async def test_a_lost_grant_closes_and_releases(guard: tuple[Guard, Permit]) -> None:
    made, permit = guard
    made.step_all()
    made.on_reply(SyncReply(1, True, (), (POLICY,)), time.monotonic())
    assert permit.until_ns == 0
    assert made.slots[KEY.uid].machine.phase.value == "Releasing"
    slot: GuardedSlot = made.slots[KEY.uid]
    assert slot.grant is None


async def test_what_the_operator_is_told(guard: tuple[Guard, Permit]) -> None:
    made, _ = guard
    made.step_all()
    request = made.request()
    (replica,) = request.replicas
    assert (replica.pod_uid, replica.running_requests, replica.refusal) == ("pod", 0, "")
    assert (replica.verified, replica.gpu_uuids) == (True, ("GPU-0",))
    (slot,) = request.slots
    assert (slot.slot, slot.state.value, slot.gate_open) == (KEY, "Syncing", True)
    assert request.capabilities["EngineHost"] == ""
    assert "--static-replicas" in request.capabilities["GpuOwnership"]


async def test_a_replica_that_no_slot_is_beside_is_judged_for_the_report_and_not_at_each_request(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, permit = guard
    made.step_all()
    made.on_reply(SyncReply(1, True, (), (POLICY,)), time.monotonic())
    judged: list[int] = []

    def count(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
        judged.append(now_ns)
        return judge(facts, limits, now_ns)

    monkeypatch.setattr(loop, "judge", count)
    now = time.monotonic_ns()
    made.on_tap([Arrived(POD, 1, now, "/generate"), health(1)], now)
    made.step_all()
    assert judged == []
    made.match()
    assert len(judged) == 1
    assert made.request().replicas[0].running_requests == 1
    made.on_reply(SyncReply(1, True, (GRANT,), (POLICY,)), time.monotonic())
    assert made.slots[KEY.uid].verdict.reason is GateReason.SIGNAL_MISSING
    made.on_tap([health(1)], time.monotonic_ns())
    made.step_all()
    assert made.slots[KEY.uid].verdict.reason is GateReason.SERVING_BUSY
    assert permit.until_ns == 0


@pytest.mark.parametrize(
    ("granted", "heard", "pause"),
    [
        (True, {}, 0.2),
        (False, {}, 1.0),
        (False, {"opaque": True}, 0.2),
        (False, None, 0.2),
    ],
    ids=["granted", "nothing is granted", "the tap cannot read it", "the tap is silent"],
)
async def test_an_unverified_replica_is_asked_often_while_its_figures_stand_in_for_the_tap(
    guard: tuple[Guard, Permit],
    monkeypatch: pytest.MonkeyPatch,
    granted: bool,
    heard: dict[str, bool] | None,
    pause: float,
) -> None:
    replica = guard[0].replicas[POD]
    replica.granted, replica.verification = granted, SignalVerification()
    if heard is None:
        replica.book.last_seen_ns -= 10**10
    else:
        replica.take(msgspec.structs.replace(health(), **heard), time.monotonic_ns())
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    async def compare() -> bool:
        return False

    replica.policy = msgspec.structs.replace(
        replica.policy, allowed_signals=(SignalSource.WIRE_TAP,)
    )
    with monkeypatch.context() as patch:
        patch.setattr(replica, "compare", compare)
        patch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await replica.poll()
    assert pauses == [pause]


async def test_a_pool_that_pauses_gives_everything_back(guard: tuple[Guard, Permit]) -> None:
    made, permit = guard
    made.step_all()
    paused = PoolPolicy("chat/pool", "Paused", {"a": "b"}, 1)
    made.on_reply(SyncReply(1, True, (GRANT,), (paused,)), time.monotonic())
    assert permit.until_ns == 0
    assert made.slots[KEY.uid].machine.phase.value == "Releasing"


async def test_a_gate_stays_shut_until_the_tap_tells_arrivals_at_once(
    guard: tuple[Guard, Permit],
) -> None:
    """Where nothing is lent the tap may hold them back, and a grant takes a moment to reach it."""
    made, permit = guard
    replica = made.replicas[POD]
    made.on_reply(SyncReply(1, True, (), (POLICY,)), time.monotonic())
    assert not replica.watch(followed=made._is_followed(POD)).at_once, "nothing is to be stopped"
    before = health()
    made.on_reply(SyncReply(1, True, (GRANT,), (POLICY,)), time.monotonic())
    assert replica.watch(followed=made._is_followed(POD)).at_once
    for late in (before, msgspec.structs.replace(health(), at_once=False)):
        made.on_tap([late], time.monotonic_ns())
        made.step_all()
        assert not is_open(permit)
        assert made._verdicts[POD].reason is GateReason.SIGNAL_MISSING
        assert made.request().replicas[0].signal is SignalSource.WIRE_TAP, "heard all the same"
    made.on_tap([health()], time.monotonic_ns())
    made.step_all()
    assert made._verdicts[POD].open


def at_once(made: Guard) -> bool:
    """Whether the tap is asked to tell arrivals as they happen."""
    return made.replicas[POD].at_once


async def test_beside_a_gate_that_no_request_opens_the_tap_may_wait_until_that_is_over(
    guard: tuple[Guard, Permit],
) -> None:
    made, permit = guard
    replica = made.replicas[POD]
    replica.verification = SignalVerification()
    made.match()
    assert not is_open(permit)
    assert at_once(made), "it was open when somebody looked"
    for _ in range(2):
        made.match()
        assert not at_once(made)
        made.on_tap([msgspec.structs.replace(health(), at_once=False)], time.monotonic_ns())
        made.step_all()
        assert made._verdicts[POD].reason is GateReason.SIGNAL_UNVERIFIED, "and stays so"
    replica.verification = SignalVerification(verified=True)
    made.step_all()
    assert made._verdicts[POD].reason is GateReason.SIGNAL_MISSING, "an arrival may wait yet"
    made.match()
    assert at_once(made)
    made.step_all()
    assert not made._verdicts[POD].open
    made.on_tap([health()], time.monotonic_ns())
    made.step_all()
    assert made._verdicts[POD].open


async def test_a_replica_that_may_sleep_is_heard_at_once_although_its_gate_is_shut(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    made.replicas[POD].verification = SignalVerification()
    made.step_all()
    assert not made._may_close(POD)
    sleepy = msgspec.structs.replace(POLICY, sleep=SleepTerms(1 << 20))
    made.on_reply(SyncReply(1, True, (GRANT,), (sleepy,)), time.monotonic())
    assert made._verdicts[POD].reason is GateReason.SIGNAL_UNVERIFIED
    assert made._may_close(POD)


@pytest.mark.parametrize("rests", [True, False])
async def test_a_replica_at_rest_is_stepped_at_every_second_tick(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    made, _ = guard
    if rests:
        made.replicas[POD].verification = SignalVerification()
    made.step_all()
    monkeypatch.setattr(GuardedSlot, "is_at_rest", rests)
    judged: list[int] = []

    def count(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
        judged.append(now_ns)
        return judge(facts, limits, now_ns)

    monkeypatch.setattr(loop, "judge", count)
    made.step_all(resting=False)
    assert len(judged) == (0 if rests else 1)
    made.step_all()
    assert len(judged) == (1 if rests else 2)


async def test_tokens_are_told_one_by_one_only_before_lending_may_be_paced_by_them(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    replica = made.replicas[POD]
    assert not replica.watch(followed=True).closely, "no limit, nothing to pace by"
    limited = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, max_increase_percent=5)
    replica.update(replica.pod, limited)
    assert not replica.watch(followed=True).closely, "idle"
    now = time.monotonic_ns()
    replica.gaps.note(busy=True, now_ns=now - 60 * 10**9)
    assert replica.watch(followed=True).closely, "never idle"
    replica.granted = False
    assert not replica.watch(followed=True).closely, "nothing is beside it that could be paced"
    replica.granted = True
    assert replica.watch(followed=True).closely
    replica.gaps.note(busy=False, now_ns=now - 10**9)
    assert replica.watch(followed=True).closely, "idle for a fifth of the time: not yet"
    replica.gaps.note(busy=True, now_ns=now)
    replica.gaps.note(busy=False, now_ns=now - 60 * 10**9)
    assert not replica.watch(followed=True).closely


async def test_first_tokens_are_told_at_once_only_where_a_gate_was_shut_for_one_lately(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    replica = made.replicas[POD]
    limited = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, max_increase_percent=5)
    replica.update(replica.pod, limited)
    now = time.monotonic_ns()
    replica.gaps.note(busy=True, now_ns=now - 60 * 10**9)
    watch = replica.watch(followed=True)
    assert (watch.closely, watch.firsts) == (True, True), "nobody knows yet"
    replica.closely_ns -= 6 * 10**9
    assert not replica.watch(followed=True).firsts
    replica.take(Arrived(POD, 1, now, "/generate"), now)
    made._step_replica(POD, now + 10**7, now)
    assert made._verdicts[POD].reason is GateReason.NO_PREFILL_SLACK, "its first token opens it"
    assert replica.watch(followed=True).firsts


@pytest.mark.parametrize(
    ("event", "again_ns", "looks"),
    [
        (Progress(POD, 1, 1, 2), 5, False),
        (Progress(POD, 1, 1, 2), 0, True),
        (FirstToken(POD, 1, 1), 5, True),
        (Sized(POD, 1, 100, "/generate"), 5, True),
        (health(1), 5, False),
    ],
)
async def test_paced_lending_is_judged_at_its_edges_and_not_at_every_token(
    guard: tuple[Guard, Permit],
    monkeypatch: pytest.MonkeyPatch,
    event: TapEvent,
    again_ns: int,
    looks: bool,
) -> None:
    """Closed and with no edge to come, the verdict waits for the tokens themselves."""
    made, _ = guard
    slack = Slack(None, 0.1, 0.5)
    made._verdicts[POD] = GateVerdict(False, GateReason.SLACK, again_ns=again_ns, slack=slack)
    looked: list[str] = []
    monkeypatch.setattr(made, "_step_replica", lambda uid, *_: looked.append(uid))
    made.on_tap([Arrived(POD, 1, 1, "/generate")], 1)
    looked.clear()
    made.on_tap([event], 1)
    assert bool(looked) is looks


@pytest.mark.parametrize(
    ("meanwhile", "steps"), [("nothing", 1), ("the stop button", 2), ("a match", 2)]
)
async def test_the_heartbeat_that_brings_an_arrival_steps_its_replica_once(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch, meanwhile: str, steps: int
) -> None:
    made, _ = guard
    made._matched_s = 0.0 if meanwhile == "a match" else time.monotonic()
    if meanwhile == "the stop button":
        made.rundir.stop.touch()
    monkeypatch.setattr(made._pulse, "beat", made._tick)
    stepped: list[str] = []
    step = made._step_replica

    def note(uid: PodUid, now_ns: int, arrival_ns: int) -> None:
        stepped.append(uid)
        step(uid, now_ns, arrival_ns)

    monkeypatch.setattr(made, "_step_replica", note)
    now = time.monotonic_ns()
    made.on_tap([Arrived(POD, 1, now, "/generate"), health(1)], now)
    assert stepped == [POD] * steps
    stepped.clear()
    made.on_tap([health(1)], now)
    assert stepped == [POD], "a heartbeat without news is a tick"


async def test_an_unverified_tap_is_compared_often_and_figures_beside_it_are_read_seldom(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = guard[0].replicas[POD]
    replica.granted = True
    asked: list[str] = []

    async def loads() -> Figures:
        asked.append("loads")
        return Figures()

    async def compare() -> bool:
        asked.append("compare")
        return False

    rest = asyncio.sleep

    async def sleep(seconds: float) -> None:
        assert seconds == 0.2
        if len(asked) > 8:
            raise asyncio.CancelledError
        await rest(0)

    found: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(replica.reader, "loads", loads)
        patch.setattr(replica, "compare", compare)
        patch.setattr(asyncio, "sleep", sleep)
        for verified in (None, True):
            # Verified, and a request whose end may not show: figures say when it is over.
            replica.verification = SignalVerification(verified=verified)
            replica.take(Arrived(POD, 1, 1, "/generate", opaque=True), time.monotonic_ns())
            replica.take(health(1), time.monotonic_ns())
            asked.clear()
            with pytest.raises(asyncio.CancelledError):
                await replica.poll()
            found.append(asked.count("loads"))
    assert found == [1, 5]


async def test_permits_that_open_together_are_told_to_the_host_once(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = guard[0].host
    rings: list[Path] = []
    monkeypatch.setattr("rose_engines.node.doorbell.ring", rings.append)
    for _ in range(3):
        host.ring_soon()
    assert not rings, "the others are still to be stepped"
    await asyncio.sleep(0)
    assert len(rings) == 1
    host.ring()
    assert len(rings) == 2, "what closes is told inside the call"
    host.ring_soon()
    await asyncio.sleep(0)
    assert len(rings) == 3


async def test_a_slot_rests_while_its_engine_is_held_and_no_sooner(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    slot = made.slots[KEY.uid]
    stirred: list[bool] = []
    made._pulse.stir = lambda: stirred.append(True)  # type: ignore[method-assign]
    made.step_all()
    rests = [slot.is_at_rest]
    now = time.monotonic_ns()
    made.on_tap([Arrived(POD, 1, now, "/generate")], now)
    rests.append(slot.is_at_rest)
    slot._hold.confirmed = True
    rests.append(slot.is_at_rest)
    stirred.clear()
    made.step_all()
    assert rests == [False, False, True], "open, asked to hold, held"
    assert not stirred
    made.on_tap([Ended(POD, 1, now, 1, 200, EndKind.COMPLETE)], time.monotonic_ns())
    assert stirred, "the permit wants to be extended"


@pytest.mark.parametrize("status", [None, EngineStatus(KEY, EngineState.GONE)])
async def test_a_slot_without_an_engine_rests_though_no_host_was_told_of_its_weights(
    guard: tuple[Guard, Permit], status: EngineStatus | None
) -> None:
    """It may not start, so nobody will be told."""
    made, _ = guard
    slot = made.slots[KEY.uid]
    slot.machine, slot._ordered_weights = SlotMachine(phase=SlotPhase.PRESENT), None
    slot._hold.confirmed = True
    assert not slot.is_at_rest, "an engine has to hear of them"
    slot.machine = SlotMachine()
    made.host.engines = {} if status is None else {KEY.uid: status}
    assert slot.is_at_rest


async def test_runs_that_a_lease_gains_or_loses_reach_the_host_of_a_running_engine(
    guard: tuple[Guard, Permit], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, permit = guard
    slot, sent, failing = made.slots[KEY.uid], list[EnsureEngine](), [True]

    async def ensure(order: EnsureEngine) -> None:
        sent.append(order)
        if failing:
            failing.clear()
            raise WireError("the host is busy")

    async def until_sent(count: int) -> None:
        async with asyncio.timeout(30):
            while len(sent) < count:
                made.step_all()
                await asyncio.sleep(0.02)

    monkeypatch.setattr(made.host, "ensure", ensure)
    slot._limits = replace(slot._limits, ensure_repeat_ns=50_000_000)
    made.step_all()
    await asyncio.sleep(0.1)
    made.step_all()
    assert not sent, "nothing is new"
    held = slot._hold.confirmed
    for others in (("b",), ()):
        weights = WeightSource("h:1", "run", others=others)
        grant = msgspec.structs.replace(GRANT, weights=weights)
        made.on_reply(SyncReply(1, True, (grant,), (POLICY,)), time.monotonic())
        await until_sent(2 if others else 3)  # the first call failed, and was made again
        assert sent[-1].weights.others == others
        assert (sent[-1].slot, sent[-1].engine) == (KEY, GRANT.engine)
    count = len(sent)
    await asyncio.sleep(0.2)
    made.step_all()
    assert len(sent) == count, "the host has taken it over"
    assert is_open(permit)
    assert slot._hold.confirmed is held, "the engine that goes on is held as before"


@pytest.mark.parametrize(("policy", "reuses"), [("Keep", False), ("Reuse", True)])
async def test_the_router_hears_whether_keys_are_reused(
    guard: tuple[Guard, Permit], policy: str, reuses: bool
) -> None:
    made, _ = guard
    slot = made.slots[KEY.uid]
    engine = msgspec.structs.replace(GRANT.engine, kv_policy=policy)
    slot.grant = msgspec.structs.replace(GRANT, engine=engine, router="127.0.0.1:1")
    slot._update_router()
    assert slot._router.last_update is not None
    assert slot._router.last_update.reuses_kv is reuses
    await slot.detach()


async def test_the_router_hears_what_co_running_has_cost_on_this_node(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    slot = made.slots[KEY.uid]
    slot.grant = msgspec.structs.replace(GRANT, router="127.0.0.1:1")
    lessons = made.replicas[POD].outcomes.experience.lessons
    for number in range(100):
        stop_s = 0.01 * (number % 2)
        lessons.stopping = lessons.stopping.learn(1024, 0.02 + 0.2 * stop_s, stop_s, 0.02, 0.02)
    made.step_all()
    assert slot._router.last_update is not None
    assert slot._router.last_update.slowdown == pytest.approx(1.25, abs=0.1)
    await slot.detach()


async def test_what_became_of_the_engine_is_in_the_flight_recorder_once(
    guard: tuple[Guard, Permit],
) -> None:
    made, _ = guard
    failed = EngineStatus(KEY, EngineState.FAILED, reason=HostReason.LIMIT_REACHED)
    for status in (failed, failed, EngineStatus(KEY, EngineState.SERVING)):
        made.host.engines = {KEY.uid: status}
        made.step_all()
    found = [entry[3] for entry in made.recorder.entries() if entry[2] == "engine"]
    assert [(one["state"], one["reason"]) for one in found][-2:] == [
        ("Failed", "LimitReached"),
        ("Serving", ""),
    ]


async def test_a_lease_with_a_store_of_keys_has_a_secret_for_those_that_leave_the_node(
    guard: tuple[Guard, Permit],
) -> None:
    slot = guard[0].slots[KEY.uid]
    kept = msgspec.structs.replace(GRANT.engine, kv_store_bytes=1 << 30)
    known = msgspec.structs.replace(
        GRANT, engine=kept, proof=RouterProof("token of the lease"), lease_uid="uid-1"
    )
    order = slot._order(known)
    assert order.kv_secret == pool_secret("token of the lease", "uid-1") != ""
    assert order.lease_uid == "uid-1"
    anew = msgspec.structs.replace(known, lease_uid="uid-2")  # under the same name
    assert slot._order(anew).kv_secret not in {"", order.kv_secret}
    assert slot._order(msgspec.structs.replace(known, lease_uid="")).kv_secret == ""
    assert slot._order(msgspec.structs.replace(known, proof=RouterProof())).kv_secret == ""
    assert slot._order(msgspec.structs.replace(known, engine=GRANT.engine)).kv_secret == ""
