"""Integer accounting of one slot, for the operator and for the meters."""

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
    """

    last_ns: int
    lent_ns: int = 0
    open_ns: int = 0
    tokens: int = 0
    tokens_seen: int = 0
    reclaims: dict[str, int] = field(default_factory=dict)

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
            grown = status.generated_tokens - self.tokens_seen
            # A counter that fell began anew with a new engine.
            self.tokens += grown if grown >= 0 else status.generated_tokens
            self.tokens_seen = status.generated_tokens

    def reclaimed(self, rung: Rung) -> None:
        """Count a rung."""
        name = rung.name.title()
        self.reclaims[name] = self.reclaims.get(name, 0) + 1
        metrics.RUNGS.labels(name).inc()
