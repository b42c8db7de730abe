"""Keeps an engine that rests at its permit from taking the CPU that busy serving needs.

An engine that is frozen between its turns uses no CPU. An MPS client is never frozen: while serving
is busy it goes on tokenising, staging weights and answering its control socket. With
``--engine-busy-cpu-percent`` its cgroup gets that quota meanwhile, until it computes again.

| engine | quota |
|---|---|
| serves, is an MPS client, rests | busy |
| anything else: it computes, loads, is on its way to rest | its own |

It is a quota and not a weight, because serving is in another pod and weights only compare cgroups
of one parent. It is lowered only once the engine rests, because an engine that is slow to report
that it rests is ended. Next step: ``limits`` writes the quota and reads it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rose_agent.errors import GroupError
from rose_agent.host.enforcement.tree import TreeState
from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.os.limits import Limiter
from rose_core.wire.host import EngineState

_log = logging.getLogger(__name__)
# How long an engine that may compute again can still be held back.
LOOK_SECONDS = 0.01


def is_busy_quota(state: EngineState, tree: TreeState, *, by_mps: bool) -> bool:
    """Whether an engine has the quota for busy serving: it serves by MPS and rests.

    Args:
        state: of the engine's life.
        tree: what the enforcer last made of its processes.
        by_mps: it is an MPS client, which is never frozen.
    """
    return by_mps and state is EngineState.SERVING and tree is TreeState.STOPPED


@dataclass(frozen=True)
class ThrottledEngine:
    """What decides about one engine's quota.

    Attributes:
        uid: names its cgroup.
        tree: what the enforcer has made of its processes.
        by_mps: it is an MPS client, so it is never frozen.
    """

    uid: str
    state: EngineState
    tree: TreeState
    by_mps: bool

    @classmethod
    def of(cls, life: EngineLife) -> ThrottledEngine:
        """The engine as it is now."""
        by_mps = life.order.engine.sharing.compute == "MPS"
        return cls(life.folder.uid, life.state, life.watched.state, by_mps)


class CpuThrottle:
    """The quotas of every engine of a host.

    Args:
        limiter: sets quotas.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._lowered: set[str] = set()

    async def keep(self, engines: Callable[[], Iterable[EngineLife]]) -> None:
        """Keep the quotas right until cancelled; returns at once where none is for busy serving."""
        while self._limiter.limits.busy_cpu_percent:
            self.apply(map(ThrottledEngine.of, engines()))
            await asyncio.sleep(LOOK_SECONDS)

    def apply(self, engines: Iterable[ThrottledEngine]) -> None:
        """Give every engine the quota that it should have now."""
        here = set()
        for engine in engines:
            here.add(engine.uid)
            low = is_busy_quota(engine.state, engine.tree, by_mps=engine.by_mps)
            if low is not (engine.uid in self._lowered):
                self._set(engine.uid, low=low)
        self._lowered &= here

    def _set(self, uid: str, *, low: bool) -> None:
        # What was tried counts as done: a cgroup that is going away is no reason to try for ever.
        (self._lowered.add if low else self._lowered.discard)(uid)
        try:
            self._limiter.set_quota(uid, busy=low)
        except GroupError as error:
            _log.warning("%s", error)
