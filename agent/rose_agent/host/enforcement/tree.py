"""Whether an engine may compute now, and what to do about it: pure decisions.

An engine runs only while its permit is open, nobody holds it and the node's stop button is not
pressed. On an *errand* its tree may move all the same, for a few seconds, to let go of its memory;
the plugin inside still waits for the permit and computes nothing. Four states of a tree:

| state    | may run         | must not run                                                     |
|----------|-----------------|------------------------------------------------------------------|
| Running  | -               | by ``freezing``: -> Asked, or Freeze -> Stopping                 |
| Asked    | Thaw -> Running | by ``freezing``: wait, Freeze -> Stopping, or Kill               |
| Stopping | Thaw -> Running | stands still: -> Stopped; late and computing: Kill               |
| Stopped  | Thaw -> Running | moves again (another process thawed it): as Running            |

``rose_core.guard.freezing`` says when an engine that works in a driver is frozen.
Next step: ``enforcer`` runs this every few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.guard.freezing import Activity, FreezeStep, next_step
from rose_core.guard.standstill import StandstillPatience, disobeys
from rose_core.host_reasons import HostReason
from rose_core.wire.host import Holder


class TreeState(StrEnum):
    """What the host has last made of an engine's tree."""

    RUNNING = "Running"
    ASKED = "Asked"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class EnforcementAction(StrEnum):
    """What to do to the tree now."""

    NONE = "None"
    FREEZE = "Freeze"
    THAW = "Thaw"
    KILL = "Kill"


_HELD = {
    Holder.GUARD: HostReason.HELD_BY_GUARD,
    Holder.RETRACT: HostReason.HELD_BY_RETRACT,
    Holder.COMMIT: HostReason.HELD_BY_COMMIT,
}


@dataclass(frozen=True)
class RunConditions:
    """Everything that decides whether an engine may run.

    Attributes:
        errand: the tree may move without a permit, to let go of its memory.
    """

    permit_open: bool
    stop_pressed: bool = False
    holders: frozenset[Holder] = frozenset()
    errand: bool = False

    @property
    def may_run(self) -> bool:
        """True when nothing speaks against it."""
        if self.stop_pressed:
            return False
        return self.errand or (self.permit_open and not self.holders)

    @property
    def reason(self) -> HostReason:
        """Why the engine stands still, the weightiest holder; empty when it runs."""
        if self.stop_pressed:
            return HostReason.STOP_PRESSED
        held = next((reason for holder, reason in _HELD.items() if holder in self.holders), None)
        return held or (HostReason.NONE if self.permit_open else HostReason.PERMIT_LAPSED)


@dataclass(frozen=True)
class EngineTree:
    """An engine's tree as the host steers it.

    Attributes:
        state: see the table of the module.
        since_ns: when the state was entered, CLOCK_MONOTONIC nanoseconds.
        late_cpu_ns: its processor time when it was first found late in standing still.
    """

    state: TreeState = TreeState.RUNNING
    since_ns: int = 0
    late_cpu_ns: int | None = None


def is_late(tree: EngineTree, patience: StandstillPatience, now_ns: int) -> bool:
    """Whether it should stand still by ``now_ns``, so that its processor time matters."""
    return tree.state is TreeState.STOPPING and now_ns - tree.since_ns > patience.limit_ns


def decide(
    tree: EngineTree,
    *,
    may_run: bool,
    frozen: bool,
    now_ns: int,
    patience: StandstillPatience,
    cpu_ns: int | None = None,
    activity: Activity = Activity.UNREPORTED,
) -> tuple[EngineTree, EnforcementAction]:
    """One step of the table.

    Args:
        tree: state so far.
        may_run: ``RunConditions.may_run``.
        frozen: the kernel's state of the tree; looked at only when it must not run.
        now_ns: CLOCK_MONOTONIC nanoseconds.
        patience: how long a tree may take to stand still.
        cpu_ns: its processor time, None = not known; looked at only when it is ``is_late``.
        activity: as the engine reports it; looked at only before it is frozen.

    Returns:
        The next state, and what to do to get there.
    """
    running = tree.state is TreeState.RUNNING
    if may_run:
        return (
            (tree, EnforcementAction.NONE)
            if running
            else (EngineTree(TreeState.RUNNING, now_ns), EnforcementAction.THAW)
        )
    if running or (tree.state is TreeState.STOPPED and not frozen):
        tree = EngineTree(TreeState.ASKED, now_ns)
    if tree.state is TreeState.ASKED:
        return _ask(tree, next_step(activity, now_ns - tree.since_ns), now_ns)
    if tree.state is TreeState.STOPPING:
        if frozen:
            return EngineTree(TreeState.STOPPED, now_ns), EnforcementAction.NONE
        if not is_late(tree, patience, now_ns):
            return tree, EnforcementAction.NONE
        kill = disobeys(patience, now_ns - tree.since_ns, tree.late_cpu_ns, cpu_ns)
        if tree.late_cpu_ns is None:
            tree = replace(tree, late_cpu_ns=cpu_ns)
        return tree, EnforcementAction.KILL if kill else EnforcementAction.NONE
    return tree, EnforcementAction.NONE


def _ask(tree: EngineTree, step: FreezeStep, now_ns: int) -> tuple[EngineTree, EnforcementAction]:
    if step is FreezeStep.FREEZE:
        return EngineTree(TreeState.STOPPING, now_ns), EnforcementAction.FREEZE
    return tree, EnforcementAction.KILL if step is FreezeStep.END else EnforcementAction.NONE
