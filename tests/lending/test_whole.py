"""Whole replicas: last, in a trough, counted as if no sleeper ever woke, back before the peak."""

from dataclasses import replace
from typing import Any

import pytest

from rose_core.api import Reason
from rose_core.identity import PodUid, SlotUid
from rose_core.lending import (
    BreakerTerms,
    EngineNeeds,
    LoadOutlook,
    PoolTerms,
    Replica,
    Snapshot,
    WholeTerms,
    plan,
)
from rose_core.lending.forecast import UsualLoad, observe, outlook
from tests.lending.test_forecast import DAY, HALF_HOUR, MIDNIGHT, busy, learned
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world

FULL = {"refusal": Reason.INSUFFICIENT_MEMORY}
WANTS = lease("a", min_slots=0, max_slots=10)
TERMS = WholeTerms(max_asleep=4, min_awake=1, max_busy_permille=400)


def trough(peak: int = 100, **changes: Any) -> PoolTerms:  # noqa: ANN401  # any field
    return replace(pool(outlook=LoadOutlook(peak, HALF_HOUR, 500), whole=TERMS), **changes)


def full(count: int, **changes: Any) -> list[Replica]:  # noqa: ANN401  # any field
    return [replica(f"f{number}", **FULL | changes) for number in range(count)]


def asleep(count: int, terms: PoolTerms, *, of: int = 4) -> Snapshot:
    """So many of the replicas are lent whole: drained, so not Ready."""
    replicas = full(of)
    down = [replace(one, ready=False, occupied=True) for one in replicas[:count]]
    slots = [slot(WANTS, one, whole=True, created=NOW - n) for n, one in enumerate(down)]
    return world(down + replicas[count:], [WANTS], slots, [terms])


def wholes(snapshot: Snapshot) -> list[str]:
    return [one.replica for one in plan(snapshot, NOW).lends if one.whole]


def test_in_a_trough_a_replica_without_memory_to_lend_is_lent_whole() -> None:
    snapshot = world(full(4), [WANTS], pools=[trough()])
    assert len(wholes(snapshot)) == 2, "4 replicas at 110 permille within 400 need 2 awake"
    assert not wholes(world(full(4), [WANTS], pools=[pool()]))


def test_a_pod_of_a_group_never_sleeps_and_lacks_memory_all_the_same() -> None:
    pods = [replace(one, group=f"s/chat/{one.uid}") for one in full(4)]
    snapshot = world(pods, [WANTS], pools=[trough()])
    assert not wholes(snapshot)
    reported = plan(snapshot, NOW).members["s/chat"]
    assert {one.reason for one in reported} == {Reason.INSUFFICIENT_MEMORY}


def test_what_can_be_shared_is_lent_first_and_is_waited_for() -> None:
    shared = replica("s")
    snapshot = world([*full(3), shared], [replace(WANTS, max_slots=1)], pools=[trough()])
    assert lent(snapshot) == [("r/a", "s")]
    both = world([*full(3), shared], [replace(WANTS, max_slots=2)], pools=[trough()])
    made = plan(both, NOW).lends
    assert [one.whole for one in made] == [False, True]
    fresh = replace(both.memory, fit_since={**both.memory.fit_since, PodUid("s"): NOW})
    assert not plan(replace(both, memory=fresh), NOW).lends, "it is about to be lent"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outlook": None}, Reason.PEAK_EXPECTED),
        ({"outlook": LoadOutlook(100, HALF_HOUR, 500, learned=False)}, Reason.PEAK_EXPECTED),
        ({"outlook": LoadOutlook(400, HALF_HOUR, 900)}, Reason.PEAK_EXPECTED),
        ({"whole": replace(TERMS, min_awake=4)}, Reason.PEAK_EXPECTED),
        ({"min_unlent_replicas": 4}, Reason.POOL_LIMIT_REACHED),
        ({"breaker": BreakerTerms(missed=True)}, Reason.BREAKER_OPEN),
    ],
    ids=str,
)
def test_without_a_trough_or_room_none_sleeps(changes: dict[str, Any], reason: Reason) -> None:
    snapshot = world(full(4), [WANTS], pools=[replace(trough(), **changes)])
    assert not wholes(snapshot)
    reported = plan(snapshot, NOW).members["s/chat"]
    assert {one.reason for one in reported} == {reason}


GIB = 1 << 30
HUGE = EngineNeeds({("s/chat", "node-x"): 764 * GIB})


def test_nobody_sleeps_for_an_engine_that_is_larger_than_the_gpu() -> None:
    known = full(4, gpu_bytes=80 * GIB, lendable_bytes=0)
    small = replace(WANTS, needs=EngineNeeds({("s/chat", "node-x"): 70 * GIB}))
    huge = replace(lease("b", min_slots=0, max_slots=10), needs=HUGE)
    assert len(wholes(world(known, [small], pools=[trough()]))) == 2
    done = plan(world(known, [huge], pools=[trough()]), NOW)
    assert not done.lends
    assert done.outcomes["r/b"].reason is Reason.INSUFFICIENT_MEMORY
    assert "the engine needs 764.0 GiB per GPU" in done.outcomes["r/b"].message
    both = plan(world(known, [huge, small], pools=[trough()]), NOW)
    assert {one.lease for one in both.lends} == {"r/a"}, "it keeps no other from its turn"
    unknown = full(4, lendable_bytes=0)
    assert wholes(world(unknown, [huge], pools=[trough()])), "the node says what it lacks"


def test_a_replica_that_sleeps_for_such_an_engine_is_woken_and_left_alone() -> None:
    snapshot = asleep(1, trough())
    slots = tuple(replace(one, lacks_memory=True) for one in snapshot.slots)
    replicas = tuple(replace(one, gpu_bytes=80 * GIB) for one in snapshot.replicas)
    leases = tuple(replace(one, needs=HUGE) for one in snapshot.leases)
    refused = replace(snapshot, slots=slots, replicas=replicas)
    assert not released(refused), "its size is not known"
    refused = replace(refused, leases=leases)
    assert released(refused) == {"uid-a-f0": Reason.INSUFFICIENT_MEMORY}
    assert not wholes(refused)


def test_no_more_sleep_than_the_owner_allows() -> None:
    snapshot = world(full(9), [WANTS], pools=[trough(10)])
    assert len(wholes(snapshot)) == TERMS.max_asleep


def test_replicas_that_are_down_carry_nothing() -> None:
    broken = [replica("x", ready=False), replica("y", stale=True)]
    assert not wholes(world([*full(2), *broken], [WANTS], pools=[trough()]))


def test_a_loan_stays_while_its_replica_is_not_ready_by_our_own_doing() -> None:
    long_ago = {SlotUid(f"slot-uid-a-f{n}"): NOW - 9999 for n in range(2)}
    snapshot = asleep(2, trough())
    kept = replace(snapshot, memory=replace(snapshot.memory, unfit_since=long_ago))
    assert not released(kept)
    shared = replace(kept, slots=tuple(replace(one, whole=False) for one in kept.slots))
    assert set(released(shared).values()) == {Reason.REPLICA_NOT_READY}


def test_between_lending_and_returning_lies_a_dead_band() -> None:
    """4 replicas: 3 awake are needed from 200 permille on, for a new loan from 182 on."""
    for peak, new, back in ((100, 1, 0), (190, 0, 0), (200, 0, 0), (201, 0, 1), (320, 0, 2)):
        snapshot = asleep(1 if new else 2, trough(peak))
        assert (len(wholes(snapshot)), len(released(snapshot))) == (new, back), peak


def test_sleepers_come_back_before_the_peak_of_a_learned_day() -> None:
    """Load 100 permille at 04:00, 900 at 16:00; never asleep when it is more than they carry."""
    shape, lead = learned(), 4 * HALF_HOUR
    at, held = MIDNIGHT + 4 * DAY, 0
    seen: set[int] = set()
    while at < MIDNIGHT + 5 * DAY:
        shape = observe(shape, busy(at), at)
        terms = replace(trough(), outlook=outlook(shape, at, lead, 500))
        snapshot = asleep(held, terms)
        held += len(wholes(snapshot)) - len(released(snapshot))
        seen.add(held)
        soon = at + lead - HALF_HOUR  # between two half hours a shape is a straight line
        assert 4 * max(busy(at), busy(soon)) <= (4 - held) * 400 or not held, at
        at += 300
    assert seen == {0, 1, 2}


def test_the_floor_counts_those_on_their_way_back_only_for_what_stays() -> None:
    snapshot = asleep(2, trough(201))
    leaving = (replace(snapshot.slots[0], released=True), snapshot.slots[1])
    assert not released(replace(snapshot, slots=leaving)), "one is on its way"
    down = replace(asleep(1, trough(190)), slots=())
    assert (len(wholes(asleep(0, trough(190)))), len(wholes(down))) == (1, 0), "f0 never wakes"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"breaker": BreakerTerms(missed=True)}, Reason.BREAKER_OPEN),
        ({"whole": None}, Reason.POOL_LIMIT_REACHED),
        ({"whole": replace(TERMS, max_asleep=1)}, Reason.POOL_LIMIT_REACHED),
    ],
    ids=str,
)
def test_the_owner_and_the_objective_take_them_back(
    changes: dict[str, Any], reason: Reason
) -> None:
    found = released(asleep(2, replace(trough(), **changes)))
    assert set(found.values()) == {reason}


@pytest.mark.parametrize(
    "reason", [Reason.NOT_DRAINED, Reason.SLEEP_REFUSED, Reason.REQUEST_WHILE_ASLEEP]
)
def test_a_replica_that_does_not_sleep_is_taken_back_at_once(reason: Reason) -> None:
    snapshot = asleep(1, trough())
    found = tuple(
        replace(one, refusal=reason) if one.uid == "f0" else one for one in snapshot.replicas
    )
    snapshot = replace(snapshot, replicas=found)
    assert released(snapshot) == {"uid-a-f0": reason}
    assert "f0" not in wholes(snapshot)


def test_a_restarted_operator_wakes_nobody_because_agents_are_not_back_yet() -> None:
    snapshot = asleep(2, trough(100, remembered_replicas=4), of=2)
    assert not released(snapshot)
    assert released(replace(snapshot, pools=(trough(100),)))


def test_an_unlearned_day_says_so() -> None:
    assert not outlook(observe(UsualLoad(), 10, NOW), NOW, 60, 500).learned
