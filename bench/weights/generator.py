"""Deltas to measure on: a model of long-run AdamW fine-tuning, and a real optimizer.

The reference generator: weights N(0, 0.02) with log-normal scales per row and column, FP32 masters
anywhere inside the rounding cell of their BF16 value, AdamW moments after 25 steps of gradients
that are noise with a tenth of signal. It reproduces the densities reported for RL at these learning
rates; it does not model structure between elements, which would make positions cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose_core.delta.bits import Bits

Floats = npt.NDArray[np.float32]

ROWS, COLUMNS = 2048, 4096
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-8
WARM_STEPS = 25


def to_bf16(values: Floats) -> Bits:
    """Round to nearest even, as bits."""
    bits = values.view(np.uint32)
    rounded: Bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


@dataclass
class Adam:
    """Moments of every element under a stationary noisy gradient."""

    random: np.random.Generator
    signal: Floats
    first: Floats
    second: Floats
    steps: int = 0

    @classmethod
    def warm(cls, seed: int, elements: int) -> Adam:
        """After the warm steps."""
        random = np.random.default_rng(seed)
        signal = 0.1 * random.standard_normal(elements, np.float32)
        adam = cls(random, signal, np.zeros_like(signal), np.zeros_like(signal))
        for _ in range(WARM_STEPS):
            adam.step()
        return adam

    def step(self) -> Floats:
        """One step; returns what one unit of learning rate would subtract."""
        gradient = self.random.standard_normal(self.signal.size, np.float32)
        gradient += self.signal
        self.first += np.float32(1 - BETA1) * (gradient - self.first)
        gradient *= gradient
        self.second += np.float32(1 - BETA2) * (gradient - self.second)
        self.steps += 1
        return self.update()

    def update(self) -> Floats:
        """The bias-corrected update of the current moments."""
        first = self.first / np.float32(1 - BETA1**self.steps)
        second = self.second / np.float32(1 - BETA2**self.steps)
        result: Floats = first / (np.sqrt(second) + np.float32(EPSILON))
        return result


def masters(seed: int) -> Floats:
    """FP32 masters somewhere inside the rounding cells of plausible BF16 weights."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((ROWS, COLUMNS), np.float32)
    values *= np.float32(0.02)
    values *= np.exp(0.35 * random.standard_normal((ROWS, 1), np.float32))
    values *= np.exp(0.35 * random.standard_normal((1, COLUMNS), np.float32))
    cell = to_bf16(values).astype(np.uint32) << 16
    inside = random.integers(-0x7FFF, 0x8000, cell.shape, np.int64)
    dithered = (cell.astype(np.int64) + inside).astype(np.uint32)
    return dithered.view(np.float32).reshape(-1)


def reference(rate: float, steps: int) -> Iterator[Bits]:
    """The model's BF16 bits before, and after each of ``steps`` steps at a learning rate."""
    weights = masters(seed=1)
    adam = Adam.warm(2, weights.size)
    yield to_bf16(weights)
    for _ in range(steps):
        weights -= np.float32(rate) * adam.step()
        yield to_bf16(weights)
