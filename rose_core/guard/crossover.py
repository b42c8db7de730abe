"""Harm, measured: latency in lent windows against withheld windows on the same replica.

Windows of equal length alternate. A request belongs to the window of its arrival and only if it
also ended in it, so nothing straddles. A relative limit is judged only above a floor of samples in
*both* classes, and by the lower end of a bootstrap interval of the ratio of quantiles: a breaker
that trips on noise would lend nothing.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

SAMPLE_FLOOR = 30


@dataclass(frozen=True)
class Schedule:
    """Alternating windows; ``seconds`` 0 = never withhold."""

    seconds: float = 0.0

    def window(self, now_s: float) -> int:
        """Number of the window."""
        return int(now_s / self.seconds) if self.seconds else 0

    def withheld(self, now_s: float) -> bool:
        """Odd windows are withheld."""
        return bool(self.seconds) and self.window(now_s) % 2 == 1


@dataclass(frozen=True)
class Ratio:
    """Latency lent / withheld at one quantile, with a 90 % interval; None below the floor."""

    quantile: float
    value: float | None
    low: float | None
    high: float | None
    lent: int
    withheld: int


def quantile(values: list[float], q: float) -> float:
    """Quantile by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    index = int(position)
    rest = position - index
    upper = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] * (1 - rest) + upper * rest


def compare(
    lent: list[float], withheld: list[float], q: float, *, seed: int = 0, rounds: int = 200
) -> Ratio:
    """Ratio of one quantile with its interval."""
    counts = len(lent), len(withheld)
    if min(counts) < SAMPLE_FLOOR:
        return Ratio(q, None, None, None, *counts)
    draw = random.Random(seed)  # noqa: S311  # resampling, nothing secret
    ratios = sorted(
        quantile(draw.choices(lent, k=len(lent)), q)
        / max(1e-9, quantile(draw.choices(withheld, k=len(withheld)), q))
        for _ in range(rounds)
    )
    value = quantile(lent, q) / max(1e-9, quantile(withheld, q))
    return Ratio(q, value, ratios[rounds // 20], ratios[-1 - rounds // 20], *counts)


@dataclass
class Meter:
    """TTFT and TPOT (seconds) of the last ``keep`` requests per window class."""

    keep: int = 2000
    ttft: dict[bool, deque[float]] = field(default_factory=dict)
    tpot: dict[bool, deque[float]] = field(default_factory=dict)

    def add(self, *, withheld: bool, ttft_s: float | None, tpot_s: float | None) -> None:
        """Note one request."""
        for store, value in ((self.ttft, ttft_s), (self.tpot, tpot_s)):
            if value is not None:
                store.setdefault(withheld, deque(maxlen=self.keep)).append(value)

    def ratios(self, quantiles: tuple[float, ...]) -> dict[str, list[Ratio]]:
        """Ratios of TTFT and TPOT, lent / withheld."""
        return {
            name: [
                compare(list(store.get(False, ())), list(store.get(True, ())), q) for q in quantiles
            ]
            for name, store in (("ttft", self.ttft), ("tpot", self.tpot))
        }

    def harmful(self, max_increase: float, q: float) -> bool:
        """The interval proves an increase above the limit; False below the sample floor."""
        if not max_increase:
            return False
        return any(
            ratio.low is not None and ratio.low > 1 + max_increase
            for ratios in self.ratios((q,)).values()
            for ratio in ratios
        )
