"""The pool planner: pure, so every rule is a table or a property."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.api import Reason
from rose_core.lending import (
    Lease,
    Lend,
    Memory,
    Policy,
    Pool,
    Release,
    Replica,
    Slot,
    Snapshot,
    Window,
    plan,
)

NOW = 1_800_000_000.0
POLICY = Policy()
ALL_SIGNALS = frozenset({"WireTap", "Loads"})


def pool(**changes: Any) -> Pool:  # noqa: ANN401  # any field
    return replace(Pool("s/chat", 100, 0, ALL_SIGNALS), **changes)


def replica(name: str, **changes: Any) -> Replica:  # noqa: ANN401  # any field
    made = Replica(
        uid=name,
        name=f"s/{name}",
        node=f"node-{name}",
        pool="s/chat",
        gpus=(f"GPU-{name}",),
        ready=True,
        stopped=False,
        signal="WireTap",
        verified=True,
        kv_permille=100,
        age_seconds=1.0,
    )
    return replace(made, **changes)


def lease(name: str, **changes: Any) -> Lease:  # noqa: ANN401  # any field
    return replace(Lease(f"r/{name}", f"uid-{name}", "s/chat", 0, NOW - 1000, 1, 1), **changes)


def slot(of: Lease, on: Replica, **changes: Any) -> Slot:  # noqa: ANN401  # any field
    made = Slot(
        name=f"{of.uid}-{on.uid}",
        uid=f"slot-{of.uid}-{on.uid}",
        lease=of.key,
        lease_uid=of.uid,
        pool=of.pool,
        node=on.node,
        replica=on.uid,
        gpus=on.gpus,
        created=NOW - 500,
    )
    return replace(made, **changes)


def world(
    replicas: list[Replica],
    leases: list[Lease],
    slots: list[Slot] | None = None,
    pools: list[Pool] | None = None,
    **changes: Any,  # noqa: ANN401  # any field
) -> Snapshot:
    """Replicas have settled long ago unless the test says otherwise."""
    made = Snapshot(
        pools=tuple([pool()] if pools is None else pools),
        replicas=tuple(replicas),
        leases=tuple(leases),
        slots=tuple(slots or ()),
        silence={one.node: one.age_seconds for one in replicas},
        reporting=frozenset(one.node for one in replicas),
        memory=Memory(fit_since={one.uid: NOW - 1000 for one in replicas}),
    )
    return replace(made, **changes)


def lent(snapshot: Snapshot, now: float = NOW) -> list[tuple[str, str]]:
    return [(one.lease, one.replica) for one in plan(snapshot, now).lends]


def released(snapshot: Snapshot, now: float = NOW) -> dict[str, Reason]:
    return {one.slot: one.reason for one in plan(snapshot, now).releases}


def test_the_replica_with_the_lowest_recent_kv_use_is_lent_first() -> None:
    replicas = [
        replica("a", kv_permille=500),
        replica("b", kv_permille=20),
        replica("c", kv_permille=None),
    ]
    assert lent(world(replicas, [lease("x")])) == [("r/x", "b")]
    assert lent(world([replicas[2], replicas[0]], [lease("x")])) == [("r/x", "a")]


def test_priority_comes_before_age_and_minimums_before_maximums() -> None:
    old = lease("old", created=NOW - 900, min_slots=1, max_slots=3)
    strong = lease("strong", created=NOW - 10, priority=5, min_slots=1, max_slots=3)
    one = [replica("a")]
    three = [replica("a"), replica("b"), replica("c")]
    assert lent(world(one, [old, strong])) == [("r/strong", "a")]
    assert lent(world(three, [old, strong])) == [
        ("r/strong", "a"),
        ("r/old", "b"),
        ("r/strong", "c"),
    ]


def test_of_equal_leases_the_older_is_served() -> None:
    young, old = lease("a", created=NOW - 10), lease("b", created=NOW - 20)
    assert lent(world([replica("x")], [young, old])) == [("r/b", "x")]


REFUSED: dict[Reason, dict[str, Any]] = {
    Reason.TELEMETRY_STALE: {"age_seconds": 60.0},
    Reason.STOP_REQUESTED: {"stopped": True},
    Reason.REPLICA_NOT_READY: {"ready": False},
    Reason.INSUFFICIENT_MEMORY: {"refusal": Reason.INSUFFICIENT_MEMORY},
    Reason.NO_GPU: {"gpus": ()},
    Reason.SIGNAL_MISSING: {"signal": None},
    Reason.SIGNAL_NOT_ALLOWED: {"signal": "Metrics"},
    Reason.SIGNAL_NOT_VERIFIED: {"verified": None},
    Reason.KV_USE_TOO_HIGH: {"kv_permille": 950},
    Reason.GPU_IN_USE: {"occupied": True},
}


def test_every_reason_not_to_lend_is_named_with_its_count() -> None:
    for reason, changes in REFUSED.items():
        done = plan(world([replica("a", **changes), replica("b", **changes)], [lease("x")]), NOW)
        assert done.lends == ()
        outcome = done.outcomes["r/x"]
        assert outcome.reason is Reason.NO_REPLICA_QUALIFIES
        assert f"2 replicas: 2 {reason}" in outcome.message


def test_engine_figures_need_no_second_count_but_a_contradiction_refuses() -> None:
    unverified = replica("a", signal="Loads", verified=None)
    assert lent(world([unverified], [lease("x")])) == [("r/x", "a")]
    assert lent(world([replace(unverified, verified=False)], [lease("x")])) == []


def test_one_gpu_of_two_replicas_is_not_lent() -> None:
    both = [replica("a", gpus=("G",)), replica("b", gpus=("G",))]
    done = plan(world(both, [lease("x")]), NOW)
    assert done.lends == ()
    assert {one.reason for one in done.verdicts.values()} == {Reason.SPANS_REPLICAS}


def test_the_pools_limits_bound_loans() -> None:
    four = [replica(name) for name in "abcd"]
    wants = [lease("x", max_slots=9)]
    assert len(lent(world(four, wants, pools=[pool(max_replicas_percent=50)]))) == 2
    assert len(lent(world(four, wants, pools=[pool(max_replicas_percent=49)]))) == 1
    assert len(lent(world(four, wants, pools=[pool(min_unlent_replicas=3)]))) == 1
    assert lent(world(four, wants, pools=[pool(max_replicas_percent=0)])) == []


def test_a_lowered_limit_takes_the_youngest_slot_of_the_weakest_lease() -> None:
    three = [replica(name) for name in "abc"]
    weak, strong = lease("weak", max_slots=2), lease("strong", priority=9)
    slots = [
        slot(weak, three[0], created=NOW - 300),
        slot(weak, three[1], created=NOW - 200),
        slot(strong, three[2], created=NOW - 100),
    ]
    snapshot = world(three, [weak, strong], slots, pools=[pool(min_unlent_replicas=1)])
    assert released(snapshot) == {slots[1].name: Reason.POOL_LIMIT_REACHED}


def test_silent_nodes_and_a_restart_do_not_look_like_a_smaller_pool() -> None:
    here, away = replica("a"), replica("b")
    one = lease("x")
    limits = [pool(max_replicas_percent=50, remembered_replicas=2)]
    only_here = world([here], [one], [slot(one, here)], pools=limits)
    assert released(only_here) == {}
    only_away = world([away], [one], [slot(one, here)], pools=[pool(max_replicas_percent=50)])
    assert released(only_away) == {}


def test_hysteresis_a_replica_settles_first_and_a_freed_gpu_rests() -> None:
    snapshot = world([replica("a")], [lease("x")], memory=Memory())
    first = plan(snapshot, NOW)
    assert first.lends == ()
    assert first.outcomes["r/x"].verdicts[0].reason is Reason.SETTLING
    later = replace(snapshot, memory=first.memory)
    assert lent(later, NOW + POLICY.settle_seconds) == [("r/x", "a")]

    freed = Memory(fit_since={"a": NOW - 1000}, freed_at={"GPU-a": NOW - 1})
    assert lent(replace(snapshot, memory=freed)) == []
    assert lent(replace(snapshot, memory=freed), NOW + POLICY.cool_seconds) == [("r/x", "a")]


def test_a_slot_is_released_for_every_lost_cause() -> None:
    a, one = replica("a"), lease("x")
    held = [slot(one, a)]
    cases = {
        Reason.LEASE_DELETED: world([a], [], held),
        Reason.POOL_NOT_LENDING: world([a], [replace(one, refusal=Reason.POOL_NOT_LENDING)], held),
        Reason.UNKNOWN_POOL: world([a], [one], held, pools=[]),
        Reason.STOP_REQUESTED: world([replace(a, stopped=True)], [one], held),
        Reason.LEASE_SHRUNK: world([a], [replace(one, min_slots=0, max_slots=0)], held),
        Reason.REPLICA_GONE: world(
            [], [one], held, silence={a.node: 1}, reporting=frozenset({a.node})
        ),
        Reason.TELEMETRY_STALE: world([], [one], held, silence={a.node: 301.0}),
    }
    for reason, snapshot in cases.items():
        assert released(snapshot) == {held[0].name: reason}


def test_a_lease_made_anew_under_the_same_name_does_not_inherit_slots() -> None:
    a, one = replica("a"), lease("x")
    again = replace(one, uid="uid-other")
    assert released(world([a], [again], [slot(one, a)])) == {
        slot(one, a).name: Reason.LEASE_DELETED
    }


def test_an_unfit_replica_is_waited_for_with_patience() -> None:
    a, one = replica("a", ready=False), lease("x")
    held = slot(one, a)
    snapshot = world([a], [one], [held])
    first = plan(snapshot, NOW)
    assert first.releases == ()
    later = replace(snapshot, memory=first.memory)
    assert released(later, NOW + POLICY.patience_seconds - 1) == {}
    late = NOW + POLICY.patience_seconds
    assert released(later, late) == {held.name: Reason.REPLICA_NOT_READY}
    recovered = replace(later, replicas=(replace(a, ready=True),))
    assert plan(recovered, late).memory.unfit_since == {}


def test_what_our_own_slot_causes_is_no_reason_to_take_it_back() -> None:
    one = lease("x")
    for changes in (
        {"kv_permille": 990},
        {"refusal": Reason.INSUFFICIENT_MEMORY},
        {"occupied": True},
    ):
        a = replica("a", **changes)
        memory = plan(world([a], [one], [slot(one, a)]), NOW).memory
        snapshot = world([a], [one], [slot(one, a)], memory=memory)
        assert released(snapshot, NOW + 1000) == {}


def test_of_two_slots_on_one_gpu_the_older_stays() -> None:
    a = replica("a")
    first, second = lease("x"), lease("y")
    old, young = slot(first, a), slot(second, a, created=NOW - 1)
    assert released(world([a], [first, second], [old, young])) == {
        young.name: Reason.DUPLICATE_SLOT
    }


def test_a_gpu_is_lent_again_only_after_its_slot_object_is_gone() -> None:
    a, one, two = replica("a"), lease("x", max_slots=0, min_slots=0), lease("y")
    leaving = slot(one, a, released=True)
    snapshot = world([a], [one, two], [leaving])
    done = plan(snapshot, NOW)
    assert done.lends == ()
    assert done.outcomes["r/y"].verdicts[0].reason is Reason.GPU_IN_USE


def test_a_stronger_lease_below_its_minimum_takes_one_settled_slot() -> None:
    a, b = replica("a"), replica("b")
    weak = lease("weak", max_slots=2)
    strong = lease("strong", priority=1)
    held = [slot(weak, a), slot(weak, b, created=NOW - 100)]
    assert released(world([a, b], [weak, strong], held)) == {held[1].name: Reason.PREEMPTED}
    equal = replace(strong, priority=0)
    assert released(world([a, b], [weak, equal], held)) == {}
    fresh = [replace(one, created=NOW - 1) for one in held]
    assert released(world([a, b], [weak, strong], fresh)) == {}
    going = [held[0], replace(held[1], released=True)]
    assert released(world([a, b], [weak, strong], going)) == {}


def test_time_windows_may_cross_midnight() -> None:
    # 2027-01-15 08:00 UTC is a Friday.
    friday_8 = 1_800_000_000.0
    hour = 3600.0
    night = Window(frozenset({3}), 20 * 60, 9 * 60)  # starts on Thursday
    a, one = replica("a"), lease("x")
    for now, is_open in (
        (friday_8, True),
        (friday_8 + hour, False),
        (friday_8 - 12 * hour, True),
        (friday_8 + 12 * hour, False),
    ):
        settled = Memory(fit_since={"a": 0.0})
        snapshot = world([a], [one], pools=[pool(windows=(night,))], memory=settled)
        assert bool(lent(snapshot, now)) is is_open
        held = world([a], [one], [slot(one, a)], pools=[pool(windows=(night,))])
        expected = {} if is_open else {slot(one, a).name: Reason.OUTSIDE_TIME_WINDOW}
        assert released(held, now) == expected


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    replicas = [
        replica(
            f"r{number}",
            ready=draw(st.booleans()),
            stopped=draw(st.sampled_from([False, False, True])),
            kv_permille=draw(st.one_of(st.none(), st.integers(0, 1000))),
            gpus=(f"G{draw(st.integers(0, 6))}",),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    leases = [
        lease(
            f"l{number}",
            priority=draw(st.integers(-2, 2)),
            min_slots=draw(st.integers(0, 2)),
            max_slots=draw(st.integers(2, 4)),
            refusal=draw(st.sampled_from([None, None, Reason.UNKNOWN_STORE])),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    owners = [*leases, lease("gone")]
    slots = [
        slot(
            draw(st.sampled_from(owners)),
            one,
            name=f"slot-{one.uid}",
            uid=f"slot-{one.uid}",
            created=NOW - draw(st.integers(0, 1000)),
            released=draw(st.booleans()),
        )
        for one in replicas
        if draw(st.booleans())
    ]
    limits = pool(
        max_replicas_percent=draw(st.integers(0, 100)), min_unlent_replicas=draw(st.integers(0, 3))
    )
    return world(replicas, leases, slots, pools=[limits])


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_no_plan_breaks_a_limit_or_shares_a_gpu(snapshot: Snapshot) -> None:
    done = plan(snapshot, NOW)
    leaving = {release.slot for release in done.releases}
    by_uid = {one.uid: one for one in snapshot.replicas}
    staying = [one for one in snapshot.slots if not one.released and one.name not in leaving]
    new = [by_uid[one.replica] for one in done.lends]
    gpus = [gpu for one in snapshot.slots for gpu in one.gpus]
    # A new loan shares its GPU with nothing, not even with a slot that is leaving.
    fresh = [gpu for one in new for gpu in one.gpus]
    assert not set(fresh) & set(gpus)
    assert len(fresh) == len(set(fresh))
    used = [gpu for one in staying for gpu in one.gpus]
    assert len(used) == len(set(used))
    limits = snapshot.pools[0]
    total = len(snapshot.replicas)
    most = max(
        0, min(total * limits.max_replicas_percent // 100, total - limits.min_unlent_replicas)
    )
    assert len(staying) + len(new) <= most
    for one in snapshot.leases:
        held = sum(s.lease == one.key for s in staying) + sum(
            d.lease == one.key for d in done.lends
        )
        assert held == done.outcomes[one.key].granted
        assert held <= one.max_slots
        assert one.refusal is None or held == 0


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_carrying_a_plan_out_reaches_rest(snapshot: Snapshot) -> None:
    now = NOW
    for _ in range(12):
        done = plan(snapshot, now)
        if not done.lends and not done.releases:
            break
        snapshot = carried_out(snapshot, done.releases, done.lends, now)
        now += 1000
        snapshot = replace(snapshot, memory=done.memory)
    else:
        raise AssertionError("the planner does not come to rest")
    assert plan(snapshot, now + 1000).releases == ()


def carried_out(
    snapshot: Snapshot, releases: tuple[Release, ...], lends: tuple[Lend, ...], now: float
) -> Snapshot:
    leaving = {release.slot for release in releases}
    leases = {one.key: one for one in snapshot.leases}
    replicas = {one.uid: one for one in snapshot.replicas}
    stay = [one for one in snapshot.slots if one.name not in leaving and not one.released]
    made = [
        slot(
            leases[one.lease],
            replicas[one.replica],
            created=now,
            name=f"{one.lease}-{one.replica}-{now}",
        )
        for one in lends
    ]
    return replace(snapshot, slots=(*stay, *made))
