"""A lease over several pools and for some kinds of GPU."""

from __future__ import annotations

from dataclasses import replace

from rose_core.api import Reason
from rose_core.lending import Demand, plan
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world

OTHER = replace(pool(), key="s/other")
BOTH = [pool(), OTHER]
HERE = [replica(name, device_class="h100") for name in "ab"]
THERE = [replica(name, pool="s/other", device_class="h200") for name in "cd"]
WANTS = lease("x", min_slots=0, max_slots=4, more_pools=("s/other",))


def where(loans: list[tuple[str, str]], key: str = "r/x") -> set[str]:
    return {uid for owner, uid in loans if owner == key}


def test_a_lease_borrows_from_each_of_its_pools() -> None:
    assert where(lent(world([*HERE, *THERE], [WANTS], pools=BOTH))) == set("abcd")


def test_its_maximum_counts_the_slots_of_all_pools() -> None:
    three = replace(WANTS, max_slots=3)
    assert len(lent(world([*HERE, *THERE], [three], pools=BOTH))) == 3
    held = [slot(three, one) for one in HERE]
    assert len(lent(world([*HERE, *THERE], [three], held, pools=BOTH))) == 1


def test_so_does_its_minimum_so_that_nobody_is_preempted_while_another_pool_has_room() -> None:
    weak = lease("weak", max_slots=2)
    strong = replace(WANTS, priority=9, min_slots=2, max_slots=2)
    held = [slot(weak, one) for one in HERE]
    assert released(world([*HERE, *THERE], [weak, strong], held, pools=BOTH)) == {}
    full = [*held, *(slot(replace(weak, pool="s/other"), one) for one in THERE)]
    both = replace(weak, more_pools=("s/other",), max_slots=4, min_slots=0)
    assert (
        Reason.PREEMPTED
        in released(world([*HERE, *THERE], [both, strong], full, pools=BOTH)).values()
    )


def test_a_pool_that_no_longer_lends_to_the_lease_gets_its_gpus_back() -> None:
    held = [slot(WANTS, HERE[0]), slot(replace(WANTS, pool="s/other"), THERE[0])]
    left = replace(WANTS, more_pools=())
    found = released(world([*HERE, *THERE], [left], held, pools=BOTH))
    assert found == {held[1].name: Reason.POOL_NOT_LENDING}


def test_only_gpus_of_the_classes_it_names_are_lent_to_it() -> None:
    picky = replace(WANTS, device_classes=frozenset({"h200"}))
    assert where(lent(world([*HERE, *THERE], [picky], pools=BOTH))) == {"c", "d"}
    unknown = [replace(one, device_class="") for one in THERE]
    assert lent(world(unknown, [picky], pools=BOTH)) == []


def test_one_that_is_picky_does_not_keep_others_from_the_rest() -> None:
    mixed = [HERE[0], replace(HERE[1], device_class="l4")]
    picky = lease("picky", priority=9, max_slots=2, device_classes=frozenset({"l4"}))
    loans = lent(world(mixed, [picky, lease("other", max_slots=2)]))
    assert (where(loans, "r/picky"), where(loans, "r/other")) == ({"b"}, {"a"})


def test_a_gpu_of_another_class_is_explained() -> None:
    picky = lease("x", device_classes=frozenset({"l4"}))
    verdicts = plan(world(HERE, [picky]), NOW).outcomes["r/x"].verdicts
    assert {one.reason for one in verdicts} == {Reason.OTHER_DEVICE_CLASS}


def test_a_share_of_one_pool_counts_what_a_lease_has_elsewhere() -> None:
    """Both want two; the one that has two elsewhere leaves this pool to the other."""
    wants = Demand(8, idle_seconds=0.0)
    rich = replace(WANTS, max_slots=2, demand=wants)
    poor = lease("poor", min_slots=0, max_slots=2, demand=wants)
    held = [slot(replace(rich, pool="s/other"), one) for one in THERE]
    snapshot = world([*HERE, *THERE], [rich, poor], held, pools=BOTH)
    assert where(lent(snapshot), "r/poor") == {"a", "b"}
