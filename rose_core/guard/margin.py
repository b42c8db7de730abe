"""How much of an SLO's budget is kept back: learned from requests that ran beside rollouts.

Additive increase, multiplicative decrease (AIMD; Chiu and Jain, 1989) in the mirror: the margin
shrinks by constant steps while all goes well, and grows by a factor at harm. A fixed margin wastes
slack where predictions are good and protects too little where they are not.

| a request that met an open gate ended at | margin |
|---|---|
| above its SLO, rollouts cover half of the excess | half as large again, at most 50 % |
| above its SLO, they cover less | stays |
| within the last tenth of it | stays |
| below | 0.2 points smaller, at least 5 % |

A larger margin helps only against what rollouts do. A machine that stutters also delays requests
that met an open gate for a moment; a larger margin would end lending for long and save none of
them. Only half of the excess has to be explained, because part of it cannot be seen from one
request: others that were slowed before it may still have been in its batch.

It starts at 20 %; seventy-five harmless requests bring it to its floor, one harmful request undoes
twenty-five of them. Next step: ``slack`` keeps it back.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST, MOST = 0.05, 0.5
_CLOSE = 0.9  # of the SLO: a request that ends so near to it is no sign that less would do
_STEP = 0.002  # seventy-five harmless requests lead from 20 % to the floor
_GROWTH = 1.5  # one harmful request undoes twenty-five harmless ones, at least 5 points
_COVERED = 0.5  # the other half may lie with requests slowed before, which this one cannot show


@dataclass(frozen=True)
class Margin:
    """Share of each budget that is never used."""

    value: float = 0.2

    def learn(self, used: float, rollouts: float = 1.0) -> Margin:
        """The margin after one co-running request.

        Args:
            used: its latency / SLO, the worse of TTFT and TPOT.
            rollouts: how much of that latency rollouts account for, as a share of it.
        """
        if used > 1:
            if used * rollouts < _COVERED * (used - 1):
                return self
            return Margin(min(MOST, max(self.value * _GROWTH, self.value + 0.05)))
        if used > _CLOSE:
            return self
        return Margin(max(LEAST, self.value - _STEP))
