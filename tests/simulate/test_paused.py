"""Turns at closed gates are not starved by those that wait, whatever comes when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.rollouts.placement.views import PolicyName
from rose_core.rollouts.terms import LeaseTerms, policies_of
from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine
from rose_simulate.model.routing.router import Router, RouterOptions
from rose_simulate.model.routing.turns import AttachedEngine, RoutedTurn
from rose_simulate.model.scenarios.costs import costs

COSTS = costs("H100", "Qwen3-8B", 0.5)
POOL = 30_000
RIPE = 35.0
"""Seconds at a closed gate after which nothing but its rank keeps a turn waiting: 30 for room in a
KV pool, and less for its own keys, whose prefill takes a few seconds here."""
TICK = 0.05


@dataclass(eq=False)
class Yard:
    """A router with engines whose gates the test moves, and who stands where since when."""

    clock: VirtualClock
    router: Router
    turns: list[RoutedTurn] = field(default_factory=list)
    closed: dict[str, float] = field(default_factory=dict)
    ended: set[RoutedTurn] = field(default_factory=set)

    def add(self, name: str, kind: EngineKind, cap: int, pool: int) -> None:
        batch = BatchEngine(self.clock, COSTS, pool, lambda: None)
        self.router.attach(AttachedEngine(name, kind, batch, 0, gate_open=True, cap=cap))

    def gate(self, name: str, *, is_open: bool) -> None:
        engine = self.router.engines[name]
        assert engine.batch is not None
        engine.batch.set_speed(1.0 if is_open else 0.0)
        self.router.on_gate(name, is_open)
        if is_open:
            self.closed.pop(name, None)
        else:
            self.closed.setdefault(name, self.clock.now_s)

    def come(self, context: int, output: int) -> RoutedTurn:
        number = len(self.turns)
        turn = RoutedTurn(
            f"s{number}", context, output, number, lambda: self.ended.add(turn), born=number
        )
        self.turns.append(turn)
        self.router.submit(turn)
        return turn

    def where(self) -> dict[RoutedTurn, str]:
        return {
            leg.turn: engine.name for engine in self.router.engines.values() for leg in engine.legs
        }

    def standing(self, longer_than: float) -> set[RoutedTurn]:
        """Turns that have written something and whose gate has been closed for so long."""
        return {
            leg.turn
            for name, since in self.closed.items()
            for leg in self.router.engines[name].legs
            if leg.turn.held + leg.sequence.produced and self.clock.now_s - since >= longer_than
        }


def yard(*, placement: PolicyName = PolicyName.JOINT, waits: bool = True) -> Yard:
    clock = VirtualClock()
    policies = policies_of(LeaseTerms(placement=placement))
    return Yard(clock, Router(clock, "run", policies, RouterOptions(waits=waits), random.Random(0)))


@pytest.mark.parametrize(
    ("placement", "waits"), [(PolicyName.JOINT, True), (PolicyName.ROSE_PAPER, False)]
)
def test_it_gets_the_next_place_though_many_wait(placement: PolicyName, *, waits: bool) -> None:
    made = yard(placement=placement, waits=waits)
    made.add("lent", EngineKind.BORROWED, 1, POOL)
    turn = made.come(500, 4000)
    made.clock.run(SECOND)
    made.add("own", EngineKind.DEDICATED, 1, POOL)
    for _ in range(200):
        made.come(500, 100)
    made.gate("lent", is_open=False)
    made.clock.run(8 * SECOND)
    assert made.where().get(turn) == "own"
    assert made.router.counts.moves == 1
    assert made.router.waiting


def test_it_goes_on_where_it_stands_if_its_gate_opens_first() -> None:
    made = yard()
    made.add("lent", EngineKind.BORROWED, 1, POOL)
    turn = made.come(500, 4000)
    made.clock.run(SECOND)
    made.add("own", EngineKind.DEDICATED, 1, POOL)
    made.come(500, 100_000)
    made.gate("lent", is_open=False)
    made.clock.run(20 * SECOND)
    made.gate("lent", is_open=True)
    made.clock.run(80 * SECOND)
    assert turn in made.ended
    assert not made.router.counts.moves


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    caps=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    lent=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    pool=st.sampled_from([20_000, 60_000]),
)
def test_no_turn_that_has_not_begun_overtakes_one_at_a_closed_gate(
    seed: int, caps: list[int], lent: list[int], pool: int
) -> None:
    """Whatever comes when: a turn at a gate closed for long is overtaken by older ones only.

    So at most as many go before it as hold tokens and are of older trajectories.
    """
    dice, made = random.Random(seed), yard()
    names = [f"lent{number}" for number in range(len(lent))]
    for number, cap in enumerate(caps):
        made.add(f"own{number}", EngineKind.DEDICATED, cap, pool)
    for name, cap in zip(names, lent, strict=True):
        made.add(name, EngineKind.BORROWED, cap, pool)
    moves = {name: dice.uniform(1, 20) for name in names}
    while made.clock.now_s < 150:
        while len(made.router.waiting) < 6:  # the queue is never empty
            made.come(dice.randrange(100, 6000), dice.randrange(10, 600))
        for name in names:
            if made.clock.now_s >= moves[name]:
                made.gate(name, is_open=name in made.closed)
                moves[name] += dice.choice((0.5, 4.0, 60.0)) * dice.uniform(0.5, 1.5)
        ripe = made.standing(RIPE)
        known = made.where()
        made.clock.run(round((made.clock.now_s + TICK) * SECOND))
        now = made.where()
        left_behind = [turn for turn in ripe if now.get(turn) == known[turn]]
        placed = [turn for turn, engine in now.items() if engine != known.get(turn)]
        for turn, other in product(placed, left_behind):
            assert turn.held, f"{turn.session} has not begun and overtook {other.session}"
            assert turn.born < other.born
