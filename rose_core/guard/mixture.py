"""Learns the cost of one phase, alone and beside a rollout engine, from finished requests.

Two known algorithms: weighted least squares with exponential forgetting and a prior in the form of
pseudo-observations (a line), and stochastic approximation of a quantile of what is left (Robbins
and Monro, 1951, on the pinball loss of Koenker and Bassett, 1978).

Under a duty cycle no request runs wholly alone or wholly beside rollouts. One that met an open gate
for a share ``f`` of its time ran, as a multiple of the speed that the profile predicts, at

    y = alone x (1 - f x loss),        loss = 1 - 1 / slowdown

So a line through many requests gives both ``alone`` and ``loss``. It has to be steadied: a replica
that is never idle hardly ever runs alone, and under a steady duty all shares are alike. Then only
the height of the line is known, and a slope read from it would take every stutter of serving for
harm done by rollouts.

| part | from |
|---|---|
| height | the last fifty requests or so; a new replica starts at the profile |
| slope | the same, against the weight of ``_BELIEF`` requests at the profile's slowdown |
| a quantile of what lies above the line | one factor, up by large steps and down by small ones |

Next step: ``predictor`` multiplies its profile by both factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 0.98  # forgetting factor: 1 / (1 - 0.98) = the last fifty requests carry the weight
_BELIEF = 4.0  # requests that the prior of the slope counts for: few, so that evidence wins soon
_SLOWEST = 10.0  # a loss of 1 would mean that nothing ever ends beside rollouts
_FURTHEST = 100.0  # from the profile, by which one request may be off: one stall is no line


@dataclass(frozen=True)
class SpeedLine:
    """Relative speed over the share of open time."""

    alone: float
    loss: float

    def cost(self, share: float) -> float:
        """Multiple of the profile's cost alone."""
        return 1 / (self.alone * (1 - share * self.loss))


@dataclass(frozen=True)
class Mixture:
    """Sums over what was seen, each request weighing less with each one after it.

    Attributes:
        weight, share, square, speed, product: sums of 1, f, f^2, y, f y.
        above: logarithm of the factor by which the chosen quantile lies above the line.
    """

    weight: float = 1.0
    share: float = 0.0
    square: float = 0.0
    speed: float = 1.0
    product: float = 0.0
    above: float = 0.0

    def line(self, slowdown: float) -> SpeedLine:
        """The line through what was seen; ``slowdown`` is the profile's, from which it starts."""
        # 1. The prior's slope, as a loss.
        believed = 1 - 1 / max(1.0, slowdown)
        # 2. The height alone, by least squares with that slope: where the prior is put.
        fitted = self.speed - believed * self.product
        level = fitted / (self.weight - 2 * believed * self.share + believed**2 * self.square)
        # 3. The prior as pseudo-observations on that line: half its weight at f = 0, half at f = 1.
        half = _BELIEF / 2
        weight, share, square = self.weight + 2 * half, self.share + half, self.square + half
        speed = self.speed + half * level * (2 - believed)
        product = self.product + half * level * (1 - believed)
        # 4. Both by least squares (the normal equations of y = alone - slope x f), kept in bounds.
        slope = (share * speed - weight * product) / (weight * square - share**2)
        alone = max((speed + slope * share) / weight, 1e-6)
        return SpeedLine(alone, min(1 - 1 / _SLOWEST, max(0.0, slope / alone)))

    def factor(self, slowdown: float, *, shared: bool) -> float:
        """Multiple of the profile's cost alone, at the chosen quantile."""
        return self.line(slowdown).cost(float(shared)) * math.exp(self.above)

    def add(
        self, seen: float, share: float, slowdown: float, *, quantile: float, step: float
    ) -> Mixture:
        """Learn from one request.

        Args:
            seen: its cost as a multiple of the profile's cost alone.
            share: of its time beside an open gate.
            slowdown: the profile's.
            quantile: share of requests that should not be slower than predicted.
            step: speed of learning the quantile.
        """
        expected = self.line(slowdown).cost(share) * math.exp(self.above)
        above = self.above + _error(seen / expected, quantile, step)
        y = 1 / min(_FURTHEST, max(1 / _FURTHEST, seen))
        return Mixture(
            weight=_MEMORY * self.weight + 1,
            share=_MEMORY * self.share + share,
            square=_MEMORY * self.square + share**2,
            speed=_MEMORY * self.speed + y,
            product=_MEMORY * self.product + share * y,
            above=max(0.0, above),
        )


def _error(ratio: float, quantile: float, step: float) -> float:
    # The further off, the larger the step, so a wrong level is left within a few requests.
    scale = step * min(10.0, max(1.0, abs(math.log(ratio)) / 0.1))
    return scale * (quantile if ratio > 1 else quantile - 1.0)
