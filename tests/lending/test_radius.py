"""How far a fault of lending may reach: nodes, zones, minutes; breaker, cordon, borrow gate."""

from dataclasses import replace

from rose_core.api import Reason
from rose_core.api.poollending import Spread
from rose_core.identity import PodUid
from rose_core.lending import (
    BreakerTerms,
    DailyWindow,
    Lease,
    PlannerMemory,
    PoolTerms,
    Replica,
    plan,
)
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world

WANTS = lease("x", max_slots=9)


def on(node: str, *names: str, zone: str = "") -> list[Replica]:
    return [replica(name, node=node, zone=zone) for name in names]


def reasons(replicas: list[Replica], limits: PoolTerms, wants: Lease = WANTS) -> list[Reason]:
    done = plan(world(replicas, [wants], pools=[limits]), NOW)
    return sorted(found.reason for found in done.members[limits.key])


def test_a_node_lends_no_more_than_its_limit() -> None:
    replicas = [*on("n1", "a", "b", "c"), *on("n2", "d")]
    limits = pool(per_node=1)
    assert sorted(name for _, name in lent(world(replicas, [WANTS], pools=[limits]))) == ["a", "d"]
    assert reasons(replicas, limits).count(Reason.NODE_LIMIT_REACHED) == 2
    held = [slot(WANTS, one) for one in replicas]
    gone = released(world(replicas, [WANTS], held, [limits]))
    assert list(gone.values()) == [Reason.NODE_LIMIT_REACHED] * 2


def test_a_zone_lends_no_more_than_its_share_and_unknown_zones_are_one() -> None:
    replicas = [*on("n1", "a", "b", zone="z1"), *on("n2", "c", "d", "e", "f", zone="z2")]
    limits = pool(per_zone_percent=50)
    assert len(lent(world(replicas, [WANTS], pools=[limits]))) == 3
    assert reasons(replicas, limits).count(Reason.ZONE_LIMIT_REACHED) == 3
    unknown = [replace(one, zone="") for one in replicas]
    assert len(lent(world(unknown, [WANTS], pools=[limits]))) == 3
    held = [slot(WANTS, one) for one in replicas]
    gone = released(world(replicas, [WANTS], held, [limits]))
    assert list(gone.values()) == [Reason.ZONE_LIMIT_REACHED] * 3


def test_loans_are_spread_over_zones_or_nodes_before_use_counts() -> None:
    busy = [replace(one, kv_permille=800) for one in on("n2", "c", "d", zone="z2")]
    replicas = [*on("n1", "a", "b", zone="z1"), *busy]
    two = lease("x", max_slots=2)
    assert [n for _, n in lent(world(replicas, [two]))] == ["a", "b"]
    for spread in (Spread.ZONES, Spread.NODES):
        got = lent(world(replicas, [two], pools=[pool(spread=spread)]))
        assert sorted(name for _, name in got) == ["a", "c"]


def test_a_pool_grows_by_so_many_loans_a_minute() -> None:
    replicas = [replica(name) for name in "abcde"]
    limits = pool(per_minute=2)
    first = plan(world(replicas, [WANTS], pools=[limits]), NOW)
    assert len(first.lends) == 2
    assert reasons(replicas, limits).count(Reason.GROWTH_LIMITED) == 3
    memory = PlannerMemory(fit_since=first.memory.fit_since, loans_at=first.memory.loans_at)
    rest = [one for one in replicas if one.uid not in {lend.replica for lend in first.lends}]
    again = world(rest, [WANTS], pools=[limits], memory=memory)
    assert lent(again, NOW + 59) == []
    assert len(lent(again, NOW + 61)) == 2


def test_a_missed_objective_opens_the_breaker_until_it_has_cooled_down() -> None:
    a, b = replica("a"), replica("b")
    held = [slot(WANTS, a)]
    missed = pool(breaker=BreakerTerms(missed=True, cooldown_seconds=100.0))
    first = plan(world([a, b], [WANTS], held, [missed]), NOW)
    assert (first.lends, first.releases) == ((), ())
    assert Reason.BREAKER_OPEN in {found.reason for found in first.members["s/chat"]}
    met = pool(breaker=BreakerTerms(cooldown_seconds=100.0))
    memory = PlannerMemory(fit_since={PodUid("b"): 0.0}, missed_at=first.memory.missed_at)
    later = world([a, b], [WANTS], held, [met], memory=memory)
    assert lent(later, NOW + 99) == []
    assert lent(later, NOW + 101) == [("r/x", "b")]


def test_a_breaker_that_returns_takes_everything_back() -> None:
    a = replica("a")
    open_breaker = pool(breaker=BreakerTerms(missed=True, returns=True))
    held = [slot(WANTS, a)]
    assert released(world([a], [WANTS], held, [open_breaker])) == {
        held[0].name: Reason.BREAKER_OPEN
    }


def test_a_cordoned_node_gives_back_at_once_and_gets_nothing() -> None:
    a, b = replica("a", cordoned=True), replica("b", cordoned=True)
    held = [slot(WANTS, a)]
    snapshot = world([a, b], [WANTS], held)
    assert released(snapshot) == {held[0].name: Reason.NODE_CORDONED}
    assert lent(snapshot) == []


def test_a_loan_that_ends_before_it_pays_is_not_made() -> None:
    friday_8 = 1_800_000_000.0
    closing = pool(windows=(DailyWindow(frozenset(range(7)), 0, 8 * 60 + 3),))  # closes in 180 s
    a = replica("a")
    for cost, worth in ((60.0, True), (120.0, False), (None, True)):
        one = lease("x", toggle_seconds=cost)
        done = plan(
            world([a], [one], pools=[closing], memory=PlannerMemory({PodUid("a"): 0.0})), friday_8
        )
        assert bool(done.lends) is worth
        if not worth:
            outcome = done.outcomes["r/x"]
            assert outcome.reason is Reason.NOT_WORTHWHILE
            assert "closes in 180 s; a loan takes 120 s" in outcome.message
    assert lent(world([a], [lease("x", ends_at=NOW + 100)])) == []


def test_windows_that_meet_are_one() -> None:
    friday_8 = 1_800_000_000.0
    every_day = frozenset(range(7))
    day = DailyWindow(every_day, 6 * 60, 8 * 60 + 1)
    night = DailyWindow(every_day, 8 * 60, 6 * 60)
    one = lease("x", toggle_seconds=3600.0)
    always = world([replica("a")], [one], pools=[pool(windows=(day, night))])
    assert lent(replace(always, memory=PlannerMemory({PodUid("a"): 0.0})), friday_8) == [
        ("r/x", "a")
    ]
