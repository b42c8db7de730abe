"""Jobs that share a lease: equal parts while both wait, nothing saved up, nobody alone slowed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.rollouts.capacity.admission import QueueLimits, has_room, rank
from rose_core.rollouts.capacity.fairness import FairShares, work
from rose_core.rollouts.trajectories.prospects import NO_HINT, Deadline, Prospects


@dataclass(frozen=True)
class One:
    job: str
    key: tuple[bool, int, int]


def come(shares: FairShares, job: str, numbers: range) -> list[One]:
    for _ in numbers:
        shares.join(job)
    return [One(job, rank(False, 0, number)) for number in numbers]


def serve(
    shares: FairShares, waiting: list[One], tokens: dict[str, float], turns: int
) -> Counter[str]:
    """Give so many turns an engine, one after the other; the work that each job was given."""
    done: Counter[str] = Counter()
    for _ in range(turns):
        one = shares.order(sorted(waiting, key=lambda one: one.key))[0]
        waiting.remove(one)
        shares.charge(one.job, tokens[one.job])
        shares.leave(one.job)
        done[one.job] += int(tokens[one.job])
    return done


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 500))
def test_a_flood_takes_no_more_than_its_part_of_the_work(loud: int, quiet: int) -> None:
    shares = FairShares()
    waiting = come(shares, "loud", range(400)) + come(shares, "quiet", range(400, 500))
    tokens = {"loud": float(loud), "quiet": float(quiet)}
    turns = 100
    done = serve(shares, waiting, tokens, turns)
    if any(one.job == "quiet" for one in waiting):
        assert abs(done["loud"] - done["quiet"]) <= max(loud, quiet)


def test_a_job_that_was_silent_has_saved_nothing_up() -> None:
    shares = FairShares()
    waiting = come(shares, "steady", range(100))
    serve(shares, waiting, {"steady": 10.0}, 50)
    waiting += come(shares, "late", range(100, 200))
    done = serve(shares, waiting, {"steady": 10.0, "late": 10.0}, 40)
    assert done == {"steady": 200, "late": 200}


def test_leaving_for_a_moment_wipes_nothing_off_the_slate() -> None:
    shares = FairShares()
    others = come(shares, "other", range(10))
    shares.join("greedy")
    shares.charge("greedy", 1000.0)
    shares.leave("greedy")
    waiting = others + come(shares, "greedy", range(10, 11))
    assert [one.job for one in shares.order(waiting)][-1] == "greedy"
    assert [one.job for one in shares.order(waiting[::-1])][-1] == "greedy"


def test_turns_that_hold_tokens_and_priority_stay_ahead_of_every_share() -> None:
    shares = FairShares()
    waiting = come(shares, "light", range(2))
    held, urgent = One("heavy", rank(True, 0, 9)), One("heavy", rank(False, 5, 8))
    shares.join("heavy")
    shares.charge("heavy", 1e6)
    order = shares.order(sorted([*waiting, held, urgent], key=lambda one: one.key))
    assert list(order) == [held, urgent, *waiting]


def test_a_job_alone_keeps_the_order_of_ranks() -> None:
    shares = FairShares()
    waiting = come(shares, "", range(5))
    assert shares.order(waiting) is waiting


def test_what_is_remembered_of_jobs_is_bounded() -> None:
    shares = FairShares()
    for number in range(5000):
        shares.join(f"j{number}")
        shares.charge(f"j{number}", 1.0 + number)
        shares.leave(f"j{number}")
    assert len(shares._served) <= 1025


def test_reading_costs_less_than_writing_and_more_than_nothing() -> None:
    assert 0 < work(100, 0) < work(0, 100)


def test_a_queue_full_of_one_job_has_room_for_another() -> None:
    queue = QueueLimits(most=10)
    assert not has_room(10, queue, mine=10, jobs=2)
    assert has_room(10, queue, mine=0, jobs=2)
    assert not has_room(15, queue, mine=5, jobs=2)
    assert not has_room(10, queue)


def test_a_trajectory_ranks_as_old_with_one_turn_at_a_time_only() -> None:
    prospects = Prospects(Deadline())
    old = prospects.begin_turn("old", NO_HINT, 1, 0.0)
    young = prospects.begin_turn("young", NO_HINT, 1, 1.0)
    beside = [prospects.begin_turn("old", NO_HINT, 1, 2.0) for _ in range(3)]
    assert old < young < min(beside)
    assert len({old, young, *beside}) == 5
    for _ in range(4):
        prospects.end_turn("old", 1, 2, 3.0)
    assert prospects.begin_turn("old", NO_HINT, 1, 4.0) == old
