"""A slot's state machine: every phase, every rung, every deadline; and what must hold always."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rose_core.guard.gate import GateVerdict
from rose_core.guard.ladder import LadderLimits, Rung, SlotOrder
from rose_core.guard.reasons import VACATING, GateReason
from rose_core.guard.slot import STARTABLE, SlotMachine, SlotPhase, SlotSeen, decide, is_settled
from rose_core.wire.host import EngineState
from tests.guard.worlds import MS, NOW, OPEN, S, engine, seen, shut

LIMITS = LadderLimits()
PRESENT = SlotMachine(phase=SlotPhase.PRESENT, rung=Rung.NONE, since_ns=NOW - S)
STOPPED = SlotMachine(phase=SlotPhase.PRESENT, rung=Rung.STOP, since_ns=NOW - S)


def orders(
    state: SlotMachine, world: SlotSeen, now: int = NOW
) -> tuple[SlotMachine, list[SlotOrder]]:
    after, actions = decide(state, world, LIMITS, now)
    return after, [a.order for a in actions]


# --- Absent, Starting


@pytest.mark.parametrize("reason", list(GateReason))
def test_an_engine_starts_only_on_a_replica_that_is_known(reason: GateReason) -> None:
    verdict = GateVerdict(open=reason is GateReason.IDLE, reason=reason)
    after, done = orders(SlotMachine(), seen(verdict))
    started = reason in STARTABLE
    assert done == ([SlotOrder.ENSURE] if started else [])
    assert after.phase is (SlotPhase.STARTING if started else SlotPhase.ABSENT)


@pytest.mark.parametrize(
    "world",
    [seen(granted=False), seen(granted=None), seen(host_alive=False)],
    ids=["not granted", "nobody said yet", "host silent"],
)
def test_nothing_starts_without_grant_and_host(world: SlotSeen) -> None:
    after, done = orders(SlotMachine(), world)
    assert (after.phase, done) == (SlotPhase.ABSENT, [])


def test_ensure_is_repeated_until_the_host_lists_the_engine() -> None:
    state, done = orders(SlotMachine(), seen())
    assert done == [SlotOrder.ENSURE]
    state, done = orders(state, seen(), NOW + S)
    assert done == []
    state, done = orders(state, seen(), NOW + 2 * S)
    assert done == [SlotOrder.ENSURE]
    state, done = orders(state, seen(OPEN, engine(EngineState.STARTING)), NOW + 3 * S)
    assert (state.phase, done) == (SlotPhase.PRESENT, [SlotOrder.EXTEND])


def test_a_first_sight_under_a_closed_gate_starts_the_ladder_now() -> None:
    """Deadlines count from the first sight: nothing is frozen or killed for an old date."""
    state, done = orders(SlotMachine(), seen(shut(), engine()))
    assert done == [SlotOrder.CLOSE, SlotOrder.HOLD]
    assert state.since_ns == NOW


def test_a_newer_generation_is_ordered_anew() -> None:
    state, done = orders(STOPPED, seen(OPEN, engine(generation=1), generation=2))
    assert done == [SlotOrder.CLOSE, SlotOrder.ENSURE]
    state, done = orders(state, seen(OPEN, engine(generation=1), generation=2), NOW + S)
    assert done == [SlotOrder.CLOSE]


def test_other_weights_are_told_beside_everything_else_until_the_host_has_them() -> None:
    for verdict, before, beside in (
        (OPEN, PRESENT, SlotOrder.EXTEND),
        (shut(), STOPPED, SlotOrder.CLOSE),
    ):
        news = replace(seen(verdict, engine(held=not verdict.open)), weights_sent=False)
        state, done = orders(before, news)
        assert done == [beside, SlotOrder.ENSURE]
        state, done = orders(state, news, NOW + S)
        assert done == [beside]
        state, done = orders(state, news, NOW + 2 * S)
        assert done == [beside, SlotOrder.ENSURE]
        state, done = orders(state, replace(news, weights_sent=True), NOW + 3 * S)
        assert done == [beside]
        _, done = orders(state, news, NOW + 3 * S + MS)  # other news wait for nothing
        assert done == [beside, SlotOrder.ENSURE]
    lost = replace(seen(OPEN, engine(), granted=False), weights_sent=False)
    assert SlotOrder.ENSURE not in orders(PRESENT, lost)[1]


# --- open


def test_an_open_gate_extends_the_permit_by_its_length_and_no_more() -> None:
    _, actions = decide(PRESENT, seen(OPEN, engine()), LIMITS, NOW)
    assert [(a.order, a.until_ns) for a in actions] == [(SlotOrder.EXTEND, NOW + LIMITS.permit_ns)]


def test_a_permit_carries_the_chunks_that_its_certificate_holds_for() -> None:
    short = replace(OPEN, chunk_divisor=4)
    _, actions = decide(PRESENT, seen(short, engine()), LIMITS, NOW)
    assert actions[0].chunk_divisor == 4


def test_a_duty_bounds_the_permit() -> None:
    verdict = GateVerdict(open=True, reason=GateReason.SLACK, until_ns=NOW + 30 * MS, duty=0.3)
    _, actions = decide(PRESENT, seen(verdict, engine()), LIMITS, NOW)
    assert actions[0].until_ns == NOW + 30 * MS


def test_opening_lets_go_first_and_again_until_confirmed() -> None:
    state, done = orders(STOPPED, seen(OPEN, engine(held=True)))
    assert (state.rung, done) == (Rung.NONE, [SlotOrder.LET_GO, SlotOrder.EXTEND])
    state, done = orders(state, seen(OPEN, engine(held=True)), NOW + 20 * MS)
    assert done == [SlotOrder.EXTEND]
    state, done = orders(state, seen(OPEN, engine(held=True)), NOW + 120 * MS)
    assert done == [SlotOrder.LET_GO, SlotOrder.EXTEND]


def test_what_the_guard_froze_is_handed_to_the_host_until_it_runs() -> None:
    frozen = replace(STOPPED, self_frozen=True)
    stuck = seen(OPEN, engine(frozen=True))
    state, done = orders(frozen, stuck)
    assert done == [SlotOrder.HOLD]
    held = seen(OPEN, engine(held=True))
    state, done = orders(state, held, NOW + 110 * MS)
    assert done == [SlotOrder.LET_GO, SlotOrder.EXTEND]
    state, done = orders(state, stuck, NOW + 150 * MS)
    assert done == [SlotOrder.EXTEND], "the host gets its time"
    state, done = orders(state, stuck, NOW + 220 * MS)
    assert done == [SlotOrder.HOLD], "and another round"
    state, done = orders(state, seen(OPEN, engine()), NOW + 400 * MS)
    assert (done, state.self_frozen) == ([SlotOrder.EXTEND], False)


# --- closing: rungs 1 and 2


def test_closing_shuts_the_permit_and_holds() -> None:
    state, done = orders(PRESENT, seen(shut(), engine()))
    assert (state.rung, done) == (Rung.STOP, [SlotOrder.CLOSE, SlotOrder.HOLD])
    state, done = orders(state, seen(shut(), engine(held=True)), NOW + 20 * MS)
    assert done == [SlotOrder.CLOSE]


def test_the_pause_of_a_duty_cycle_needs_the_permit_alone() -> None:
    state, done = orders(PRESENT, seen(shut(GateReason.SLACK), engine()))
    assert (state.rung, done) == (Rung.NONE, [SlotOrder.CLOSE])


def test_a_host_that_does_not_hold_is_replaced_by_the_guard_then_by_death() -> None:
    state, _ = orders(PRESENT, seen(shut(), engine()))
    state, done = orders(state, seen(shut(), engine()), NOW + 150 * MS)
    assert done == [SlotOrder.CLOSE, SlotOrder.HOLD]
    state, done = orders(state, seen(shut(), engine()), NOW + 250 * MS)
    assert done == [SlotOrder.CLOSE, SlotOrder.HOLD, SlotOrder.FREEZE]
    state, done = orders(state, seen(shut(), engine()), NOW + 270 * MS)
    assert done == [SlotOrder.CLOSE], "once per repeat"
    _, done = orders(state, seen(shut(), engine(frozen=True)), NOW + 6 * S)
    assert SlotOrder.KILL not in done, "frozen is stopped"
    state, done = orders(state, seen(shut(), engine()), NOW + 5251 * MS)
    assert SlotOrder.KILL in done, "nobody knows what it computes"
    state, done = orders(state, seen(shut(), engine()), NOW + 5300 * MS)
    assert SlotOrder.KILL not in done, "once"


def test_a_tree_that_is_late_is_killed_for_computing_not_for_waiting() -> None:
    state, _ = orders(PRESENT, seen(shut(), engine()))
    waits = replace(engine(), cpu_ns=7 * S)
    for second in range(6, 60):
        state, done = orders(state, seen(shut(), waits), NOW + second * S)
        assert SlotOrder.KILL not in done
    computes = replace(waits, cpu_ns=7 * S + 101 * MS)
    assert SlotOrder.KILL in orders(state, seen(shut(), computes), NOW + 60 * S)[1]
    assert SlotOrder.KILL in orders(state, seen(shut(), waits), NOW + 61 * S)[1], "it hangs"


# --- host gone


def test_a_stale_heartbeat_freezes_at_once_and_kills_in_the_end() -> None:
    stale = seen(OPEN, engine(), heartbeat_ms=151)
    state, done = orders(PRESENT, stale)
    assert (state.rung, done) == (Rung.STOP, [SlotOrder.CLOSE, SlotOrder.FREEZE])
    state, done = orders(state, stale, NOW + 50 * MS)
    assert done == [SlotOrder.CLOSE]
    state, done = orders(state, stale, NOW + 110 * MS)
    assert done == [SlotOrder.CLOSE, SlotOrder.FREEZE]
    state, done = orders(state, stale, NOW + 15 * S)
    assert SlotOrder.KILL in done


def test_a_host_that_is_back_takes_over_what_was_frozen() -> None:
    state, _ = orders(PRESENT, seen(OPEN, engine(), heartbeat_ms=200))
    state, done = orders(state, seen(OPEN, engine(frozen=True)), NOW + 200 * MS)
    assert done == [SlotOrder.HOLD]
    assert state.stale_ns == 0


def test_processes_of_an_engine_nobody_lists_are_frozen() -> None:
    world = seen(OPEN, None, host_alive=False, heartbeat_ms=None, processes=True)
    _, done = orders(SlotMachine(), world)
    assert done == [SlotOrder.CLOSE, SlotOrder.FREEZE]


# --- vacating: rung 5


@pytest.mark.parametrize("reason", sorted(VACATING - {GateReason.SERVING_NOT_READY}))
def test_vacating_reasons_go_straight_to_the_last_rung(reason: GateReason) -> None:
    granted = reason is not GateReason.NOT_GRANTED
    state, done = orders(PRESENT, seen(shut(reason), engine(), granted=granted))
    assert (state.phase, state.rung) == (SlotPhase.RELEASING, Rung.TERMINATE)
    assert done == [SlotOrder.CLOSE, SlotOrder.STOP]


def test_a_lost_grant_vacates_and_an_unheard_one_waits_closed() -> None:
    state, done = orders(PRESENT, seen(OPEN, engine(), granted=False))
    assert (state.phase, done) == (SlotPhase.RELEASING, [SlotOrder.CLOSE, SlotOrder.STOP])
    state, done = orders(PRESENT, seen(OPEN, engine(), granted=None))
    assert (state.phase, done) == (SlotPhase.PRESENT, [SlotOrder.CLOSE, SlotOrder.HOLD])


def test_unready_serving_closes_at_once_and_vacates_when_it_lasts() -> None:
    unready = seen(shut(GateReason.SERVING_NOT_READY), engine(held=True))
    state, done = orders(PRESENT, unready)
    assert (state.phase, done) == (SlotPhase.PRESENT, [SlotOrder.CLOSE])
    flicker, _ = orders(state, seen(OPEN, engine()), NOW + S)
    assert flicker.unready_ns == 0
    state, done = orders(state, unready, NOW + 3 * S)
    assert (state.phase, SlotOrder.STOP in done) == (SlotPhase.RELEASING, True)


def test_release_repeats_stop_then_kills_then_cordons() -> None:
    world = seen(shut(GateReason.SERVING_GONE), engine())
    state, done = orders(PRESENT, world)
    assert done == [SlotOrder.CLOSE, SlotOrder.STOP]
    state, done = orders(state, world, NOW + S // 2)
    assert done == [SlotOrder.CLOSE]
    state, done = orders(state, world, NOW + S)
    assert done == [SlotOrder.CLOSE, SlotOrder.STOP]
    state, done = orders(state, world, NOW + 6 * S)
    assert done == [SlotOrder.CLOSE, SlotOrder.STOP, SlotOrder.KILL]
    state, done = orders(state, seen(OPEN, None), NOW + 7 * S)
    assert (state.phase, done) == (SlotPhase.ABSENT, []), "cordoned"
    assert state.cordon_until_ns == NOW + 7 * S + 30 * S
    state, done = orders(state, seen(OPEN, None), NOW + 38 * S)
    assert done == [SlotOrder.ENSURE]


def test_a_clean_release_needs_no_cordon() -> None:
    state, _ = orders(PRESENT, seen(shut(GateReason.STOP_REQUESTED), engine()))
    state, done = orders(state, seen(OPEN, engine(EngineState.GONE)), NOW + S)
    assert (state.phase, done) == (SlotPhase.STARTING, [SlotOrder.ENSURE])


def test_release_does_not_change_its_mind() -> None:
    state, _ = orders(PRESENT, seen(shut(GateReason.STOP_REQUESTED), engine()))
    state, done = orders(state, seen(OPEN, engine()), NOW + 10 * MS)
    assert (state.phase, done) == (SlotPhase.RELEASING, [SlotOrder.CLOSE])


def test_release_freezes_when_the_host_is_dead() -> None:
    world = seen(shut(GateReason.STOP_REQUESTED), engine(), heartbeat_ms=500)
    _, done = orders(PRESENT, world)
    assert done == [SlotOrder.CLOSE, SlotOrder.FREEZE, SlotOrder.STOP]


# --- memory: rung 4


def test_memory_pressure_releases_weights_where_the_engine_can() -> None:
    world = seen(shut(GateReason.MEMORY_PRESSURE), engine(held=True), can_dormant=True)
    state, done = orders(PRESENT, world)
    assert (state.rung, done) == (Rung.DORMANT, [SlotOrder.CLOSE, SlotOrder.DORMANT])
    dormant = seen(
        shut(GateReason.MEMORY_PRESSURE), engine(EngineState.DORMANT, held=True), can_dormant=True
    )
    state_after, done = orders(state, dormant, NOW + 6 * S)
    assert (state_after.phase, done) == (SlotPhase.PRESENT, [SlotOrder.CLOSE])
    late, done = orders(state, world, NOW + 5 * S)
    assert (late.phase, SlotOrder.STOP in done) == (SlotPhase.RELEASING, True)


def test_memory_pressure_ends_an_engine_that_cannot() -> None:
    state, done = orders(PRESENT, seen(shut(GateReason.MEMORY_PRESSURE), engine(held=True)))
    assert (state.phase, done) == (SlotPhase.RELEASING, [SlotOrder.CLOSE, SlotOrder.STOP])


def test_a_dormant_engine_is_activated_once_it_is_let_go() -> None:
    dormant = EngineState.DORMANT
    state, done = orders(STOPPED, seen(OPEN, engine(dormant, held=True)))
    assert done == [SlotOrder.LET_GO, SlotOrder.EXTEND]
    state, done = orders(state, seen(OPEN, engine(dormant)), NOW + 150 * MS)
    assert done == [SlotOrder.EXTEND, SlotOrder.ACTIVATE]
    state, done = orders(state, seen(OPEN, engine(dormant)), NOW + 200 * MS)
    assert done == [SlotOrder.EXTEND]
    _, done = orders(state, seen(OPEN, engine()), NOW + 300 * MS)
    assert done == [SlotOrder.EXTEND]


def test_a_dormant_engine_stays_so_while_the_gate_is_closed() -> None:
    _, done = orders(STOPPED, seen(shut(), engine(EngineState.DORMANT, held=True)))
    assert done == [SlotOrder.CLOSE]


# --- always


def test_no_history_extends_a_permit_that_must_not_be_open() -> None:
    draw = random.Random(3)
    reasons = list(GateReason)
    for _ in range(300):
        state, now = SlotMachine(), NOW
        for _ in range(60):
            now += draw.randrange(1, 400) * MS
            reason = draw.choice(reasons)
            is_open = reason in {GateReason.IDLE, GateReason.SLACK} and draw.random() < 0.8
            found = None
            if draw.random() < 0.8:
                found = engine(
                    draw.choice(list(EngineState)),
                    held=draw.random() < 0.5,
                    frozen=draw.random() < 0.3,
                    generation=draw.choice([1, 1, 2]),
                )
            world = seen(
                GateVerdict(open=is_open, reason=reason, duty=1.0),
                found,
                granted=draw.choice([True, True, True, False, None]),
                host_alive=draw.random() < 0.9,
                heartbeat_ms=draw.choice([None, 1, 1, 1, 400]),
                processes=draw.random() < 0.2,
                generation=2,
            )
            state, actions = decide(state, world, LIMITS, now)
            extended = [a for a in actions if a.order is SlotOrder.EXTEND]
            if extended:
                assert world.granted
                assert is_open
                assert state.phase is SlotPhase.PRESENT
                assert extended[0].until_ns <= now + LIMITS.permit_ns
                assert world.heartbeat_ns is None or world.heartbeat_ns < LIMITS.host_stale_ns
                assert SlotOrder.CLOSE not in {a.order for a in actions}


def test_an_unanswered_hold_is_taken_back_when_the_gate_opens() -> None:
    state, done = orders(STOPPED, seen(OPEN, replace(engine(), asked=True)))
    assert done == [SlotOrder.LET_GO, SlotOrder.EXTEND]
    _, done = orders(state, seen(OPEN, engine()), NOW + 20 * MS)
    assert done == [SlotOrder.EXTEND], "asked once"


def test_a_stop_of_900_seconds_with_brief_thaws_needs_no_kill_and_ends_by_itself() -> None:
    """Thaws shorter than an iteration are the risky ones for watchdogs: nothing gets done."""
    state, held, done = PRESENT, False, list[SlotOrder]()
    now, end = NOW, NOW + 900 * S
    while now < end:
        thawed = (now - NOW) % (10 * S) >= 10 * S - 60 * MS
        state, orders_now = orders(
            state, seen(OPEN if thawed else shut(), engine(held=held, frozen=False)), now
        )
        done += orders_now
        for order in orders_now:
            held = order is SlotOrder.HOLD or (held and order is not SlotOrder.LET_GO)
        now += 40 * MS
    assert {SlotOrder.FREEZE, SlotOrder.KILL, SlotOrder.STOP, SlotOrder.DORMANT}.isdisjoint(done)
    assert done.count(SlotOrder.HOLD) == done.count(SlotOrder.LET_GO) == 90
    assert (state.rung, state.failures, state.self_frozen) == (Rung.NONE, 0, False)


# --- steps that can be left out


def worlds() -> list[SlotSeen]:
    """Every gate beside every engine, seen by a guard whose host lives."""
    gates = [OPEN, replace(OPEN, until_ns=NOW + S), *map(shut, GateReason)]
    engines = [
        replace(engine(state, held=held, frozen=frozen), asked=asked)
        for state in EngineState
        for held in (False, True)
        for frozen in (False, True)
        for asked in (False, True)
    ]
    return [
        replace(seen(gate, found, granted=granted, generation=generation), weights_sent=sent)
        for gate in gates
        for found in engines
        for granted in (True, None, False)
        for generation, sent in ((1, True), (2, True), (1, False))
    ]


def test_a_settled_slot_is_found_and_ordered_the_same_at_any_later_moment() -> None:
    """So a guard that has written its permit need not step it until something else is seen."""
    states = [
        *(PRESENT, STOPPED, SlotMachine()),
        *(replace(state, self_frozen=True) for state in (PRESENT, STOPPED)),
        replace(STOPPED, rung=Rung.DORMANT),
        replace(PRESENT, stale_ns=NOW - S, unready_ns=NOW - S, weights_sent_ns=NOW - S),
        SlotMachine(phase=SlotPhase.RELEASING, since_ns=NOW - S),
    ]
    settled = set()
    for state in states:
        for world in worlds():
            after, first = decide(state, world, LIMITS, NOW)
            if not is_settled(after, world):
                continue
            settled.add((world.verdict.open, world.verdict.reason))
            for later in (MS, 300 * MS, 10 * S, 3600 * S):
                again, actions = decide(after, world, LIMITS, NOW + later)
                (order,) = actions
                assert again == after, "nothing runs out"
                assert order.order is (SlotOrder.EXTEND if world.verdict.open else SlotOrder.CLOSE)
                assert not world.verdict.until_ns or order.until_ns <= world.verdict.until_ns
                assert order in first or order.order is SlotOrder.EXTEND
    assert (True, GateReason.IDLE) in settled
    assert {(False, GateReason.SERVING_BUSY), (False, GateReason.SLACK)} < settled
    assert not settled & {(False, reason) for reason in (*VACATING, GateReason.MEMORY_PRESSURE)}
