"""Integer accounting of one slot, for the operator and for the metrics.

Next step: ``report`` sends the totals; ``rose_core.accounting`` prices them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_agent.guard import metrics
from rose_core.guard.ladder import Rung
from rose_core.wire.host import EngineStatus


@dataclass
class Totals:
    """What a slot has had and made since this guard began.

    Attributes:
        lent_ns, open_ns: time granted, and time with an open permit.
        last_ns: until when that has been counted.
        tokens: output tokens, over restarts of the engine.
        reclaims: rungs entered, by name.
        weight_bytes: size of the weights that were pulled for its engines.
        requests: live requests that ended beside it; ``violations`` are those that missed the SLO
            and had met an open gate.
    """

    last_ns: int
    lent_ns: int = 0
    open_ns: int = 0
    tokens: int = 0
    tokens_seen: int = 0
    reclaims: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    weights_seen: int = 0
    requests: int = 0
    violations: int = 0
    beside_seen: tuple[int, int] | None = None

    def account(
        self, now_ns: int, *, granted: bool, until_ns: int, status: EngineStatus | None
    ) -> None:
        """Add the time since the last call and the tokens the engine made meanwhile.

        Args:
            now_ns: until when.
            granted: the slot is.
            until_ns: end of the permit as it stood all that time; 0 = it was closed.
            status: the host's last word about the engine.
        """
        elapsed = max(0, now_ns - self.last_ns)
        opened = max(0, min(now_ns, until_ns) - self.last_ns)
        self.last_ns = now_ns
        if granted:
            self.lent_ns += elapsed
            metrics.LENT_SECONDS.inc(elapsed / 1e9)
        if opened:
            self.open_ns += opened
            metrics.OPEN_SECONDS.inc(opened / 1e9)
        if status is not None:
            self.tokens += _gain(self.tokens_seen, status.generated_tokens)
            self.weight_bytes += _gain(self.weights_seen, status.weight_bytes)
            self.tokens_seen, self.weights_seen = status.generated_tokens, status.weight_bytes

    def note_replica(self, finished: int, violations: int) -> None:
        """Note the replica's counters; requests from before the slot do not count for it."""
        seen = self.beside_seen or (finished, violations)
        self.requests += _gain(seen[0], finished)
        self.violations += _gain(seen[1], violations)
        self.beside_seen = finished, violations

    def count_reclaim(self, rung: Rung) -> None:
        """Count a rung."""
        name = rung.name.title()
        self.reclaims[name] = self.reclaims.get(name, 0) + 1
        metrics.RUNGS.labels(name).inc()


def _gain(seen: int, now: int) -> int:
    """Growth of a counter; one that fell began anew, with a new engine or replica."""
    return now - seen if now >= seen else now
