"""Grafana's units, as far as the dashboards use them: a number as people read it."""

from __future__ import annotations

import math

_THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_PARTS = ((1e-3, "ms", 1e3), (1e-6, "µs", 1e6), (0.0, "ns", 1e9))
_LONG = ((86400.0, "d"), (3600.0, "h"), (120.0, "min"))
_SUFFIXES = {"ops": " op/s", "reqps": " req/s", "pps": " p/s", "Bps": "B/s", "bytes": "B"}


def written(value: float, unit: str) -> str:
    """A value with its unit, three digits at most."""
    if not math.isfinite(value):
        return "-"
    if unit == "s":
        return _time(value)
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    return f"{_short(value, spaced=unit in {'Bps', 'bytes'})}{_SUFFIXES.get(unit, '')}"


def _short(value: float, *, spaced: bool) -> str:
    space = " " if spaced else ""
    for size, letter in _THOUSANDS:
        if abs(value) >= size:
            return f"{_digits(value / size)}{' '}{letter}"
    return f"{_digits(value)}{space}"


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for size, name in _LONG:
        if abs(seconds) >= size:
            return f"{_digits(seconds / (60.0 if name == 'min' else size))} {name}"
    if abs(seconds) >= 1:
        return f"{_digits(seconds)} s"
    for size, name, factor in _PARTS:
        if abs(seconds) >= size:
            return f"{_digits(seconds * factor)} {name}"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
