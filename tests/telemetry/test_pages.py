"""Pages of several versions of SGLang and vLLM read the same; damaged ones become unknown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rose_core.telemetry.dialects import METRICS, Figures
from rose_core.telemetry.signal import advance
from rose_core.wire.sync import SignalSource

_PAGES = sorted((Path(__file__).parent / "pages").glob("*.txt"))


def read(page: Path, text: str | None = None) -> Figures:
    engine = "SGLang" if page.name.startswith("sglang") else "VLLM"
    return METRICS[engine](page.read_text() if text is None else text)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_every_version_says_the_same(page: Path) -> None:
    figures = read(page)
    assert (figures.running, figures.waiting, figures.kv_permille) == (2, 1, 125)
    assert figures.requests == {"/v1/completions": 25}
    assert figures.activity[:2] == (300, 900)
    assert figures.at_arrival is page.name.startswith("sglang")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_a_page_cut_or_damaged_anywhere_never_raises_and_invents_nothing(page: Path) -> None:
    text, draw = page.read_text(), random.Random(5)
    for _ in range(200):
        cut = text[: draw.randrange(len(text))]
        figures = read(page, cut)
        assert figures.running in {None, 2}, "a line that is cut is no line"
        at = draw.randrange(len(text))
        damaged = text[:at] + draw.choice(['"', "}", "\0", "NaN", "{"]) + text[at + 1 :]
        read(page, damaged)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_levels_that_no_token_moves_are_a_leak(page: Path) -> None:
    figures, reading = read(page), None
    for second in range(1, 15):
        reading = advance(reading, SignalSource.METRICS, figures, second * 1_000_000_000)
    assert reading is not None
    assert not reading.plausible
