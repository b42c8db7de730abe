"""How large the KV pool of an elastic engine may be now (pure).

An engine under kvcached has addresses for its whole pool and memory only for the pages in use. Its
limit follows the slot's budget (``memory``): what is cut there is cut here at once, and it grows by
the same small steps. A limit is an order; memory that the engine still holds above it is not free
yet, so what it holds is looked at, and an engine that does not give back is ended:

| seen | what happens |
|---|---|
| the limit is not the wanted one | it is written, also when somebody else wrote it |
| holds more than it, stopped | waits: it can give nothing back; pressure has its own rung |
| holds more, running, ``flush_s`` | its finished turns are flushed, again every ``flush_s`` |
| holds more, running, ``effect_s`` | ended (``MemoryKept``) |
| the segment is gone or is no pool | unknown; ended after ``unknown_s`` (``ElasticUnavailable``) |

Two limits mean nothing to kvcached 0.1.5 and are never written: 0, and the size the pool was made
with. Both are taken for "no change", so the least is one page of every layer, and the most is one
such page less than the whole. Next step: ``rose_agent.host.memory.elastic`` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rose_core.devices.memory import WHOLE, BudgetLimits
from rose_core.host_reasons import HostReason

# What a fresh engine may use before it has been calm for a while.
FIRST_PERMILLE = BudgetLimits().least_permille


@dataclass(frozen=True)
class ElasticPool:
    """An elastic pool, bytes.

    Attributes:
        size: what it was made with.
        bundle: one page of every layer; the least that comes and goes.
    """

    size: int
    bundle: int

    def limit(self, permille: int) -> int:
        """The limit at a budget: whole bundles, never 0 and never the whole size."""
        bundles = self.size * permille // WHOLE // self.bundle
        return max(1, min(bundles, self.size // self.bundle - 1)) * self.bundle


@dataclass(frozen=True)
class PoolSeen:
    """A pool's figures at a moment, bytes.

    Attributes:
        limit: that holds now.
        used: pages with tokens on them.
        spare: pages that it keeps mapped for the next tokens.
    """

    limit: int
    used: int
    spare: int

    @property
    def held(self) -> int:
        """Memory that nobody else can have."""
        return self.used + self.spare


@dataclass(frozen=True)
class ElasticLimits:
    """Deadlines of the module's table, seconds."""

    flush_s: float = 1.0
    effect_s: float = 10.0
    unknown_s: float = 10.0


@dataclass(frozen=True)
class OrderEffect:
    """What has become of the last order.

    Attributes:
        over_s: seconds of running in which it held more than it may.
        flushed_s: of these, when it was last flushed.
        unknown_since_s: since when nothing is known of it.
        looked_s: the last look.
        reason, message: it has to be ended; empty = it need not.
    """

    over_s: float = 0.0
    flushed_s: float = 0.0
    unknown_since_s: float | None = None
    looked_s: float | None = None
    reason: HostReason = HostReason.NONE
    message: str = ""


@dataclass(frozen=True)
class Orders:
    """What to do now.

    Attributes:
        write: the limit to write, None = it stands.
        flush: flush the cache of finished turns.
    """

    write: int | None = None
    flush: bool = False


def judge(
    before: OrderEffect,
    seen: PoolSeen | None,
    wanted: int,
    now_s: float,
    *,
    running: bool,
    limits: ElasticLimits,
) -> tuple[OrderEffect, Orders]:
    """One look.

    Args:
        before: after the last look.
        seen: None = unknown.
        wanted: the limit that should hold.
        now_s: monotonic seconds.
        running: the engine was free to run since the last look.
        limits: deadlines.
    """
    if seen is None:
        return _unknown(before, now_s, limits), Orders()
    passed = now_s - before.looked_s if running and before.looked_s is not None else 0.0
    write = wanted if seen.limit != wanted else None
    if seen.held <= wanted:
        return OrderEffect(looked_s=now_s), Orders(write)
    after = replace(before, over_s=before.over_s + passed, unknown_since_s=None, looked_s=now_s)
    flush = running and after.over_s - after.flushed_s >= limits.flush_s
    if flush:
        after = replace(after, flushed_s=after.over_s)
    if after.over_s >= limits.effect_s:
        message = (
            f"the engine holds {seen.held >> 20} MiB of KV memory {after.over_s:.0f} s after it "
            f"was limited to {wanted >> 20}"
        )
        after = replace(after, reason=HostReason.MEMORY_KEPT, message=message)
    return after, Orders(write, flush)


def _unknown(before: OrderEffect, now_s: float, limits: ElasticLimits) -> OrderEffect:
    since = before.unknown_since_s if before.unknown_since_s is not None else now_s
    after = replace(before, unknown_since_s=since, looked_s=now_s)
    if now_s - since < limits.unknown_s:
        return after
    message = "kvcached's segment is gone: what the engine holds is unknown, nothing can take it"
    return replace(after, reason=HostReason.ELASTIC_UNAVAILABLE, message=message)
