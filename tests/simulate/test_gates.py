"""One replica: who stops rollouts when, and what serving feels of it."""

from collections.abc import Callable

import pytest

import rose_core.guard.gate
from rose_core.guard.budget import BurnLimits
from rose_core.guard.chunk import prefill_chunk
from rose_core.guard.gate import GateLimits, GateVerdict, ReplicaFacts, judge
from rose_core.guard.ladder import LadderLimits
from rose_core.guard.reasons import GateReason
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.cluster.lent import LentReplica, ReplicaCallbacks
from rose_simulate.model.gpus import guarded
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.gpus.guarded import GuardedGate
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.costs import costs_of
from rose_simulate.model.scenarios.scenario import Interference, Regime
from tests.simulate.worlds import scenario


class Bench:
    def __init__(self, regime: Regime, slower: Interference | None = None) -> None:
        self.clock = VirtualClock()
        self.moves: list[tuple[float, bool]] = []
        setup = scenario()
        if slower is not None:
            setup = setup.model_copy(update={"interference": slower})
        ears = ReplicaCallbacks(self._gate, lambda _replica, _lost: None, self._served)
        self.replica = LentReplica(
            self.clock, 0, setup.services[0], setup, rules=RULES[regime], ears=ears
        )
        self.replica.lend(setup.jobs[0])

    def _gate(self, _replica: LentReplica, is_open: bool) -> None:
        self.moves.append((self.clock.now_s, is_open))

    def _served(self, _replica: LentReplica, engine: BatchEngine) -> None:
        for name in "abcd":
            engine.submit(Sequence(name, 8000, 20_000, lambda: None, lambda: None))

    def serve(self, at_s: float, prompt: int = 2000, output: int = 50) -> ServingRequest:
        request = ServingRequest(len(self.moves) + round(1000 * at_s), 0, prompt, output)

        def arrive() -> None:
            request.arrived_ns = self.clock.now_ns
            self.replica.serve(request)

        self.clock.at(round(at_s * SECOND), arrive)
        return request

    def run(self, until_s: float) -> None:
        self.clock.run(round(until_s * SECOND))
        self.replica.device.finish()


def test_ours_stops_for_a_request_and_reopens_after_it() -> None:
    bench = Bench(Regime.OURS)
    request = bench.serve(30.0)
    bench.run(60)
    closed = [at for at, is_open in bench.moves if not is_open]
    opened = [at for at, is_open in bench.moves if is_open]
    ended = request.ended_ns / SECOND
    assert closed == [pytest.approx(30.001)]
    assert opened[0] < 10
    assert ended + 0.05 <= opened[1] <= ended + 0.2
    assert 0 < bench.replica.device.shared_ns < 0.1 * SECOND


@pytest.mark.parametrize("slower", [1.15, 2.0])
def test_a_guard_that_lends_gaps_learns_what_co_running_costs(slower: float) -> None:
    bench = Bench(Regime.OURS, Interference(serving_slowdown=slower, rollout_slowdown=1.4))
    for number in range(150):
        bench.serve(30.0 + 1.37 * number, prompt=300 + 10 * number, output=4)
    bench.run(260)
    assert bench.replica.gate.slowdown == pytest.approx(slower, abs=0.1)
    assert Bench(Regime.UNGUARDED).replica.gate.slowdown == 0.0, "nobody measures it there"


def test_an_engine_without_turns_teaches_nothing_of_what_co_running_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Bench, "_served", lambda *_: None)
    bench = Bench(Regime.OURS)
    for number in range(150):
        bench.serve(30.0 + 1.37 * number, prompt=300 + 10 * number, output=4)
    bench.run(260)
    assert bench.moves, "the gate has opened and closed"
    *_, stops = _gate_of(bench)._experience.lessons.stopping.squares
    assert stops == 0


def _gate_of(bench: Bench) -> GuardedGate:
    gate = bench.replica.gate
    assert isinstance(gate, GuardedGate)
    return gate


def _trip(bench: Bench) -> None:
    budget, now = _gate_of(bench)._budget, bench.clock.now_ns
    budget.breaker = budget.breaker.trip("test", now, BurnLimits(rest_ns=10 * SECOND))


HAPPENS: dict[str, Callable[[Bench], None]] = {
    "nothing": lambda bench: None,
    "the slot is taken back": lambda bench: bench.replica.lend(None),
    "the engine ends": lambda bench: _gate_of(bench).crash(),
    "the breaker opens": _trip,
}


def _busy(
    happens: Callable[[Bench], None], *, leaves_out: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[object], dict[GateReason, int]]:
    """How often the policy was asked when requests overlap, and what happened."""
    states: list[object] = []
    asked = 0

    def judged(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
        nonlocal asked
        asked += 1
        return judge(facts, limits, now_ns)

    with monkeypatch.context() as patch:
        patch.setattr(guarded, "judge", judged)
        if not leaves_out:
            patch.setattr(GuardedGate, "_still", lambda *_: False)
        bench = Bench(Regime.OURS)
        # A train in a quiet minute, then so many that no gap is left and slack decides.
        times = [30 + 0.05 * n for n in range(20)] + [50 + 0.4 * n for n in range(40)]
        requests = [bench.serve(at, output=80) for at in times]
        bench.clock.at(round(30.525 * SECOND), lambda: happens(bench))  # its engine is held
        for tick in range(800):
            at = tick * SECOND // 10
            bench.clock.at(at, lambda: states.append(_gate_of(bench).host.state))
        bench.run(80)
    ends = [(one.first_ns, one.ended_ns) for one in requests]
    return asked, [ends, bench.moves, states], _gate_of(bench).verdicts


@pytest.mark.parametrize("what", HAPPENS)
def test_steps_that_are_left_out_would_have_changed_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, found, verdicts = _busy(HAPPENS[what], leaves_out=True, monkeypatch=monkeypatch)
    many, whole, others = _busy(HAPPENS[what], leaves_out=False, monkeypatch=monkeypatch)
    assert (found, verdicts) == (whole, others)
    assert few < many
    if what == "nothing":
        assert GateReason.SLACK in verdicts, "slack decided at times"


def test_nothing_is_lent_when_productions_gate_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulator holds no rule of its own: whatever the guard's judge says is what happens.
    no = rose_core.guard.gate.closed(rose_core.guard.reasons.GateReason.BREAKER_OPEN)
    monkeypatch.setattr(guarded, "judge", lambda *_: no)
    bench = Bench(Regime.OURS)
    bench.run(60)
    assert not bench.moves
    assert bench.replica.device.computing_ns == 0


def _ttft(regime: Regime) -> float:
    bench = Bench(regime)
    request = bench.serve(30.0)
    bench.run(60)
    return request.ttft_s


def test_serving_feels_each_regime_in_the_expected_order() -> None:
    alone, ours = _ttft(Regime.CLAIRVOYANT), _ttft(Regime.OURS)
    polled, unguarded = _ttft(Regime.POLLED), _ttft(Regime.UNGUARDED)
    assert alone < ours < 0.75 * polled
    # A polled source shows a request only after its first prefill.
    assert polled == pytest.approx(unguarded, rel=0.05)


def test_the_papers_rules_stop_only_without_slack() -> None:
    bench = Bench(Regime.ROSE_PAPER)
    bench.serve(30.0, prompt=500)
    bench.run(40)
    assert [is_open for _, is_open in bench.moves] == [True]
    for _ in range(6):
        bench.serve(45.0, prompt=7000)
    bench.run(60)
    assert False in [is_open for _, is_open in bench.moves]
    assert bench.moves[-1][1]


def test_a_dead_guard_lends_nothing_until_it_is_back() -> None:
    bench = Bench(Regime.OURS)
    bench.clock.at(20 * SECOND, lambda: bench.replica.gate.on_guard_death(10.0))
    bench.run(60)
    assert [is_open for _, is_open in bench.moves] == [True, False, True]
    assert bench.moves[1][0] == pytest.approx(20 + LadderLimits().permit_ns / SECOND, abs=0.01)
    assert 30 <= bench.moves[2][0] < 31


@pytest.mark.parametrize("regime", [Regime.OURS, Regime.UNGUARDED, Regime.ROSE_PAPER])
def test_a_crashed_engine_is_started_again(regime: Regime) -> None:
    bench = Bench(regime)
    bench.clock.at(20 * SECOND, bench.replica.gate.crash)
    bench.run(60)
    assert [is_open for _, is_open in bench.moves] == [True, False, True]


def test_a_slot_taken_back_ends_the_engine() -> None:
    bench = Bench(Regime.OURS)
    bench.clock.at(20 * SECOND, lambda: bench.replica.lend(None))
    bench.run(60)
    assert bench.replica.device.rollout is None
    assert not bench.replica.gate.is_open


def test_what_is_launched_ends_by_itself_and_nothing_follows_it() -> None:
    bench = Bench(Regime.OURS)
    bench.serve(30.0)
    bench.run(60)
    setup = scenario()
    engine = bench.replica.device.rollout
    assert engine is not None
    own = costs_of(setup.jobs[0], "H100", 1, setup.derate, attention=True)
    step = own.step(4, 4 * 9000)[0]
    most = setup.delays.tap_s + setup.delays.close_s + 2.0 * step  # at half speed beside serving
    assert 0 < bench.replica.device.shared_ns <= most * SECOND


@pytest.mark.parametrize("regime", [Regime.OURS, Regime.ROSE_PAPER])
def test_chunks_are_productions_beside_its_guard_and_the_papers_beside_its_own(
    regime: Regime,
) -> None:
    bench = Bench(regime)
    bench.run(90)
    engine = bench.replica.device.rollout
    assert engine is not None
    ours = prefill_chunk(scenario().contexts.most)
    assert engine.quantum == (ours if regime is Regime.OURS else 512)
    assert ours < 512
