"""Bits with everything that breaks float arithmetic in them: zeros of both signs, NaNs, edges."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rose_core.delta import FORMATS, NumberFormat
from rose_core.delta.bits import Bits
from rose_core.delta.kernels import Backend, kernels
from tests.delta.device_kernels import kernels_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

BACKENDS: tuple[Backend, ...] = ("numba", "numpy", kernels_on(DEVICE))
"""All implementations; what one of them does the others must do."""


def backend_name(backend: Backend) -> str:
    return kernels(backend).name


# Neither a neighbour's load nor the first compilation is a failure; the same cases every time.
SLOW_MACHINE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

KINDS = st.sampled_from([FORMATS[name] for name in ("BF16", "F16", "F32", "F64", "F8_E4M3", "I32")])


def corner_bits(kind: NumberFormat) -> list[int]:
    """Zeros, smallest subnormals, ones, infinities and NaN payloads of both signs."""
    width = kind.width * 8
    sign = 1 << (width - 1)
    mantissa = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52, "F8_E4M3": 3}.get(kind.name, 4)
    infinity = sign - (1 << mantissa)
    positive = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, infinity, infinity + 1, sign - 1]
    return [*positive, *(value | sign for value in positive)]


def element(kind: NumberFormat) -> st.SearchStrategy[int]:
    corners = st.sampled_from(corner_bits(kind))
    return corners | st.integers(0, (1 << (8 * kind.width)) - 1)


@st.composite
def kind_and_pair(draw: st.DrawFn, most: int = 600) -> tuple[NumberFormat, Bits, Bits]:
    """A format, a tile before, and after: nearly the same, or anything."""
    kind = draw(KINDS)
    size = draw(st.integers(1, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    whole = random.integers(0, 256, size * kind.width, np.uint8)
    old = whole.view(kind.unsigned).copy()
    new = old.copy()
    for _ in range(draw(st.integers(0, 12))):
        at = draw(st.integers(0, size - 1))
        old[at] = draw(element(kind))
        new[at] = draw(element(kind))
    if draw(st.booleans()):
        chosen = random.random(size) < draw(st.sampled_from([0.01, 0.2, 1.0]))
        new[chosen] += kind.unsigned.type(1)
    return kind, old, new
