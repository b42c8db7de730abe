"""The pool planner: pure, so every rule is a table or a property."""

from dataclasses import replace
from typing import Any

from rose_core.api import Reason
from rose_core.identity import LeaseUid, PodUid
from rose_core.lending import (
    DailyWindow,
    PlannerMemory,
    plan,
)
from tests.lending.world import NOW, POLICY, lease, lent, pool, released, replica, slot, world

POD = PodUid("a")


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
    Reason.TELEMETRY_STALE: {"stale": True},
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
    both = [replica("a", gpus=("G",), node="n"), replica("b", gpus=("G",), node="n")]
    done = plan(world(both, [lease("x")]), NOW)
    assert done.lends == ()
    assert {one.reason for one in done.verdicts.values()} == {Reason.GPU_CONTESTED}


def test_a_gpu_that_the_kubelet_gave_to_two_replicas_is_taken_back() -> None:
    both = [replica(name, gpus=("G",), node="n", proven=True) for name in "ab"]
    one = lease("x")
    held = slot(one, both[0])
    snapshot = world(both, [one], [held], memory=PlannerMemory(unfit_since={held.uid: NOW - 1000}))
    done = plan(snapshot, NOW)
    assert {found.reason for found in done.verdicts.values()} == {Reason.SPANS_REPLICAS}
    assert released(snapshot) == {held.name: Reason.SPANS_REPLICAS}


def test_a_contested_gpu_stays_with_its_proven_owner() -> None:
    owner = replica("a", gpus=("G",), node="n", proven=True)
    thief = replica("b", gpus=("G",), node="n", pool="s/evil")
    pools = [pool(), pool(key="s/evil")]
    evil = lease("evil", pool="s/evil", priority=1000)
    snapshot = world([owner, thief], [lease("x"), evil], pools=pools)
    assert lent(snapshot) == [("r/x", "a")]
    verdict = plan(snapshot, NOW).verdicts[PodUid("b")]
    assert verdict.reason is Reason.GPU_NOT_OWNED
    assert "s/a" in verdict.message


def test_naming_a_lent_gpu_takes_back_no_slot_and_lends_none() -> None:
    """Neither where the owner is proven nor where nobody is."""
    for proven in (True, False):
        owner = replica("a", gpus=("G",), node="n", proven=proven)
        thief = replica("b", gpus=("G",), node="n", pool="s/evil")
        pools, one = [pool(), pool(key="s/evil")], lease("x")
        evil = lease("evil", pool="s/evil", priority=1000)
        held = slot(one, owner)
        # A replica that is unfit loses its slot only where it has been so for a while.
        memory = PlannerMemory(unfit_since={held.uid: NOW - 1000})
        snapshot = world([owner, thief], [one, evil], [held], pools=pools, memory=memory)
        assert (lent(snapshot), released(snapshot)) == ([], {})


def test_a_contest_does_not_hide_that_a_replica_is_unfit() -> None:
    both = [replica(name, gpus=("G",), node="n", refusal=Reason.XID_ERROR) for name in "ab"]
    done = plan(world(both, [lease("x")]), NOW)
    assert {found.reason for found in done.verdicts.values()} == {Reason.XID_ERROR}


def test_an_unproven_owner_of_a_slot_loses_it_to_the_proven_one() -> None:
    thief = replica("b", gpus=("G",), node="n")
    owner = replica("a", gpus=("G",), node="n", proven=True)
    one = lease("x")
    held = slot(one, thief)
    long = PlannerMemory(unfit_since={held.uid: NOW - 1000})
    snapshot = world([owner, thief], [one], [held], memory=long)
    assert released(snapshot) == {held.name: Reason.GPU_NOT_OWNED}


def test_gpus_of_two_nodes_may_have_one_name() -> None:
    """Those of a static list do: it is the same on every node."""
    each = [replica(name, gpus=("G",)) for name in "ab"]
    assert len(lent(world(each, [replace(lease("x"), max_slots=2)]))) == 2


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
    snapshot = world([replica("a")], [lease("x")], memory=PlannerMemory())
    first = plan(snapshot, NOW)
    assert first.lends == ()
    assert first.outcomes["r/x"].verdicts[0].reason is Reason.SETTLING
    later = replace(snapshot, memory=first.memory)
    assert lent(later, NOW + POLICY.settle_seconds) == [("r/x", "a")]

    freed = PlannerMemory(
        fit_since={POD: NOW - 1000}, freed_at=dict.fromkeys(replica("a").devices, NOW - 1)
    )
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
    again = replace(one, uid=LeaseUid("uid-other"))
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


def test_a_closed_window_is_named_as_the_cause_with_the_next_one() -> None:
    # NOW is a Friday, 08:00 UTC.
    windows = (DailyWindow(frozenset({1}), 120, 180), DailyWindow(frozenset({4}), 600, 660))
    done = plan(world([replica("a")], [lease("x")], pools=[pool(windows=windows)]), NOW)
    found = done.outcomes["r/x"]
    assert found.reason is Reason.OUTSIDE_TIME_WINDOW
    assert "the next one opens Fri 10:00 UTC" in found.message
    never = pool(windows=(DailyWindow(frozenset(), 0, 1),))
    done = plan(world([replica("a")], [lease("x")], pools=[never]), NOW)
    assert "none will be" in done.outcomes["r/x"].message


def test_reasons_are_told_in_words_and_numbers() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"verified": None}, "not been compared"),
        ({"verified": False}, "does not equal"),
        ({"signal": None}, "allowedSignals has Loads, WireTap"),
        ({"refusal": Reason.INSUFFICIENT_MEMORY, "refusal_text": "InsufficientMemory"}, "too li"),
        ({"refusal": Reason.OTHER, "refusal_text": "its own words"}, "its own words"),
        ({"kv_permille": 950}, "950 permille, limit 900 permille"),
    ]
    for changes, text in cases:
        done = plan(world([replica("a", **changes)], [lease("x")]), NOW)
        assert text in done.verdicts[POD].message


def test_time_windows_may_cross_midnight() -> None:
    # 2027-01-15 08:00 UTC is a Friday.
    friday_8 = 1_800_000_000.0
    hour = 3600.0
    night = DailyWindow(frozenset({3}), 20 * 60, 9 * 60)  # starts on Thursday
    a, one = replica("a"), lease("x")
    for now, is_open in (
        (friday_8, True),
        (friday_8 + hour, False),
        (friday_8 - 12 * hour, True),
        (friday_8 + 12 * hour, False),
    ):
        settled = PlannerMemory(fit_since={POD: 0.0})
        snapshot = world([a], [one], pools=[pool(windows=(night,))], memory=settled)
        assert bool(lent(snapshot, now)) is is_open
        held = world([a], [one], [slot(one, a)], pools=[pool(windows=(night,))])
        expected = {} if is_open else {slot(one, a).name: Reason.OUTSIDE_TIME_WINDOW}
        assert released(held, now) == expected


def test_an_explanation_says_what_may_be_lent_of_a_replicas_memory() -> None:
    text = "79.6 GiB in all, serving used up to 55.7 GiB, headroom 3.0 GiB: 20.9 GiB may be lent"
    member = replica("a", memory=text)
    (found,) = plan(world([member], []), NOW).members["s/chat"]
    assert found.message == f"KV use 100 permille; memory: {text}"


def test_slots_on_gpus_that_their_host_has_lost_go_back_after_the_planners_patience() -> None:
    """The host then starts anew with its device files; nothing new is lent there meanwhile."""
    lost, one = replica("a", refusal=Reason.DEVICE_ACCESS), lease("x", max_slots=2)
    held = slot(one, lost)
    since = PlannerMemory(unfit_since={held.uid: NOW})
    early, late = NOW + POLICY.patience_seconds - 1, NOW + POLICY.patience_seconds
    snapshot = world([lost], [one], [held], memory=since)
    assert (lent(snapshot, early), released(snapshot, early)) == ([], {})
    assert released(snapshot, late) == {held.name: Reason.DEVICE_ACCESS}
