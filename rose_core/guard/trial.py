"""What lending has added: slow requests in lent windows beside those in withheld ones.

The counts are looked at all the time and for ever, so an interval for one look would be wrong at
some look almost surely. A confidence sequence holds at every look at once: the beta-binomial
mixture of Robbins (1970), as in Howard, Ramdas, McAuliffe and Sekhon (2021), for each of the two
shares. Both hold together at 95 %, because each holds at 97.5 %.

| requests in withheld windows | said |
|---|---|
| none | nothing: there is nothing to compare with |
| some | lending has made at most so many of the requests in lent windows slow |

It takes requests as independent; those of one burst are not, so bursts make it too sure. Counts of
nodes add up. Next step: ``rose_agent.guard.replicas.outcomes`` counts, ``/report``, the metrics and
the pool's condition LendingCertified say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose_core.stats import mixture_sequence
from rose_core.wire.sync import Trial

_ALPHA = 0.05


@dataclass(frozen=True)
class Added:
    """At most ``most`` of ``requests`` in lent windows are slow because of lending, 95 %.

    Attributes:
        share: the same as a share, from which ``most`` is rounded up.
        proven: and more than none are.
    """

    most: int
    requests: int
    share: float
    proven: bool

    @property
    def text(self) -> str:
        """For people."""
        return f"lending made at most {self.most} of {self.requests} requests slow (95 %)"


def added(trial: Trial) -> Added | None:
    """What is known now; None while one of the two sides has no request."""
    if not trial.lent or not trial.withheld:
        return None
    lent = mixture_sequence(trial.lent_slow, trial.lent, _ALPHA / 2)
    withheld = mixture_sequence(trial.withheld_slow, trial.withheld, _ALPHA / 2)
    share = max(0.0, lent.high - withheld.low)
    # Of those in lent windows no more can be slow because of lending than are slow.
    most = min(trial.lent_slow, math.ceil(share * trial.lent - 1e-9))
    return Added(most, trial.lent, share, lent.low > withheld.high)
