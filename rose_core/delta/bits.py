"""Number formats as bit patterns, and the ordered map that makes neighbouring values neighbours.

Weights are never added or subtracted as floats here: that is not exact. Every value is the
unsigned integer of its bits. ``ordered`` maps floats to integers so that the next representable
value is the next integer; the map is a bijection of all patterns, so +0, -0, subnormals and NaN
payloads stay apart. A *step* is a difference of two ordered integers modulo 2**width: steps add up
and have inverses, exactly, whatever the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose_core.delta.errors import ManifestError

Bits = npt.NDArray[Any]
"""Unsigned integers of one format's width."""

Indices = npt.NDArray[np.int64]
"""Positions, ascending."""

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


@dataclass(frozen=True)
class NumberFormat:
    """One element type.

    Attributes:
        name: the word safetensors uses.
        width: bytes per element.
        sign_magnitude: the top bit is a sign (floats); else bits are taken as they are.
        mantissa: bits below the exponent, for floats.
    """

    name: str
    width: int
    sign_magnitude: bool
    mantissa: int = 0

    @property
    def unsigned(self) -> np.dtype[Any]:
        """Little-endian unsigned integer of this width."""
        return np.dtype(_UNSIGNED[self.width])


FORMATS: dict[str, NumberFormat] = {
    name: NumberFormat(name, width, sign_magnitude, mantissa)
    for name, width, sign_magnitude, mantissa in (
        ("BF16", 2, True, 7),
        ("F16", 2, True, 10),
        ("F32", 4, True, 23),
        ("F64", 8, True, 52),
        ("F8_E4M3", 1, True, 3),
        ("F8_E5M2", 1, True, 2),
        ("I64", 8, False, 0),
        ("I32", 4, False, 0),
        ("I16", 2, False, 0),
        ("I8", 1, False, 0),
        ("U64", 8, False, 0),
        ("U32", 4, False, 0),
        ("U16", 2, False, 0),
        ("U8", 1, False, 0),
        ("BOOL", 1, False, 0),
    )
}


def number_format(name: str) -> NumberFormat:
    """Look a format up.

    Raises:
        ManifestError: the format has no rules here.
    """
    found = FORMATS.get(name)
    if found is None:
        message = f"no rules for element type {name!r}; known: {', '.join(sorted(FORMATS))}"
        raise ManifestError(message)
    return found


def ordered(bits: Bits, kind: NumberFormat) -> Bits:
    """Bits to ordered integers, same shape and width."""
    if not kind.sign_magnitude:
        return bits
    top, every = _masks(bits.dtype)
    result: Bits = bits ^ np.where(bits & top, every, top)
    return result


def unordered(integers: Bits, kind: NumberFormat) -> Bits:
    """Ordered integers back to bits."""
    if not kind.sign_magnitude:
        return integers
    top, every = _masks(integers.dtype)
    result: Bits = integers ^ np.where(integers & top, top, every)
    return result


def _masks(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    width = dtype.itemsize * 8
    return dtype.type(1 << (width - 1)), dtype.type((1 << width) - 1)
