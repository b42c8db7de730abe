"""What an engine takes besides weights and KV pool: estimated, measured, corrected once."""

from __future__ import annotations

from rose_core.devices.footprint import (
    MARGIN_BYTES,
    SETTLE_SECONDS,
    Footprint,
    Judgement,
    estimate,
    judge,
    promised,
)
from rose_core.devices.memory import GIB, EngineSize

STATIC = 20 * GIB
FIRST = estimate({}, 8, latent=False)
ROOMY = 40 * GIB


def size(known: Footprint | None = None) -> EngineSize:
    return EngineSize(15 * GIB, 1 << 20, 5 << 10, promised(known, FIRST))


def look(
    held: int | None, known: Footprint | None = None, room: int | None = ROOMY, served: float = 1.0
) -> Judgement:
    return judge(known, size(known), held, room, served_s=served)


def test_before_it_was_measured_the_figure_is_cautious_and_grows_with_the_chunk() -> None:
    """SGLang's own estimate and a context; three GiB were once taken for everything."""
    assert 5 * GIB < FIRST < 6 * GIB
    assert estimate({"chunked-prefill-size": "8192"}, 8, latent=False) == FIRST + 9 * GIB
    assert estimate({}, 8, latent=True) == FIRST + GIB


def test_what_the_first_engine_of_a_kind_holds_is_remembered() -> None:
    found = look(STATIC + 2 * GIB)
    assert found.refusal == ""
    assert found.footprint == Footprint(2 * GIB)
    assert promised(found.footprint, FIRST) == 2 * GIB + MARGIN_BYTES


def test_the_highest_of_the_first_minutes_counts_and_nothing_after_them() -> None:
    known = look(STATIC + 3 * GIB, Footprint(2 * GIB)).footprint
    assert known == Footprint(3 * GIB)
    known = look(STATIC + 2 * GIB, known, served=SETTLE_SECONDS).footprint
    assert known == Footprint(3 * GIB, settled=True)
    assert look(STATIC + 3 * GIB + 1, known).footprint == known


def test_the_first_overrun_corrects_the_figure_where_that_fits_too() -> None:
    """One byte over a guess used to end the engine, which then started and was ended again."""
    held = STATIC + FIRST + 2 * GIB
    found = look(held)
    assert found.refusal == ""
    assert found.footprint == Footprint(FIRST + 2 * GIB, settled=True, corrected=True)
    assert found.size.total == held + MARGIN_BYTES
    again = judge(found.footprint, found.size, held, ROOMY, served_s=2.0)
    assert (again.refusal, again.size) == ("", found.size)


def test_an_overrun_that_does_not_fit_ends_it_and_the_next_start_asks_for_more() -> None:
    found = look(STATIC + FIRST + 2 * GIB, room=STATIC + FIRST + GIB)
    assert "asked for from now on" in found.refusal
    assert found.footprint is not None
    assert size(found.footprint).total == STATIC + FIRST + 2 * GIB + MARGIN_BYTES


def test_an_engine_that_outgrows_a_corrected_figure_is_ended() -> None:
    known = Footprint(6 * GIB, settled=True, corrected=True)
    assert look(STATIC + 7 * GIB, known).refusal == ""
    ended = look(STATIC + 7 * GIB + 1, known)
    assert "it leaks" in ended.refusal
    assert ended.footprint == known, "a leak does not raise what is remembered"


def test_what_is_not_known_neither_measures_nor_accuses() -> None:
    assert look(None) == Judgement(None, size())
