"""A lease's totals in the terms of a ledger: granted time is held, time of an open gate computes.

The operator counts what agents report (``status.totals``); what only the trainer knows, accepted
trajectories, correct answers and the dedicated GPUs beside the lease, is told (``OutsideLeases``).
Nobody knows which live requests would have been late alone as well: all that missed their SLO
beside rollouts count as added, which is the most that lending can have done. What a pool kept back
while nobody borrowed is in no lease: it has a ledger of its own (``unlent_of``).
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.accounting.ledger import GpuTime, Ledger, OutputTokens, ServingImpact, Trajectories

UNLENT = "not lent"
"""How people are told of a pool's part of the bill."""


@dataclass(frozen=True)
class OutsideLeases:
    """What no lease says.

    Attributes:
        dedicated_ms: GPU-milliseconds of dedicated engines.
        accepted: trajectories trained on; ``correct`` = correct answers among them.
        alone_ms: dedicated GPU-milliseconds that an accepted trajectory took without borrowing;
            0 = nobody has run it so.
    """

    dedicated_ms: int = 0
    accepted: int = 0
    correct: int = 0
    alone_ms: int = 0

    @property
    def dedicated_only(self) -> Ledger | None:
        """One accepted trajectory without borrowing, to compare with."""
        if self.alone_ms == 0:
            return None
        used = GpuTime(self.alone_ms, self.alone_ms)
        return Ledger(dedicated=used, trajectories=Trajectories(1, 1, 1))


def ledger_of(
    lent_ms: int,
    open_ms: int,
    tokens: int,
    beside: OutsideLeases | None = None,
    *,
    serving: ServingImpact | None = None,
    weight_bytes: int = 0,
    reserved_ms: int = 0,
) -> Ledger:
    """The ledger of one lease; open time beyond the granted is a counter's skew and left out."""
    outside = beside or OutsideLeases()
    return Ledger(
        dedicated=GpuTime(outside.dedicated_ms, outside.dedicated_ms),
        borrowed=GpuTime(lent_ms, min(lent_ms, open_ms)),
        tokens=OutputTokens(tokens),
        trajectories=Trajectories(None, None, outside.accepted, outside.correct),
        serving=serving or ServingImpact(),
        weight_bytes=weight_bytes,
        reserved_milliseconds=reserved_ms,
    )


def unlent_of(reserved_ms: int) -> Ledger:
    """The ledger of a pool beside its leases: memory kept back while nobody borrowed."""
    return Ledger(unlent_reserved_milliseconds=reserved_ms)
