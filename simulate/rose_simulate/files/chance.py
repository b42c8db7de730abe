"""How far a prediction may be off by chance: windows and their reactions drawn anew.

Reactions of one window resemble each other, so whole windows are drawn first, then reactions inside
each of them; 95 % of the results lie between the ends. Equal recordings give equal ends. Next step:
``calibrate`` says what follows from them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Final

Windows = Sequence[Sequence[float]]
"""Reactions of one delay at one load, by window."""

_DRAWS: Final = 1000
_CUT: Final = _DRAWS // 40
_LEAST_WINDOWS: Final = 2


def off(observed: float, known: Sequence[tuple[float, int]]) -> float:
    """Prediction less observation, as a share of it; ``known`` are (median, samples) of others."""
    weight = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / weight / observed - 1


def ends(observed: Windows, known: Sequence[Windows]) -> tuple[float, float] | None:
    """The ends of ``off``.

    Args:
        observed: of the load held out.
        known: of every other load.

    Returns:
        None where a load has fewer than two windows: nothing says how much windows differ.
    """
    if any(len(one) < _LEAST_WINDOWS for one in (observed, *known)):
        return None
    draw = random.Random(0)  # noqa: S311  # resampling, nothing secret
    found = sorted(_once(observed, known, draw) for _ in range(_DRAWS))
    return found[_CUT], found[-1 - _CUT]


def _once(observed: Windows, known: Sequence[Windows], draw: random.Random) -> float:
    seen = statistics.median(_again(observed, draw))
    others = (_again(one, draw) for one in known)
    return off(seen, [(statistics.median(one), len(one)) for one in others])


def _again(windows: Windows, draw: random.Random) -> list[float]:
    """Windows with reactions only: what holds none says nothing of the delay."""
    chosen = draw.choices(windows, k=len(windows))
    return [value for one in chosen for value in draw.choices(one, k=len(one))]
