"""Which gaps between requests are withheld, what counts of them, and that a burst counts once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rose_core.guard.crossover import Cycle, Cycles, Schedule, withheld_share
from rose_core.guard.trial import added
from rose_core.wire.sync import Trial
from tests.guard.worlds import MS, NOW, S

TENTH = 0.1


class Replica:
    """One replica's requests, and the cycles that are over."""

    def __init__(
        self, share: float = TENTH, seed: int = 7, schedule: Schedule | None = None
    ) -> None:
        self.cycles = Cycles(schedule or Schedule(), random.Random(seed).random)
        self.now, self.share, self.number = NOW, share, 0
        self.done: list[Cycle] = []

    def look(self, after_ns: int) -> bool:
        """The guard's step so much later: whether lending is withheld."""
        self.now += after_ns
        self._take(self.cycles.advance(self.now, self.share))
        return self.cycles.withheld

    def arrive(self) -> int:
        self.number += 1
        self.cycles.begin(self.number, self.now)
        return self.number

    def end(self, number: int, *, slow: bool = False) -> tuple[bool, bool]:
        met = self.cycles.end(number)
        if met[1]:
            self.cycles.count(slow=slow)
        self._take(self.cycles.close(self.now, self.share))
        return met

    def burst(self, size: int, *, slow: bool) -> None:
        """Requests that come at once, and the last of which ends a tenth of a second later."""
        numbers = [self.arrive() for _ in range(size)]
        self.look(100 * MS)
        for number in numbers:
            self.end(number, slow=slow)

    def _take(self, cycle: Cycle | None) -> None:
        self.done += [] if cycle is None else [cycle]


def test_a_gap_is_withheld_whole_with_the_requests_that_end_it() -> None:
    replica = Replica(share=0.5)
    seen = set()
    for _ in range(40):
        gap = [replica.look(200 * MS) for _ in range(5)]
        number = replica.arrive()
        busy = [replica.look(200 * MS) for _ in range(5)]
        assert len({*gap, *busy}) == 1
        assert replica.end(number) == (gap[0], True)
        seen.add(gap[0])
    assert seen == {True, False}
    assert Counter(cycle.withheld for cycle in replica.done).total() == 40


@pytest.mark.parametrize("period_s", [1, 2, 5, 10, 20])
def test_a_load_that_repeats_itself_meets_the_coin_in_all_its_phases(period_s: int) -> None:
    """Every fifth request is long: a clock of the same period would withhold those, or never."""
    replica, found = Replica(), Counter[tuple[bool, bool]]()
    for turn in range(10_000):
        withheld = replica.look(period_s * S)
        number = replica.arrive()
        replica.look(50 * MS)
        replica.end(number)
        found[withheld, turn % 5 == 0] += 1
    shares = [
        found[True, long] / (found[True, long] + found[False, long]) for long in (True, False)
    ]
    assert shares == pytest.approx([TENTH, TENTH], abs=0.02)


def test_a_replica_that_nobody_asks_is_drawn_for_anew() -> None:
    replica = Replica(share=0.5)
    looks = [replica.look(S) for _ in range(1000)]
    changes = [one for one in range(1, 1000) if looks[one] is not looks[one - 1]]
    assert len(changes) > 30
    assert all(one % 10 == changes[0] % 10 for one in changes), "each ten seconds"
    assert not replica.done, "nothing was asked"


def test_a_replica_that_is_never_empty_is_drawn_for_anew_and_counts_what_lies_within() -> None:
    replica = Replica(share=0.5)
    inside = [False] * 200
    replica.look(0)
    open_number = replica.arrive()
    for turn in range(200):
        following = replica.arrive()
        replica.look(S)
        inside[turn] = replica.end(open_number)[1]
        open_number = following
    assert 0.8 < sum(inside) / 200 < 0.95, "one in ten lies across a border"
    assert {cycle.withheld for cycle in replica.done} == {True, False}
    assert len(replica.done) == 20, "each ten seconds"


def test_no_cycle_begins_at_an_arrival() -> None:
    replica = Replica(share=0.5)
    for _ in range(200):
        stood = replica.look(50 * MS)
        replica.now += 30 * S  # no step came between: the gate stands as it did
        number = replica.arrive()
        assert replica.end(number) == (stood, True)


def test_a_burst_counts_once() -> None:
    replica = Replica()
    for size in (1, 40):
        replica.look(S)
        replica.burst(size, slow=True)
    assert replica.done == [Cycle(False, True), Cycle(False, True)]


def test_without_a_share_nothing_is_withheld_and_nothing_is_drawn() -> None:
    replica = Replica(share=0.0)
    assert not any(replica.look(7 * S) for _ in range(1000))
    assert not replica.cycles.draws(0.0)


def test_a_schedule_has_its_windows_in_the_coins_place() -> None:
    replica = Replica(share=0.0, schedule=Schedule(10.0))
    start = NOW // (20 * S) * 20 * S + 20 * S
    seen = [replica.look(start + one * S - replica.now) for one in range(40)]
    assert seen == [*[False] * 10, *[True] * 10] * 2
    number = replica.arrive()
    replica.look(5 * S)
    assert replica.end(number) == (True, False), "it lies across a border"


@pytest.mark.parametrize(
    ("percent", "relative", "share"),
    [(2, False, 0.02), (2, True, 0.1), (30, True, 0.3), (0, False, 0)],
)
def test_a_relative_limit_takes_a_tenth_at_least(
    percent: int, relative: bool, share: float
) -> None:
    assert withheld_share(percent, relative=relative) == share


def test_where_lending_adds_nothing_bursts_are_no_proof_of_harm() -> None:
    """Slow requests come in bursts of forty: taken one by one they would prove a lot."""
    by_period = by_request = 0
    for seed in range(200):
        draw, replica = random.Random(seed), Replica(seed=1000 + seed)
        trial = requests = Trial()
        for _ in range(400):
            replica.look(S)
            withheld, burst = replica.cycles.withheld, draw.random() < 0.05
            replica.burst(40 if burst else 1, slow=burst)
            for _ in range(40 if burst else 1):
                requests = requests.count(withheld=withheld, slow=burst)
        for cycle in replica.done:
            trial = trial.count(withheld=cycle.withheld, slow=cycle.slow)
        found, naive = added(trial), added(requests)
        by_period += found is not None and found.proven
        by_request += naive is not None and naive.proven
    assert by_period <= 0.05 * 200
    assert by_request > 3 * 0.05 * 200
