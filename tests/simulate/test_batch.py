import pytest

from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.scenarios.costs import (
    ModelCosts,
    costs,
    kv_tokens,
    pairs,
    steps_in,
    time_of,
)

COSTS = costs("H100", "Qwen3-8B", 0.5)


class Bench:
    def __init__(self, kv: int = 400_000, costs: ModelCosts = COSTS) -> None:
        self.clock = VirtualClock()
        self.flips = 0
        self.engine = BatchEngine(self.clock, costs, kv, self._flip)
        self.first: dict[str, float] = {}
        self.done: dict[str, float] = {}

    def _flip(self) -> None:
        self.flips += 1

    def submit(self, name: str, context: int = 1000, left: int = 100) -> Sequence:
        sequence = Sequence(
            name,
            context,
            left,
            on_first=lambda: self.first.__setitem__(name, self.clock.now_s),
            on_done=lambda: self.done.__setitem__(name, self.clock.now_s),
        )
        self.engine.submit(sequence)
        return sequence

    def run(self, seconds: float = 1000.0) -> None:
        self.clock.run(round(seconds * SECOND))


def test_one_request_takes_prefill_and_its_steps() -> None:
    bench = Bench()
    bench.submit("a")
    bench.run()
    prefill = COSTS.prefill(1000, 0.0)
    decode = sum(COSTS.step(1, 1001 + n)[0] for n in range(99))
    assert bench.first["a"] == pytest.approx(prefill)
    assert bench.done["a"] == pytest.approx(prefill + decode, rel=1e-6)
    assert bench.engine.tokens == 100
    assert bench.flips == 2
    assert bench.engine.busy_ns == pytest.approx(bench.done["a"] * SECOND, rel=1e-6)


def test_sums_in_closed_form_equal_single_steps() -> None:
    first, growth = COSTS.step(16, 16 * 9000)
    single = sum(first + growth * n for n in range(700))
    assert time_of(first, growth, 700) == pytest.approx(single)
    for steps in (0, 1, 699, 700):
        assert steps_in(first, growth, time_of(first, growth, steps)) == steps


def test_a_stop_only_shifts_what_follows() -> None:
    plain, stopped = Bench(), Bench()
    for bench in (plain, stopped):
        bench.submit("a", left=300)
        bench.submit("b", 5000, 200)
    stopped.clock.after(0.9, lambda: stopped.engine.set_speed(0.0))
    stopped.clock.after(3.4, lambda: stopped.engine.set_speed(1.0))
    plain.run()
    stopped.run()
    for name in ("a", "b"):
        assert stopped.done[name] == pytest.approx(plain.done[name] + 2.5, abs=1e-6)


def test_half_speed_takes_twice_as_long() -> None:
    plain, slow = Bench(), Bench()
    slow.engine.set_speed(0.5)
    for bench in (plain, slow):
        bench.submit("a")
        bench.run()
    assert slow.done["a"] == pytest.approx(2 * plain.done["a"], abs=1e-6)


def test_a_newcomer_waits_for_the_step_under_way_and_is_prefilled_first() -> None:
    bench = Bench()
    bench.submit("a", left=1000)
    bench.clock.after(2.0, lambda: bench.submit("b", 2000, 10))
    bench.run()
    step = COSTS.step(1, 2000)[0]
    assert 0 <= bench.first["b"] - 2.0 - COSTS.prefill(2000, 0.0) <= step
    assert bench.done["b"] < bench.done["a"]


def test_what_was_produced_stays_when_a_request_is_taken_out() -> None:
    bench = Bench()
    sequence = bench.submit("a", left=500)
    bench.run(1.0)
    bench.engine.remove(sequence)
    assert 0 < sequence.produced < 500
    assert sequence.produced + sequence.left == 500
    assert bench.engine.live == 0
    assert not bench.engine.busy


def test_keys_of_a_session_are_kept_and_spare_its_prefill() -> None:
    bench = Bench()
    bench.submit("a", 4000, 50)
    bench.run(100)
    assert bench.engine.cached("a") == 4050
    later = bench.submit("a", 4100, 50)
    bench.run(200)
    assert later.uncached == 50


def test_a_full_pool_makes_wait_and_evicts_idle_sessions() -> None:
    bench = Bench(kv=5000)
    bench.submit("a", 3000, 100)
    bench.submit("b", 3000, 100)
    assert len(bench.engine.waiting) == 1
    bench.run()
    assert bench.first["b"] >= bench.done["a"]
    assert bench.engine.cached("a") == 0


def test_a_lost_engine_gives_back_what_was_in_it() -> None:
    bench = Bench()
    lost = [bench.submit("a"), bench.submit("b")]
    bench.run(0.5)
    assert set(map(id, bench.engine.clear())) == set(map(id, lost))
    bench.run(10)
    assert not bench.done


def test_costs_agree_with_the_published_single_gpu_figure() -> None:
    # Qwen3-8B on one H100, four streams: 7.38 ms per token (gpustack performance lab).
    step = costs("H100", "Qwen3-8B", 0.5).step(4, 4 * 1000)[0]
    assert step == pytest.approx(7.38e-3, rel=0.06)


@pytest.mark.parametrize("derate", [0.4, 0.5, 0.7])
def test_the_derate_bites_at_saturation_only(derate: float) -> None:
    full, derated = costs("H100", "Qwen3-14B", 1.0), costs("H100", "Qwen3-14B", derate)
    assert derated.step(1, 4000) == full.step(1, 4000)
    assert derated.step(64, 4000)[0] == pytest.approx(full.step(64, 4000)[0] / derate)


def test_prefill_pays_for_what_it_attends_to_only_where_it_is_told_to() -> None:
    without, reported = (costs("H100", "Qwen3-14B", 0.5, attention=pays) for pays in (False, True))
    new, after = pairs(1000), pairs(1000, 31_000)
    assert without.prefill(1000, new) == without.prefill(1000, after)
    assert reported.prefill(1000, 0.0) == without.prefill(1000, 0.0)
    assert reported.prefill(1000, new) < 1.05 * without.prefill(1000, new)
    # 40 layers of 5120: 26 billion operations for the 31,500 tokens before each, beside 30 of it.
    share = 4 * 40 * 5120 * 31_500 / 29.54e9
    rate = without.fit.prefill_tokens_per_s
    longer = reported.prefill(1000, after) - without.prefill(1000, after)
    assert longer == pytest.approx(share * 1000 / rate)


def test_a_prompt_in_two_parts_attends_to_as_much_as_in_one() -> None:
    assert pairs(3000) == pairs(1000) + pairs(2000, 1000)


def test_keys_that_are_there_are_attended_to_by_what_is_new() -> None:
    reported = costs("H100", "Qwen3-8B", 0.5, attention=True)
    bench = Bench(costs=reported)
    bench.submit("a", context=20_000, left=1)
    bench.run()
    alone = bench.first["a"]
    assert alone == pytest.approx(reported.prefill(20_000, pairs(20_000)), rel=1e-6)
    bench.submit("a", context=21_000, left=1)
    began = bench.clock.now_s
    bench.run(2000)
    new = 21_000 - 20_001  # the token that was written is there as well
    spent = bench.first["a"] - began
    assert spent == pytest.approx(reported.prefill(new, pairs(new, 20_001)), rel=1e-6)


def test_a_chunk_of_a_prefill_that_attends_to_much_is_longer_to_stop() -> None:
    reported = costs("H100", "Qwen3-8B", 0.5, attention=True)
    plain, slow = Bench(), Bench(costs=reported)
    for bench in (plain, slow):
        bench.submit("a", context=30_000)
        bench.run(0.001)
    stretch = reported.prefill(30_000, pairs(30_000)) / reported.prefill(30_000, 0.0)
    assert slow.engine.residual() + 0.001 == pytest.approx(
        (plain.engine.residual() + 0.001) * stretch
    )


def test_memory_left_for_keys() -> None:
    assert kv_tokens("H100", "Qwen3-32B", 0.5) == 0
    assert kv_tokens("H200", "Qwen3-8B", 0.5) > kv_tokens("H100", "Qwen3-8B", 0.5) > 100_000
