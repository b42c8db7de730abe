"""What lending has added: busy periods with a slow request, in lent and in withheld cycles.

The counts are looked at all the time and for ever, so an interval for one look would be wrong at
some look almost surely. A confidence sequence holds at every look at once: the beta-binomial
mixture of Robbins (1970), as in Howard, Ramdas, McAuliffe and Sekhon (2021), for each of the two
shares. Both hold together at 95 %, because each holds at 97.5 %.

| busy periods of withheld cycles | said |
|---|---|
| none | nothing: there is nothing to compare with |
| some | lending has made a request slow in at most so many busy periods of lent cycles |

A busy period counts once, however many of its requests are slow: those of one burst come and wait
together, and to take them as independent would make the interval too narrow. Which cycle is
withheld is drawn (``crossover``), so lent and withheld ones differ by chance and by lending alone.
Counts of nodes add up. Next step: ``rose_agent.guard.replicas.outcomes`` counts, ``/report``, the
metrics and the pool's condition LendingCertified say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose_core.stats import mixture_sequence
from rose_core.wire.sync import Trial

_ALPHA = 0.05


@dataclass(frozen=True)
class Added:
    """At most ``most`` of ``periods``, busy and lent, have a slow request because of lending, 95 %.

    Attributes:
        share: the same as a share, from which ``most`` is rounded up.
        proven: and more than none are.
    """

    most: int
    periods: int
    share: float
    proven: bool

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"lending made requests slow in at most {self.most} of {self.periods} busy periods "
            "(95 %; a burst counts once)"
        )


def added(trial: Trial) -> Added | None:
    """What is known now; None while one of the two sides has nothing."""
    if not trial.lent or not trial.withheld:
        return None
    lent = mixture_sequence(trial.lent_slow, trial.lent, _ALPHA / 2)
    withheld = mixture_sequence(trial.withheld_slow, trial.withheld, _ALPHA / 2)
    share = max(0.0, lent.high - withheld.low)
    # Of lent ones no more can be slow because of lending than are slow.
    most = min(trial.lent_slow, math.ceil(share * trial.lent - 1e-9))
    return Added(most, trial.lent, share, lent.low > withheld.high)
