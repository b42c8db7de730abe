"""The truth meter: do engines and trainer agree about the tokens the engines sampled?

For every sampled token there are two log-probabilities of the same token under, supposedly, the
same weights: the engine's (behaviour) and the trainer's, recomputed with the version that sampled
it. Were everything right they would differ by rounding alone. A wrong weight, a stale cache, a
splice at the wrong place or different sampling settings show here, whatever else claims that all
is well.

With ``d = trainer - behaviour``: ``k1 = mean(-d)`` estimates KL(engine || trainer) without bias,
``k3 = mean(exp(d) - 1 - d)`` does so with little variance and never below zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Mismatch", "MismatchMeter", "SamplingPlace"]

Floats = npt.NDArray[np.float64]

SPLICE_EDGES = (0, 1, 8, 64)
"""Tokens behind a splice are told apart by distance: the first, up to 7, up to 63, the rest."""

WHOLE = "none"
"""Distance of tokens in turns that were never spliced."""


class SamplingPlace(NamedTuple):
    """Where tokens were sampled.

    Attributes:
        pool: pool or kind of engine.
        version: weight version.
        distance: tokens behind the nearest splice before, as ``SPLICE_EDGES`` cuts them.
    """

    pool: str
    version: str
    distance: str


@dataclass(frozen=True)
class Mismatch:
    """How engines and trainer disagree over some tokens; natural logarithms.

    Attributes:
        tokens: tokens compared.
        invalid: tokens without a finite pair; they are in no other figure.
        k1, k3: estimates of KL(engine || trainer) per token.
        largest: greatest absolute difference of one token.
        clipped: share of tokens whose ratio trainer/engine is outside the trust interval.
    """

    tokens: int
    invalid: int
    k1: float
    k3: float
    largest: float
    clipped: float


@dataclass
class _Sums:
    tokens: int = 0
    invalid: int = 0
    k1: float = 0.0
    k3: float = 0.0
    largest: float = 0.0
    clipped: int = 0

    def add(self, difference: Floats, clip: float) -> None:
        """Take differences trainer - behaviour in."""
        finite = difference[np.isfinite(difference)]
        self.tokens += finite.size
        self.invalid += difference.size - finite.size
        if not finite.size:
            return
        self.k1 -= float(finite.sum())
        # expm1 keeps the digits that exp(d) - 1 loses where d is small, which is the normal case.
        self.k3 += float((np.expm1(np.minimum(finite, 80.0)) - finite).sum())
        self.largest = max(self.largest, float(np.abs(finite).max()))
        self.clipped += int((np.abs(np.expm1(np.minimum(finite, 80.0))) > clip).sum())

    def merge(self, other: _Sums) -> None:
        """Take another place's sums in."""
        self.tokens += other.tokens
        self.invalid += other.invalid
        self.k1 += other.k1
        self.k3 += other.k3
        self.largest = max(self.largest, other.largest)
        self.clipped += other.clipped

    def result(self) -> Mismatch:
        """The figures."""
        count = max(self.tokens, 1)
        return Mismatch(
            self.tokens,
            self.invalid,
            self.k1 / count,
            self.k3 / count,
            self.largest,
            self.clipped / count,
        )


class MismatchMeter:
    """Gathers pairs of log-probabilities by pool, version and distance from a splice.

    Args:
        clip: half width of the trust interval of the ratio, as the trainer's loss clips it.
    """

    def __init__(self, *, clip: float = 0.2) -> None:
        self._clip = clip
        self._sums: dict[SamplingPlace, _Sums] = defaultdict(_Sums)

    def add(
        self,
        behaviour: npt.ArrayLike,
        trainer: npt.ArrayLike,
        *,
        version: str,
        pool: str = "",
        splices: Sequence[int] = (),
    ) -> None:
        """Take the tokens of one turn (or of several that were never spliced) in.

        Args:
            behaviour: log-probabilities the engine reported, one per sampled token.
            trainer: the trainer's for the same tokens.
            version: version that sampled them.
            pool: where.
            splices: indices of the first token after each splice of the turn.

        Raises:
            ValueError: the two are not of the same length.
        """
        engine = np.asarray(behaviour, np.float64).reshape(-1)
        own = np.asarray(trainer, np.float64).reshape(-1)
        if engine.size != own.size:
            message = f"{engine.size} log-probabilities from the engine, {own.size} recomputed"
            raise ValueError(message)
        difference = own - engine
        distances = _distances(engine.size, splices)
        for label in np.unique(distances):
            place = SamplingPlace(pool, version, str(label))
            self._sums[place].add(difference[distances == label], self._clip)

    def rows(self) -> dict[SamplingPlace, Mismatch]:
        """The figures by place."""
        return {place: sums.result() for place, sums in sorted(self._sums.items())}

    def total(self, *, pool: str | None = None, version: str | None = None) -> Mismatch:
        """The figures over all places, or those of one pool or version."""
        whole = _Sums()
        for place, sums in self._sums.items():
            if pool in {None, place.pool} and version in {None, place.version}:
                whole.merge(sums)
        return whole.result()

    def alarms(self, *, k3: float, tokens: int = 100) -> dict[SamplingPlace, Mismatch]:
        """Places with at least ``tokens`` tokens whose ``k3`` is above the limit."""
        return {
            place: row
            for place, row in self.rows().items()
            if row.tokens + row.invalid >= tokens and (row.k3 > k3 or row.invalid > 0)
        }

    def forget(self, *, version: str) -> None:
        """Drop a version's figures, for runs that go on for long."""
        for place in [place for place in self._sums if place.version == version]:
            del self._sums[place]


def _distances(tokens: int, splices: Sequence[int]) -> npt.NDArray[np.str_]:
    labels = np.full(tokens, WHOLE, dtype="<U8")
    index = np.arange(tokens)
    for splice in sorted(splices):
        behind = index - splice
        for edge in SPLICE_EDGES:
            labels[behind >= edge] = f"{edge}+"
    return labels
