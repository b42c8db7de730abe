"""Does the tap see every request? Its count against the engine's own, over windows.

Levels never match (the engine counted before the tap began), so *changes* are compared, and only
between two moments at which nothing is in flight, because engines count a request at its arrival
or at its end. A path the tap cannot see (sockmap meshes, Unix sockets, engine-to-engine ingress)
shows as engine > tap.

| state | pair of quiet readings | next |
|---|---|---|
| unknown | first | unknown, with a base |
| unknown, verified | equal changes | verified |
| any | engine counted more or fewer | contradicted until a later window agrees |
| any | engine restarted (counter fell) | unknown, with a new base |
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Verification:
    """State of the comparison.

    Attributes:
        verified: None = not compared yet.
        compared_ns: when the last comparison was made.
        missed: requests the tap did not see in the last window (negative: saw too many).
    """

    verified: bool | None = None
    compared_ns: int = 0
    missed: int = 0
    _engine: int | None = None
    _tap: int = 0
    _own: int = 0

    def compare(
        self, engine: int, tap: int, own_sent: int, own_seen: int, now_ns: int
    ) -> Verification:
        """Compare one pair of readings taken while nothing was in flight.

        Args:
            engine: generating requests counted by the engine since its start.
            tap: generating requests counted by the tap since its start.
            own_sent: the agent's own scrapes so far.
            own_seen: those the tap has seen: proof that it sees this network path even when there
                is no traffic.
            now_ns: time of the reading.
        """
        base = replace(self, _engine=engine, _tap=tap, _own=own_sent - own_seen)
        if self._engine is None or engine < self._engine or tap < self._tap:
            return replace(base, verified=None, compared_ns=now_ns, missed=0)
        missed = (engine - self._engine) - (tap - self._tap)
        unseen = (own_sent - own_seen) - self._own
        verified = missed == 0 and unseen <= 0
        return replace(base, verified=verified, compared_ns=now_ns, missed=missed)
