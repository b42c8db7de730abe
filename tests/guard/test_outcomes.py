"""What finished requests teach, and when they open the breaker."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from rose_agent.guard.flight.recorder import Recorder
from rose_agent.guard.replicas.outcomes import Outcomes
from rose_agent.guard.replicas.pools import PoolState
from rose_agent.metrics import REGISTRY
from rose_core.guard.certificate import CHUNK_DIVISORS
from rose_core.guard.crossover import Cycles, Schedule
from rose_core.guard.trial import added
from rose_core.identity import PodUid
from rose_core.telemetry.book import FinishedRequest
from rose_core.telemetry.events import Arrived, Dismissed, EndKind, FirstToken, Sized
from rose_core.wire.sync import PoolPolicy
from tests.guard.worlds import MS, NOW, S

POD = PodUid("pod")

POLICY = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, ttft_milliseconds=100, tpot_milliseconds=20)
UNDIVIDED = Schedule()


class World:
    """One replica's outcomes, and what it called for."""

    def __init__(
        self,
        policy: PoolPolicy = POLICY,
        schedule: Schedule = UNDIVIDED,
        draw: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.policy, self.now, self.number = policy, NOW, 0
        self.recorder = Recorder()
        self.breaches: list[str] = []
        self.pool = PoolState(name=policy.pool)
        self.outcomes = Outcomes(
            *("pod", self.pool, self.recorder, self.breaches.append),
            now_ns=self.now,
            cycles=Cycles(schedule, draw),
        )

    def request(
        self,
        *,
        ttft_ms: int = 50,
        tpot_ms: int = 10,
        tokens: int = 11,
        is_open: bool = False,
        lent: bool = True,
        share: float = 1.0,
    ) -> None:
        """One request from arrival to end; the gate may be open for the first part of it."""
        self.number += 1
        start, number = self.now, self.number
        first = start + ttft_ms * MS
        end = first + tpot_ms * (tokens - 1) * MS
        self.outcomes.is_withheld(self.policy, start, lent=lent)
        until = start + round(share * (end - start))
        self.outcomes.open_time.note(until if is_open else 0, start)
        self.outcomes.observe(Arrived(POD, number, start, "/generate"), start)
        self.outcomes.observe(Sized(POD, number, 400), start)
        self.outcomes.observe(FirstToken(POD, number, first), first)
        done = FinishedRequest(
            number, start, first, end, 400, tokens, 200, EndKind.COMPLETE, "/generate"
        )
        self.outcomes.record(done, self.policy, lent=lent, others=0)
        self.outcomes.open_time.note(0, end)
        self.now = end + 10 * MS

    def noted(self, what: str) -> list[dict[str, object]]:
        return [details for _, _, name, details in self.recorder.entries() if name == what]


def test_alone_and_beside_a_rollout_engine_are_learned_apart() -> None:
    world = World()
    for _ in range(60):
        world.request(tpot_ms=5)
        world.request(tpot_ms=15, is_open=True)
    predictor = world.outcomes.predictor
    assert 0.004 < predictor.decode_s(1, shared=False) < 0.008
    assert 0.012 < predictor.decode_s(1, shared=True) < 0.022
    assert {d["shared"] for d in world.noted("finished")} == {0.0, 1.0}


def test_a_prediction_is_noted_when_the_size_is_known() -> None:
    world = World()
    world.request()
    (noted,) = world.noted("predicted")
    assert noted["size"] == 400
    assert set(noted) == {"request", "size", "alone", "shared"}


def test_only_a_slow_request_that_met_an_open_gate_is_a_breach() -> None:
    world = World()
    world.request(ttft_ms=300)
    assert world.breaches == []
    counters = world.outcomes.counters
    assert (counters.slow, counters.exposed) == (1, 0)
    world.request(ttft_ms=300, is_open=True)
    assert world.breaches == ["slow-request"]
    assert (counters.slow, counters.exposed, counters.finished) == (2, 1, 2)


def test_a_burning_budget_opens_the_pools_breaker_once_and_says_who_was_exposed() -> None:
    world = World()
    for _ in range(40):
        world.request()
    assert not world.pool.breaker.open(world.now)
    for _ in range(4):
        world.request(ttft_ms=300)
    assert world.pool.breaker.open(world.now)
    (breaker,) = world.noted("breaker")
    assert breaker["cause"] == "error-budget"
    assert breaker["exposed"] == 0, "slow, but not beside an open gate"
    assert world.breaches == ["error-budget"]
    assert not world.pool.breaker.open(world.now + 301 * S)


def test_without_an_slo_nothing_burns() -> None:
    world = World(PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1))
    for _ in range(50):
        world.request(ttft_ms=5000, is_open=True)
    assert not world.pool.breaker.open(world.now)
    assert world.outcomes.margin.value == 0.2, "nothing to compare, nothing learned"


def test_the_margin_follows_requests_that_met_an_open_gate() -> None:
    world = World()
    for _ in range(10):
        world.request()
    assert world.outcomes.margin.value == 0.2
    for _ in range(10):
        world.request(is_open=True)
    assert world.outcomes.objective(POLICY).margin < 0.2


def test_a_stutter_of_the_machine_is_no_reason_to_lend_less() -> None:
    """Three times the SLO beside a gate that was open for an eighth of it, and for all of it."""
    stutter, harm = World(), World()
    stutter.request(tpot_ms=60, is_open=True, share=0.2)
    harm.request(tpot_ms=60, is_open=True)
    assert stutter.outcomes.margin.value == 0.2
    assert harm.outcomes.margin.value > 0.2


def test_harm_is_judged_against_unlent_replicas_of_the_pool() -> None:
    policy = PoolPolicy("chat/pool", "Lend", {"a": "b"}, 1, max_increase_percent=10)
    world = World(policy)
    for _ in range(50):
        world.request(lent=False)
    for _ in range(50):
        world.request(tpot_ms=15, is_open=True)
    assert world.pool.judged == "un-lent replicas"
    assert world.pool.breaker.cause == "latency-increase"
    assert world.breaches == ["latency-increase"]
    windows = {d["window"] for d in world.noted("finished")}
    assert windows == {"un-lent", "lent"}


def test_a_new_replica_begins_with_what_its_pool_has_taught() -> None:
    world = World()
    for _ in range(60):
        world.request(tpot_ms=5)
    fresh = Outcomes(
        *("new", world.pool, world.recorder, world.breaches.append, world.now),
        cycles=Cycles(UNDIVIDED, lambda: 1.0),
    )
    stranger = World().outcomes
    learned = fresh.predictor.decode_s(1, shared=False)
    assert learned == world.outcomes.predictor.decode_s(1, shared=False)
    assert learned < 0.8 * stranger.predictor.decode_s(1, shared=False)


def test_a_dismissed_or_forgotten_request_leaves_no_mark() -> None:
    world = World()
    world.outcomes.observe(Arrived(POD, 1, NOW, ""), NOW)
    world.outcomes.observe(Dismissed(POD, 1), NOW)
    world.outcomes.observe(Arrived(POD, 2, NOW, ""), NOW)
    world.outcomes.forget()
    world.outcomes.observe(FirstToken(POD, 2, NOW), NOW)
    assert world.outcomes.experience.followed == 0


def test_the_agent_learns_the_stop_and_counts_what_was_promised() -> None:
    world = World()
    for _ in range(20):
        world.request(ttft_ms=40)
        for chunk_divisor in CHUNK_DIVISORS:
            world.outcomes.note_stop(75 * MS, chunk_divisor)
    first = world.outcomes.certificate(world.policy, whole=False)
    assert first is not None
    assert not first.holds, "40 + 75 ms do not fit into 100"
    for _ in range(200):
        world.outcomes.note_stop(15 * MS, 1)
    then = world.outcomes.certificate(world.policy, whole=False)
    assert then is not None
    assert then.holds, "40 + 15 ms do"
    world.request(ttft_ms=40, is_open=True)
    world.request(ttft_ms=90, is_open=True)
    assert (world.outcomes.certified.requests, world.outcomes.certified.exceeded) == (2, 1)
    labels = {"pool": POLICY.pool, "exceeded": "true"}
    assert REGISTRY.get_sample_value("rose_guard_certified_requests_total", labels) == 1


def test_windows_of_a_pool_are_a_trial_of_its_own() -> None:
    world = World(schedule=Schedule(1.0))
    for _ in range(200):
        world.request(ttft_ms=20, tpot_ms=1)
    trial = world.pool.trial
    assert trial.lent > 50
    assert trial.withheld > 50
    assert (trial.lent_slow, trial.withheld_slow) == (0, 0)
    harm = added(trial)
    assert harm is not None
    assert harm.most == 0
    assert not harm.proven


def test_outcomes_of_a_trial_are_counted_by_window_for_the_alert() -> None:
    """Without withheld windows nothing is drawn, and the alert has nothing to compare."""
    policy = PoolPolicy("chat/drawn", "Lend", {"a": "b"}, 1, ttft_milliseconds=100)
    world = World(policy)
    for _ in range(20):
        world.request(ttft_ms=300)
    assert drawn("lent", "false") == 0
    world = World(
        msgspec.structs.replace(policy, withheld_percent=30), draw=random.Random(3).random
    )
    for _ in range(100):
        world.request(ttft_ms=300, tokens=2)
        world.request(ttft_ms=20, tokens=2)
    trial = world.pool.trial
    assert drawn("lent", "false") == trial.lent_slow > 0
    assert drawn("withheld", "false") == trial.withheld_slow > 0
    assert drawn("lent", "true") == trial.lent - trial.lent_slow > 0


def drawn(window: str, met: str) -> float:
    labels = {"pool": "chat/drawn", "window": window, "met": met}
    return REGISTRY.get_sample_value("rose_guard_trial_outcomes_total", labels) or 0
