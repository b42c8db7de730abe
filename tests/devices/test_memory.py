"""What may be lent of a GPU's memory, and how an engine's budget follows serving's need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_core.devices.memory import (
    WHOLE,
    Budget,
    BudgetLimits,
    EngineSize,
    Headroom,
    HighWater,
    MemorySeen,
    lendable,
    steer,
)

GIB = 1 << 30
LIMITS = BudgetLimits()
FIFTH = Headroom(percent=20)
CALM = MemorySeen(free=30 * GIB, headroom=16 * GIB, serving_kv_permille=300)
TIGHT_KV = MemorySeen(free=30 * GIB, headroom=16 * GIB, serving_kv_permille=900)
SHORT = MemorySeen(free=3 * GIB, headroom=16 * GIB)


def test_lendable_is_what_serving_has_never_used_less_the_headroom() -> None:
    found = lendable(80 * GIB, 40 * GIB, FIFTH, residues=[2 * GIB])
    assert found.bytes == 22 * GIB
    assert found.message == (
        "80.0 GiB in all, serving used up to 40.0 GiB, headroom 16.0 GiB, dormant engines hold "
        "2.0 GiB: 22.0 GiB may be lent"
    )


def test_a_gpu_that_serving_fills_lends_nothing() -> None:
    assert lendable(80 * GIB, 76 * GIB, FIFTH).bytes == 0


@pytest.mark.parametrize(("total", "high"), [(None, 1), (1, None)])
def test_unknown_is_not_lendable(total: int | None, high: int | None) -> None:
    found = lendable(total, high, FIFTH)
    assert found.bytes is None
    assert found.refusal(0) == found.message


def test_an_engine_that_does_not_fit_is_refused_with_the_figures() -> None:
    found = lendable(80 * GIB, 40 * GIB, FIFTH)
    assert found.refusal(24 * GIB) == ""
    assert found.refusal(25 * GIB).startswith(
        "the engine needs 25.0 GiB, 1.0 GiB more than may be lent: 80.0 GiB in all"
    )


def test_an_engines_size_is_weights_cache_and_what_every_process_costs() -> None:
    size = EngineSize(weights=16 * GIB, kv_per_token=1 << 17, kv_tokens=1 << 16, fixed=2 * GIB)
    assert size.total == 26 * GIB
    assert size.fraction(41 * GIB) == pytest.approx((24 + 16 * 0.05 + 0.25) / 40, abs=0.001)
    assert size.fraction(1) == 1.0


def test_the_high_water_is_kept_for_a_window_and_then_forgotten() -> None:
    mark = HighWater(window_s=1000, bucket_s=100)
    assert mark.bytes is None
    mark = mark.observe(50, 0).observe(70, 50).observe(60, 300)
    assert mark.bytes == 70
    assert mark.observe(10, 1350).bytes == 60
    assert len(mark.observe(10, 9000).buckets) == 1


def after(*looks: tuple[float, MemorySeen], start: Budget | None = None) -> Budget:
    budget = start or Budget()
    for now, seen in looks:
        budget = steer(budget, seen, LIMITS, now)
    return budget


def test_the_budget_is_halved_at_once_and_not_again_for_a_while() -> None:
    assert after((0, TIGHT_KV)).permille == 500
    assert after((0, TIGHT_KV), (1, TIGHT_KV), (29, TIGHT_KV)).permille == 500
    assert after((0, TIGHT_KV), (30, TIGHT_KV)).permille == 250


def test_the_budget_grows_slowly_once_all_has_been_calm() -> None:
    cut = after((0, TIGHT_KV))
    assert after((1, CALM), (30, CALM), start=cut).permille == 500
    assert after((1, CALM), (31, CALM), start=cut).permille == 550
    assert after((1, CALM), (31, CALM), (32, CALM), start=cut).permille == 550
    assert after((1, CALM), (31, CALM), (33, CALM), start=cut).permille == 600


def test_unknown_memory_neither_cuts_nor_grows() -> None:
    unknown = MemorySeen(None, 0)
    assert after((0, unknown)).permille == WHOLE
    cut = after((0, TIGHT_KV))
    assert after((1, unknown), (99, unknown), start=cut).permille == 500


def test_too_little_free_memory_is_pressure_until_the_engine_would_fit_again() -> None:
    pressed = after((0, SHORT))
    assert (pressed.pressure, pressed.permille) == (True, 0)
    released = MemorySeen(free=20 * GIB, headroom=16 * GIB, engine_again=17 * GIB)
    assert after((1, released), (99, released), start=pressed).pressure, "it would press again"
    fits = MemorySeen(free=40 * GIB, headroom=16 * GIB, engine_again=17 * GIB)
    assert after((1, fits), (30, fits), start=pressed).pressure
    back = after((1, fits), (31, fits), start=pressed)
    assert (back.pressure, back.permille) == (False, LIMITS.least_permille)


def test_a_budget_becomes_turns_in_flight() -> None:
    assert [Budget(permille=share).cap(8) for share in (0, 125, 500, WHOLE)] == [0, 1, 4, 8]
    assert Budget(permille=125).cap(2) == 1
    assert Budget().cap(0) == 0


# --- NextStep: frozen until the engines have newer weights

CUT = Budget(permille=500, cut_s=0.0, frozen_step="v1")


def test_a_cut_budget_is_frozen_until_the_next_step() -> None:
    cut = steer(Budget(), replace(TIGHT_KV, step="v1"), LIMITS, 0.0)
    assert (cut.permille, cut.frozen_step) == (500, "v1")
    budget = cut
    for second in range(1, 3600):
        budget = steer(budget, replace(CALM, step="v1"), LIMITS, float(second))
    assert budget.permille == 500, "an hour of calm changes nothing"
    whole = steer(budget, replace(CALM, step="v2"), LIMITS, 3601.0)
    assert (whole.permille, whole.frozen_step) == (WHOLE, "v2")


def test_the_next_step_does_not_overrule_serving() -> None:
    newer = replace(TIGHT_KV, step="v2")
    assert steer(CUT, newer, LIMITS, 60.0).permille == 250
    uneasy = MemorySeen(free=30 * GIB, headroom=16 * GIB, serving_kv_permille=700, step="v2")
    assert steer(CUT, uneasy, LIMITS, 60.0).permille == 500


def test_while_nobody_knows_the_weights_the_budget_stays() -> None:
    assert steer(CUT, replace(CALM, step=""), LIMITS, 60.0).permille == 500


def test_after_pressure_the_least_is_given_back_and_the_rest_with_the_next_step() -> None:
    taken = steer(Budget(), replace(SHORT, step="v1"), LIMITS, 0.0)
    assert taken.pressure
    budget = taken
    for second in range(1, 120):
        budget = steer(budget, replace(CALM, step="v1"), LIMITS, float(second))
    assert (budget.pressure, budget.permille) == (False, LIMITS.least_permille)
    assert steer(budget, replace(CALM, step="v2"), LIMITS, 121.0).permille == WHOLE
