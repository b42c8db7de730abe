"""What a router says of its turns: those that begin and end between two looks count too."""

from collections.abc import Callable
from typing import Any, cast

from rose_router.turns.demand import DemandFeed
from rose_router.turns.ledger import Totals


def nothing() -> None:
    """Nobody listens."""


class Turns:
    """The part of a service that the feed reads; a turn ends when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Turned()
        self.queue = Waiting()
        self.fleet = Engines()
        self.on_turn: Callable[[], None] = nothing

    def clock(self) -> float:
        return self.now

    def begin(self) -> None:
        self.ledger.append("turn")
        self.on_turn()

    def end(self) -> None:
        self.ledger.pop()


class Turned(list[str]):
    totals = Totals()


class Engines(list[Any]):
    head = ""


class Waiting(list[Any]):
    waiting_tokens = 0


def feed() -> tuple[Turns, DemandFeed]:
    turns = Turns()
    return turns, DemandFeed(cast("Any", turns))


def test_a_turn_between_two_looks_is_seen() -> None:
    turns, asked = feed()
    asked.look()
    turns.now = 0.4
    turns.begin()
    turns.end()
    turns.now = 1.0
    asked.look()
    reported = asked.note()
    assert reported.idle_seconds == 0.6
    assert reported.peak_turns == 1


def test_of_many_turns_only_the_first_after_none_costs_a_look() -> None:
    turns, asked = feed()
    looks = 0
    plain = asked.look

    def counted() -> None:
        nonlocal looks
        looks += 1
        plain()

    asked.look = counted  # type: ignore[method-assign]
    for _ in range(5):
        turns.begin()
    assert looks == 1
    turns.ledger.clear()
    asked.look()
    turns.begin()
    assert looks == 3
