"""Whether a lease's engine fits into what may be lent: by figures, and unknown is a value."""

from dataclasses import replace

import pytest

from rose_core.api import Reason
from rose_core.lending import Demand, EngineNeeds, LoadOutlook, WholeTerms, plan
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world

GIB = 1 << 30
POOL = "s/chat"
SMALL, LARGE = (
    replica("a", lendable_bytes=20 * GIB, kv_permille=10),
    replica("b", lendable_bytes=43 * GIB, kv_permille=500),
)


def needs(gib: int, node: str = "node-x", key: str = POOL) -> EngineNeeds:
    return EngineNeeds({(key, node): gib * GIB})


def test_an_engine_that_fits_nowhere_is_said_with_both_figures() -> None:
    done = plan(world([SMALL, LARGE], [lease("x", needs=needs(764))]), NOW)
    assert done.lends == ()
    outcome = done.outcomes["r/x"]
    assert outcome.reason is Reason.INSUFFICIENT_MEMORY
    assert outcome.message == (
        "0 of 1 slots; the engine needs 764.0 GiB per GPU with tp=1, the most lendable is "
        "43.0 GiB on node-b; 2 replicas: 2 InsufficientMemory"
    )
    assert {one.message for one in outcome.verdicts} == {
        "the engine needs 764.0 GiB per GPU, 20.0 GiB may be lent",
        "the engine needs 764.0 GiB per GPU, 43.0 GiB may be lent",
    }


def test_a_lease_is_lent_the_replica_with_enough_memory_not_the_least_used() -> None:
    snapshot = world([SMALL, LARGE], [lease("x", needs=needs(30))])
    assert lent(snapshot) == [("r/x", "b")]
    assert lent(world([SMALL, LARGE], [lease("x", needs=needs(20))])) == [("r/x", "a")]


def test_a_large_engine_leaves_the_small_replicas_to_others() -> None:
    large = lease("large", priority=9, max_slots=2, needs=needs(30))
    snapshot = world([SMALL, LARGE], [large, lease("small", max_slots=2, needs=needs(5))])
    assert sorted(lent(snapshot)) == [("r/large", "b"), ("r/small", "a")]


@pytest.mark.parametrize(
    ("needed", "room"), [(None, 1 * GIB), (EngineNeeds(), 1 * GIB), (needs(764), None)]
)
def test_what_is_unknown_is_left_to_the_node(needed: EngineNeeds | None, room: int | None) -> None:
    asking = lease("x") if needed is None else lease("x", needs=needed)
    snapshot = world([replace(SMALL, lendable_bytes=room)], [asking])
    assert lent(snapshot) == [("r/x", "a")]


def test_a_nodes_own_word_comes_before_that_of_others() -> None:
    """Nodes differ in what they have measured; the least stands in for those not asked."""
    known = EngineNeeds({(POOL, "node-a"): 15 * GIB, (POOL, "node-c"): 50 * GIB})
    assert (known.on(SMALL), known.on(LARGE)) == (15 * GIB, 15 * GIB)
    assert known.on(replica("c")) == 50 * GIB
    assert known.on(replica("d", pool="s/other")) is None


def test_a_slot_whose_node_found_too_little_memory_is_taken_back_with_the_figures() -> None:
    one = lease("x", needs=needs(764, "node-b"))
    held = slot(one, LARGE, lacks_memory=True, running=False)
    done = plan(world([LARGE], [one], [held]), NOW)
    (release,) = done.releases
    assert (release.slot, release.reason) == (held.name, Reason.INSUFFICIENT_MEMORY)
    assert release.message == "the engine needs 764.0 GiB per GPU, 43.0 GiB may be lent"
    assert done.outcomes["r/x"].granted == 0
    assert done.outcomes["r/x"].reason is Reason.INSUFFICIENT_MEMORY


def test_a_slot_that_the_figures_let_start_stays_and_so_does_one_that_runs() -> None:
    """What else holds the memory may go; what runs is the budget's matter."""
    fits = lease("x", needs=needs(40, "node-b"))
    assert released(world([LARGE], [fits], [slot(fits, LARGE, lacks_memory=True)])) == {}
    grown = lease("x", needs=needs(44, "node-b"))
    assert released(world([LARGE], [grown], [slot(grown, LARGE)])) == {}


def test_it_is_lent_again_once_more_may_be_lent() -> None:
    one = lease("x", needs=needs(44))
    assert lent(world([LARGE], [one])) == []
    assert lent(world([replace(LARGE, lendable_bytes=46 * GIB)], [one])) == [("r/x", "b")]


def test_no_lease_loses_a_slot_to_one_whose_engine_does_not_fit_there() -> None:
    weak = lease("weak")
    strong = lease("strong", priority=9, min_slots=1, needs=needs(30))
    assert released(world([SMALL], [weak, strong], [slot(weak, SMALL)])) == {}
    strong = replace(strong, needs=needs(20))
    assert set(released(world([SMALL], [weak, strong], [slot(weak, SMALL)])).values()) == {
        Reason.PREEMPTED
    }


def test_a_replica_that_sleeps_for_the_loan_is_not_judged_by_what_it_lends_awake() -> None:
    full = [
        replica(name, refusal=Reason.INSUFFICIENT_MEMORY, lendable_bytes=1 * GIB) for name in "ab"
    ]
    trough = LoadOutlook(peak_permille=100, lead_seconds=1800.0, max_busy_permille=600)
    sleepy = pool(whole=WholeTerms(1, 1, 500), outlook=trough)
    one = lease("x", needs=needs(30), demand=Demand(8, idle_seconds=0.0))
    done = plan(world(full, [one], pools=[sleepy]), NOW)
    assert [lend.whole for lend in done.lends] == [True]
    held = slot(one, full[0], whole=True, lacks_memory=True)
    assert released(world(full, [one], [held], pools=[sleepy])) == {}
