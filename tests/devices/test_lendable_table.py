"""What usual deployments lend with the defaults, in figures that the pages quote.

Serving is an engine with a static pool: it holds its memory fraction, and besides what SGLang
keeps for graphs and activations of a full batch, which the highest use of a day contains.
"""

from __future__ import annotations

import pytest

from rose_core.devices.footprint import MARGIN_BYTES, Footprint, estimate, promised
from rose_core.devices.memory import GIB, EngineSize, Headroom, lendable
from rose_core.devices.model_size import cache_shape
from tests.engines.model_shapes import SHAPES

CARDS = {"H100-80": int(79.6 * GIB), "H200": int(139.8 * GIB)}
# Beside its static part: context, graphs of decode and prefill, activations of a chunk.
SERVING_BESIDES = 4 * GIB
DAY, FRESH = 86_400.0, 0.0
# Weights in GiB; the KV pool is the lease's default of 16384 tokens for 8 turns.
MODELS = {"llama-tied": 2.3, "qwen3": 15.3, "qwen2": 14.2}


def lends(card: str, fraction: float, watched_s: float = DAY) -> float:
    total = CARDS[card]
    high = int(total * fraction) + SERVING_BESIDES
    found = lendable(total, high, Headroom(), watched_s)
    assert found.bytes is not None
    return round(found.bytes / GIB, 1)


def needs(model: str, *, measured: bool = True) -> float:
    shape = cache_shape(SHAPES[model])
    known = Footprint(2 * GIB) if measured else None
    fixed = promised(known, estimate({}, 8, latent=shape.latent))
    size = EngineSize(int(MODELS[model] * GIB), shape.per_token, 16384, fixed)
    return round(size.total / GIB, 1)


@pytest.mark.parametrize(
    ("card", "by_fraction"),
    [
        ("H100-80", {0.9: 1.0, 0.8: 8.9, 0.7: 16.9, 0.6: 24.8, 0.5: 32.8}),
        ("H200", {0.9: 7.0, 0.8: 21.0, 0.7: 34.9, 0.6: 48.9, 0.5: 62.9}),
    ],
)
def test_a_smaller_memory_fraction_of_serving_is_what_is_lent(
    card: str, by_fraction: dict[float, float]
) -> None:
    assert {fraction: lends(card, fraction) for fraction in by_fraction} == by_fraction


def test_with_a_sensible_fraction_usual_models_fit_beside_serving() -> None:
    """A fifth of the whole GPU was kept before: an 8B model needed serving below 51 % of it."""
    fits = {
        (card, model): max(
            (f for f in (0.5, 0.6, 0.7, 0.8, 0.9) if needs(model) <= lends(card, f)), default=None
        )
        for card in CARDS
        for model in MODELS
    }
    assert fits == {
        ("H100-80", "llama-tied"): 0.8,
        ("H100-80", "qwen2"): 0.6,
        ("H100-80", "qwen3"): 0.6,
        ("H200", "llama-tied"): 0.9,
        ("H200", "qwen2"): 0.8,
        ("H200", "qwen3"): 0.8,
    }


def test_while_serving_was_not_watched_for_a_day_more_is_kept_and_said() -> None:
    assert lends("H200", 0.8, DAY) - lends("H200", 0.8, FRESH) == pytest.approx(3.0)
    assert lends("H200", 0.8, 3600.0) - lends("H200", 0.8, FRESH) == pytest.approx(2.0)
    assert "3.0 GiB less once" in lendable(CARDS["H200"], 0, Headroom(), FRESH).message
    assert "once" not in lendable(CARDS["H200"], 0, Headroom(), DAY).message


def test_unknown_time_of_watching_counts_as_none() -> None:
    assert Headroom().before_lending(CARDS["H200"], None) == 6 * GIB


def test_an_elastic_pool_keeps_a_share_because_it_may_grow() -> None:
    total = CARDS["H100-80"]
    assert Headroom(elastic=True).kept(total) == total // 5


@pytest.mark.parametrize("watched", [FRESH, DAY])
def test_the_owners_figure_counts_from_the_first_moment(watched: float) -> None:
    total = CARDS["H100-80"]
    assert Headroom(gib=2, elastic=True).before_lending(total, watched) == 2 * GIB
    assert Headroom(percent=10).before_lending(total, watched) == total // 10


def test_an_engine_that_was_never_measured_needs_more() -> None:
    assert needs("qwen3", measured=False) - needs("qwen3") > 2
    assert promised(Footprint(2 * GIB), 0) == 2 * GIB + MARGIN_BYTES
