"""The first enforcer of the permit: a thread that stops and continues engine trees.

A thread of its own, because the event loop also streams tokens and must not delay a stop. Every
tick it writes the host's heartbeat into each permit, looks whether the engine may run
(``tree``) and acts on the tree (``groups``).

| it ticks | because |
|---|---|
| at a ring of the bell | a permit was opened or closed, or a holder added |
| when a permit or an errand ends | nobody rings for that |
| every 2 ms | a tree is not yet where it should be |
| every 20 ms | the heartbeat, the stop button, changes without a ring |

When the thread hangs or dies, the heartbeat goes stale: the guard then freezes the tree, and the
plugin inside the engine stops by itself. Next step: ``tree`` decides, ``groups`` acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rose_agent.errors import GroupError
from rose_agent.host import metrics
from rose_agent.host.enforcement.tree import (
    EnforcementAction,
    EngineTree,
    RunConditions,
    TreeState,
    decide,
    is_late,
)
from rose_agent.os.groups import ProcessGroup
from rose_core.guard.freezing import Activity
from rose_core.guard.standstill import StandstillPatience
from rose_core.host_reasons import HostReason
from rose_core.wire.host import Holder
from rose_engines.node.doorbell import Listener, ring
from rose_engines.node.permit import Permit

_log = logging.getLogger(__name__)

# Between two ticks at most, and while a tree is on its way.
TICK_SECONDS = 0.02
_UNSETTLED_NS = 2_000_000
# A tree that does not stand still by then and still computes is killed.
PATIENCE = StandstillPatience(3_000_000_000)
# How often a tree at rest is looked at, in case another process thawed it.
_RECHECK_NS = 50_000_000
# A dedicated engine's permit is extended by this much every tick.
_OWN_PERMIT_NS = 150_000_000


class EnforcedEngine:
    """One engine under the enforcer; all methods may be called from any thread.

    Args:
        name: for the log.
        permit: mapped writable.
        own_permit: True when the host itself holds the permit open (dedicated engines).
        activity: asks for the engine's last reported activity.
    """

    def __init__(
        self,
        name: str,
        permit: Permit,
        *,
        own_permit: bool = False,
        activity: Callable[[], Activity] = lambda: Activity.UNREPORTED,
    ) -> None:
        self.name = name
        self._activity = activity
        self._permit = permit
        self._own_permit = own_permit
        self._lock = threading.RLock()
        self._group: ProcessGroup | None = None
        self._tree = EngineTree()
        self._holders: frozenset[Holder] = frozenset()
        self._wish = RunConditions(permit_open=False)
        self._errand_until_ns = 0
        self._checked_ns = 0
        self._ordered = 0.0
        self._killing = False
        self._detached = False
        self._due_ns = 0

    @property
    def due_ns(self) -> int:
        """When the next tick is due at the latest; 0 = an ordinary tick will do."""
        return self._due_ns

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who keeps the engine paused."""
        return tuple(sorted(self._holders))

    @property
    def state(self) -> TreeState:
        """State of the tree after the last tick."""
        return self._tree.state

    def stands_still_for(self, holder: Holder) -> bool:
        """The tree stands still, and the last tick knew of this holder."""
        return self._tree.state is TreeState.STOPPED and holder in self._wish.holders

    @property
    def reason(self) -> HostReason:
        """Why the engine stands still; empty when it runs."""
        return self._wish.reason

    @property
    def permit(self) -> Permit:
        """The engine's permit."""
        return self._permit

    def put(self, group: ProcessGroup | None) -> None:
        """Control the tree of a new process from now on; None = there is none."""
        with self._lock:
            self._group = group
            self._errand_until_ns = 0
            self._tree = EngineTree()
            self._checked_ns = 0

    def hold(self, holder: Holder, *, hold: bool) -> None:
        """Add or remove a holder."""
        with self._lock:
            self._holders = self._holders | {holder} if hold else self._holders - {holder}

    def grant_errand(self, seconds: float) -> None:
        """Let the tree run for this long although its permit is closed; 0 ends that."""
        with self._lock:
            self._errand_until_ns = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0

    def detach(self) -> None:
        """The engine is gone: close the permit and unmap it."""
        with self._lock:
            self._detached = True
            self._permit.close_now()
            self._permit.detach()

    def tick(self, *, stop_pressed: bool, now_ns: int) -> bool:
        """One step.

        Returns:
            True while the engine may run.
        """
        with self._lock:
            if self._detached:
                return False
            self._permit.beat_host(now_ns)
            if self._own_permit and not stop_pressed:
                self._permit.extend(now_ns + _OWN_PERMIT_NS)
            open_now = self._permit.is_open(now_ns)
            if self._wish.permit_open and not open_now:
                metrics.PERMIT_LAPSES.inc()
            errand = now_ns < self._errand_until_ns
            self._wish = RunConditions(open_now, stop_pressed, self._holders, errand)
            if self._group is not None:
                self._step(self._group, self._wish.may_run, now_ns)
            self._due_ns = self._next_look(now_ns)
            return self._wish.may_run

    def _next_look(self, now_ns: int) -> int:
        goal = TreeState.RUNNING if self._wish.may_run else TreeState.STOPPED
        if self._group is not None and self._tree.state is not goal:
            return now_ns + _UNSETTLED_NS
        ends = (self._permit.until_ns, self._errand_until_ns)
        return min((end for end in ends if end > now_ns), default=0)

    def _step(self, group: ProcessGroup, may_run: bool, now_ns: int) -> None:
        if self._tree.state is TreeState.STOPPED and not may_run:
            if now_ns - self._checked_ns < _RECHECK_NS:
                return
            self._checked_ns = now_ns
        self._decide(group, may_run, now_ns)
        if self._tree.state is TreeState.STOPPING:
            # Most trees stand still at once: look again instead of waiting for the next tick.
            self._decide(group, may_run, now_ns)

    def _decide(self, group: ProcessGroup, may_run: bool, now_ns: int) -> None:
        unfrozen = self._tree.state in {TreeState.RUNNING, TreeState.ASKED}
        frozen = not unfrozen and not may_run and group.is_frozen()
        cpu_ns = group.cpu_ns() if is_late(self._tree, PATIENCE, now_ns) else None
        tree, action = decide(
            self._tree,
            may_run=may_run,
            frozen=frozen,
            now_ns=now_ns,
            patience=PATIENCE,
            cpu_ns=cpu_ns,
            activity=Activity.UNREPORTED if may_run else self._activity(),
        )
        stopping = {TreeState.ASKED, TreeState.STOPPING}
        if tree.state in stopping and self._tree.state not in stopping:
            self._ordered, self._killing = time.perf_counter(), False
        try:
            self._act(group, action)
        except GroupError as error:
            # The next tick tries again from the same state; the plugin enforces meanwhile.
            metrics.GROUP_ERRORS.inc()
            _log.error("%s: %s: %s", self.name, action, error)  # every tick
            return
        if tree.state is TreeState.STOPPED and self._tree.state is TreeState.STOPPING:
            metrics.STOP_SECONDS.observe(time.perf_counter() - self._ordered)
        self._tree = tree

    def _act(self, group: ProcessGroup, action: EnforcementAction) -> None:
        if action is EnforcementAction.FREEZE:
            group.freeze()
        elif action is EnforcementAction.THAW:
            group.thaw()
        elif action is EnforcementAction.KILL:
            if not self._killing:  # ordered again every tick, one kill all the same
                metrics.count_kill(HostReason.DID_NOT_STOP)
                _log.error("%s: did not stand still in time, killing it", self.name)
            self._killing = True
            group.kill()


class Enforcer:
    """The thread over all watched engines.

    Args:
        stop_pressed: looks at the node's stop button; called every tick.
        bell: where guards ring.
    """

    def __init__(self, stop_pressed: Callable[[], bool], bell: Path) -> None:
        self._stop_pressed = stop_pressed
        self._bell = bell
        self._watched: tuple[EnforcedEngine, ...] = ()
        self._lock = threading.Lock()
        self._ending = False
        self._last_tick_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="enforcer", daemon=True)

    def start(self) -> None:
        """Begin to tick.

        Raises:
            OSError: nothing can listen for the bell.
        """
        self._listener = Listener(self._bell)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nothing is thawed or frozen by that."""
        self._ending = True
        self.wake()
        self._thread.join()

    def watch(self, watched: EnforcedEngine) -> None:
        """Take an engine under control."""
        with self._lock:
            self._watched = (*self._watched, watched)
        self.wake()

    def forget(self, watched: EnforcedEngine) -> None:
        """Release an engine that has ended."""
        with self._lock:
            self._watched = tuple(other for other in self._watched if other is not watched)

    def wake(self) -> None:
        """Tick now instead of at the end of the period."""
        ring(self._bell)

    def age_seconds(self) -> float:
        """Time since the last tick ended; the host is unhealthy when this grows."""
        return (time.monotonic_ns() - self._last_tick_ns) / 1e9

    def tick(self) -> float:
        """One round over all engines; seconds until the next one."""
        pressed, watched = self._stop_pressed(), self._watched
        for engine in watched:
            self._tick_one(engine, pressed)
        self._last_tick_ns = now_ns = time.monotonic_ns()
        due_ns = min((engine.due_ns for engine in watched if engine.due_ns), default=0)
        return min((due_ns - now_ns) / 1e9, TICK_SECONDS) if due_ns else TICK_SECONDS

    def _tick_one(self, watched: EnforcedEngine, pressed: bool) -> None:
        try:
            watched.tick(stop_pressed=pressed, now_ns=time.monotonic_ns())
        except Exception:  # noqa: BLE001  # one engine's trouble must not stop the others' enforcer
            metrics.GROUP_ERRORS.inc()
            _log.exception("%s: enforcer tick failed", watched.name)

    def _run(self) -> None:
        while not self._ending:
            self._listener.wait(self.tick())
        self._listener.close()
