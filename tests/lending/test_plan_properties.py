"""What holds for every plan, whatever the world looks like."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.api import Reason
from rose_core.api.poollending import Spread
from rose_core.lending import (
    BreakerTerms,
    Lend,
    SlotRelease,
    Snapshot,
    plan,
)
from tests.lending.world import NOW, lease, pool, replica, slot, world


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    replicas = [
        replica(
            f"r{number}",
            ready=draw(st.booleans()),
            stopped=draw(st.sampled_from([False, False, True])),
            kv_permille=draw(st.one_of(st.none(), st.integers(0, 1000))),
            gpus=(f"G{draw(st.integers(0, 6))}",),
            node=f"n{draw(st.integers(0, 2))}",
            zone=draw(st.sampled_from(["", "z1", "z2"])),
            cordoned=draw(st.sampled_from([False, False, False, True])),
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
            weight=draw(st.integers(1, 3)),
            preempts=draw(st.booleans()),
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
        max_replicas_percent=draw(st.integers(0, 100)),
        min_unlent_replicas=draw(st.integers(0, 3)),
        per_node=draw(st.one_of(st.none(), st.integers(1, 2))),
        per_zone_percent=draw(st.integers(1, 100)),
        per_lease_percent=draw(st.integers(1, 100)),
        per_minute=draw(st.one_of(st.none(), st.integers(1, 3))),
        spread=draw(st.sampled_from(list(Spread))),
        breaker=BreakerTerms(missed=draw(st.sampled_from([False, False, True]))),
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
    # A GPU is told by its node and name: static lists give each node a "G0".
    gpus = [(one.node, gpu) for one in snapshot.slots for gpu in one.gpus]
    # A new loan shares its GPU with nothing, not even with a slot that is leaving.
    fresh = [(one.node, gpu) for one in new for gpu in one.gpus]
    assert not set(fresh) & set(gpus)
    assert len(fresh) == len(set(fresh))
    used = [(one.node, gpu) for one in staying for gpu in one.gpus]
    assert len(used) == len(set(used))
    limits = snapshot.pools[0]
    total = len(snapshot.replicas)
    most = max(
        0, min(total * limits.max_replicas_percent // 100, total - limits.min_unlent_replicas)
    )
    assert len(staying) + len(new) <= most
    assert new == [] or not limits.breaker.missed
    assert limits.per_minute is None or len(new) <= limits.per_minute
    assert not any(one.cordoned for one in new)
    for node in {one.node for one in new}:
        on_node = sum(one.node == node for one in snapshot.slots)
        on_node += sum(one.node == node for one in new)
        assert limits.per_node is None or on_node <= limits.per_node
    for zone in {one.zone for one in new}:
        size = sum(one.zone == zone for one in snapshot.replicas)
        lent_there = [one for one in snapshot.slots if by_uid[one.replica].zone == zone]
        in_zone = len(lent_there) + sum(one.zone == zone for one in new)
        assert in_zone <= size * limits.per_zone_percent // 100
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
    now, rests = NOW, 0
    for _ in range(40):
        done = plan(snapshot, now)
        rests = 0 if done.lends or done.releases else rests + 1
        if rests == 2:  # once may be too early: a slot is rebalanced only when it has lived
            return
        snapshot = carried_out(snapshot, done.releases, done.lends, now)
        now += 1000
        snapshot = replace(snapshot, memory=done.memory)
    raise AssertionError("the planner does not come to rest")


def carried_out(
    snapshot: Snapshot, releases: tuple[SlotRelease, ...], lends: tuple[Lend, ...], now: float
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
