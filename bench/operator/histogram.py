"""Quantiles from a Prometheus histogram: the upper end of the bucket that holds the quantile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BOUND = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True)
class Buckets:
    """Cumulative counts by upper bound."""

    counts: Mapping[float, float]

    @classmethod
    def read(cls, samples: Mapping[str, float]) -> Buckets:
        """From the ``_bucket`` series of one histogram."""
        found = ((_BOUND.search(key), value) for key, value in samples.items())
        return cls({float(match[1]): value for match, value in found if match})

    def since(self, before: Buckets) -> Buckets:
        """What was added."""
        return Buckets({at: count - before.counts.get(at, 0) for at, count in self.counts.items()})

    def at_most(self, percent: float) -> float:
        """The quantile is not above this; infinite when the last bucket holds it."""
        total = max(self.counts.values(), default=0.0)
        bounds = sorted(self.counts)
        return next((at for at in bounds if self.counts[at] >= total * percent / 100), float("inf"))
