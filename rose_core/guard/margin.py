"""How much of an SLO's budget is kept back: learned from requests that ran beside rollouts.

A fixed margin wastes slack where predictions are good and protects too little where they are not.

| a request that met an open gate ended at | margin |
|---|---|
| above its SLO | half as large again, at most 50 % |
| within the last tenth of it | stays |
| below | 0.2 points smaller, at least 5 % |

It starts at 20 %; seventy-five harmless requests bring it to its floor, one harmful request undoes
twenty-five of them. Next step: ``slack`` keeps it back.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST, MOST = 0.05, 0.5
_CLOSE = 0.9
_STEP = 0.002
_GROWTH = 1.5


@dataclass(frozen=True)
class Margin:
    """Share of each budget that is never used."""

    value: float = 0.2

    def saw(self, used: float) -> Margin:
        """One co-running request; ``used`` = its latency / SLO, the worse of TTFT and TPOT."""
        if used > 1:
            return Margin(min(MOST, max(self.value * _GROWTH, self.value + 0.05)))
        if used > _CLOSE:
            return self
        return Margin(max(LEAST, self.value - _STEP))
