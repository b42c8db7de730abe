"""The table of ``enforcement``, edge by edge, and the enforcer over a tree held in memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rose_agent.errors import GroupError
from rose_agent.host.enforcement.enforcer import PATIENCE, EnforcedEngine, Enforcer
from rose_agent.host.enforcement.tree import (
    EnforcementAction,
    EngineTree,
    RunConditions,
    TreeState,
    decide,
)
from rose_agent.os.groups import wait_for
from rose_core.guard.freezing import Activity, Grace
from rose_core.guard.standstill import StandstillPatience
from rose_core.wire.host import Holder
from rose_engines.node.doorbell import Listener, ring
from rose_engines.node.permit import Permit

RUNNING, STOPPING, STOPPED = TreeState.RUNNING, TreeState.STOPPING, TreeState.STOPPED
ASKED = TreeState.ASKED
LATE_NS = PATIENCE.limit_ns + 1


@pytest.mark.parametrize(
    ("state", "may_run", "frozen", "now", "expected"),
    [
        (RUNNING, True, False, 5, (RUNNING, EnforcementAction.NONE)),
        (RUNNING, False, False, 5, (STOPPING, EnforcementAction.FREEZE)),
        (STOPPING, False, False, 5, (STOPPING, EnforcementAction.NONE)),
        (STOPPING, False, False, 200, (STOPPING, EnforcementAction.KILL)),
        (STOPPING, False, True, 5, (STOPPED, EnforcementAction.NONE)),
        (STOPPING, False, True, 200, (STOPPED, EnforcementAction.NONE)),
        (STOPPING, True, False, 5, (RUNNING, EnforcementAction.THAW)),
        (STOPPED, False, True, 5, (STOPPED, EnforcementAction.NONE)),
        (STOPPED, False, False, 5, (STOPPING, EnforcementAction.FREEZE)),
        (STOPPED, True, True, 5, (RUNNING, EnforcementAction.THAW)),
        (ASKED, True, False, 5, (RUNNING, EnforcementAction.THAW)),
        (ASKED, False, False, 5, (STOPPING, EnforcementAction.FREEZE)),
    ],
)
def test_every_edge_of_the_table_of_trees(
    state: TreeState,
    may_run: bool,
    frozen: bool,
    now: int,
    expected: tuple[TreeState, EnforcementAction],
) -> None:
    tree, done = decide(
        EngineTree(state, 0),
        may_run=may_run,
        frozen=frozen,
        now_ns=now,
        patience=StandstillPatience(100),
    )
    assert (tree.state, done) == expected


@pytest.mark.parametrize(
    ("activity", "after_ns", "expected"),
    [
        (Activity.ITERATING, 0, (ASKED, EnforcementAction.NONE)),
        (Activity.ITERATING, Grace().iteration_ns, (STOPPING, EnforcementAction.FREEZE)),
        (Activity.RESTING, 0, (STOPPING, EnforcementAction.FREEZE)),
        (Activity.STARTING, Grace().iteration_ns, (ASKED, EnforcementAction.NONE)),
        (Activity.STARTING, Grace().start_ns, (ASKED, EnforcementAction.KILL)),
    ],
)
def test_an_engine_in_its_driver_is_asked_before_it_is_frozen(
    activity: Activity, after_ns: int, expected: tuple[TreeState, EnforcementAction]
) -> None:
    now, patience = 7, StandstillPatience(10**12)
    tree, done = decide(
        EngineTree(RUNNING),
        may_run=False,
        frozen=False,
        now_ns=now,
        patience=patience,
        activity=activity,
    )
    if after_ns:
        assert (tree.state, done) == (ASKED, EnforcementAction.NONE)
        tree, done = decide(
            tree,
            may_run=False,
            frozen=False,
            now_ns=now + after_ns,
            patience=patience,
            activity=activity,
        )
    assert (tree.state, done) == expected


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (RunConditions(permit_open=True), ""),
        (RunConditions(permit_open=False), "PermitLapsed"),
        (RunConditions(permit_open=True, stop_pressed=True), "StopPressed"),
        (RunConditions(True, False, frozenset({Holder.GUARD})), "HeldByGuard"),
        (RunConditions(True, False, frozenset({Holder.GUARD, Holder.COMMIT})), "HeldByGuard"),
    ],
)
def test_an_engine_runs_only_when_nothing_speaks_against_it(
    wish: RunConditions, reason: str
) -> None:
    assert wish.reason == reason
    assert wish.may_run == (not reason)


class TreeInMemory:
    """A tree whose kernel can be slow or unwilling."""

    driver = "memory"
    directory: Path | None = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.still = False
        self.obedient = True
        self.error = ""
        self.used_ns: int | None = 0

    def pids(self) -> tuple[int, ...]:
        return (1,)

    def freeze(self) -> None:
        if self.error:
            raise GroupError(self.error)
        self.calls.append("freeze")
        self.still = self.obedient

    def thaw(self) -> None:
        self.calls.append("thaw")
        self.still = False

    def is_frozen(self) -> bool:
        return self.still

    def cpu_ns(self) -> int | None:
        return self.used_ns

    def kill(self) -> None:
        self.calls.append("kill")

    def remove(self) -> None:
        self.calls.append("remove")


@pytest.fixture
def permit(tmp_path: Path) -> Permit:
    return Permit.create(tmp_path / "permit")


@pytest.fixture
def watched(permit: Permit) -> EnforcedEngine:
    return EnforcedEngine("slot", permit)


def test_a_lapsed_permit_stops_and_an_extended_one_continues(
    watched: EnforcedEngine, permit: Permit
) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    permit.extend(1000)
    assert watched.tick(stop_pressed=False, now_ns=999)
    assert tree.calls == []
    assert not watched.tick(stop_pressed=False, now_ns=1000)
    assert tree.calls == ["freeze"]
    assert (watched.state, watched.reason) == (STOPPED, "PermitLapsed")
    permit.extend(3000)
    assert watched.tick(stop_pressed=False, now_ns=2000)
    assert tree.calls == ["freeze", "thaw"]
    assert permit.host_age_ns(2000) == 0


def test_an_engine_that_loads_is_not_frozen_before_it_rests(permit: Permit) -> None:
    """A freeze inside the driver can keep a lock that serving waits for."""
    found = [Activity.STARTING]
    watched, tree = EnforcedEngine("slot", permit, activity=lambda: found[0]), TreeInMemory()
    watched.put(tree)
    second = 1_000_000_000
    assert not watched.tick(stop_pressed=False, now_ns=second)
    assert not watched.tick(stop_pressed=False, now_ns=4 * second)
    assert (tree.calls, watched.state) == ([], ASKED)
    assert not watched.stands_still_for(Holder.GUARD)
    assert 0 < watched.due_ns - 4 * second < 20_000_000
    found[0] = Activity.RESTING
    watched.tick(stop_pressed=False, now_ns=4 * second + 1)
    assert (tree.calls, watched.state) == (["freeze"], STOPPED)


def test_an_engine_that_loads_and_never_rests_is_ended(permit: Permit) -> None:
    watched = EnforcedEngine("slot", permit, activity=lambda: Activity.STARTING)
    tree = TreeInMemory()
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=1)
    watched.tick(stop_pressed=False, now_ns=1 + Grace().start_ns)
    assert tree.calls == ["kill"]


def test_an_engine_whose_boundary_does_not_come_is_frozen_at_the_end_of_its_grace(
    permit: Permit,
) -> None:
    watched = EnforcedEngine("slot", permit, activity=lambda: Activity.ITERATING)
    tree = TreeInMemory()
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=1)
    watched.tick(stop_pressed=False, now_ns=Grace().iteration_ns)
    assert tree.calls == []
    watched.tick(stop_pressed=False, now_ns=1 + Grace().iteration_ns)
    assert tree.calls == ["freeze"]


def test_nobodys_resume_undoes_anothers_pause(watched: EnforcedEngine, permit: Permit) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    permit.extend(10_000)
    watched.hold(Holder.GUARD, hold=True)
    watched.hold(Holder.COMMIT, hold=True)
    assert not watched.tick(stop_pressed=False, now_ns=1)
    watched.hold(Holder.GUARD, hold=False)
    assert not watched.tick(stop_pressed=False, now_ns=2)
    assert tree.calls == ["freeze"]
    watched.hold(Holder.COMMIT, hold=False)
    assert watched.tick(stop_pressed=False, now_ns=3)
    assert tree.calls == ["freeze", "thaw"]


def test_the_stop_button_stops_under_an_open_permit(
    watched: EnforcedEngine, permit: Permit
) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    permit.extend(10_000)
    assert not watched.tick(stop_pressed=True, now_ns=1)
    assert watched.reason == "StopPressed"
    assert tree.still


def test_a_tree_that_does_not_stand_still_is_killed_and_told_of_once(
    watched: EnforcedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tree = TreeInMemory()
    tree.obedient = False
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=0)
    watched.tick(stop_pressed=False, now_ns=LATE_NS - 1)
    tree.used_ns = 2_000_000_000
    watched.tick(stop_pressed=False, now_ns=LATE_NS)
    assert "kill" not in tree.calls, "what it used before it was late is forgiven"
    tree.used_ns += PATIENCE.used_ns + 1
    watched.tick(stop_pressed=False, now_ns=LATE_NS + 1)
    watched.tick(stop_pressed=False, now_ns=LATE_NS + 2)
    assert tree.calls.count("kill") >= 2, "ordered until it is obeyed"
    assert caplog.text.count("did not stand still") == 1


def test_a_tree_that_waits_for_its_turn_is_left_to_wait(watched: EnforcedEngine) -> None:
    tree = TreeInMemory()
    tree.obedient = False
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=0)
    for second in range(60):
        watched.tick(stop_pressed=False, now_ns=second * 1_000_000_000)
    assert "kill" not in tree.calls
    watched.tick(stop_pressed=False, now_ns=PATIENCE.longest_ns + 1)
    assert "kill" in tree.calls, "it hangs in the kernel"


def test_a_tree_whose_use_is_unknown_counts_as_computing(watched: EnforcedEngine) -> None:
    tree = TreeInMemory()
    tree.obedient, tree.used_ns = False, None
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=0)
    watched.tick(stop_pressed=False, now_ns=LATE_NS)
    assert "kill" in tree.calls


def test_a_tree_thawed_by_somebody_else_is_stopped_again(watched: EnforcedEngine) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=0)
    tree.still = False
    watched.tick(stop_pressed=False, now_ns=LATE_NS)
    assert tree.calls == ["freeze", "freeze"]


def test_a_refusing_kernel_is_asked_again_and_nothing_is_believed(watched: EnforcedEngine) -> None:
    tree = TreeInMemory()
    tree.error = "read-only file system"
    watched.put(tree)
    watched.tick(stop_pressed=False, now_ns=0)
    assert watched.state is RUNNING
    tree.error = ""
    watched.tick(stop_pressed=False, now_ns=1)
    assert watched.state is STOPPED


def test_a_dedicated_engine_holds_its_own_permit_until_the_stop_button(permit: Permit) -> None:
    watched = EnforcedEngine("dedicated", permit, own_permit=True)
    assert watched.tick(stop_pressed=False, now_ns=1_000)
    assert not watched.tick(stop_pressed=True, now_ns=2_000)


def test_one_engines_trouble_does_not_end_the_enforcer(tmp_path: Path, short_dir: Path) -> None:
    class Broken(TreeInMemory):
        def freeze(self) -> None:
            raise ZeroDivisionError

    trees = (Broken(), TreeInMemory())
    enforcer = Enforcer(lambda: False, short_dir / "bell")
    for number, tree in enumerate(trees):
        watched = EnforcedEngine(f"slot-{number}", Permit.create(tmp_path / f"permit-{number}"))
        watched.put(tree)
        enforcer.watch(watched)
    enforcer.start()
    stopped = wait_for(lambda: "freeze" in trees[1].calls, 60.0)
    enforcer.stop()
    assert stopped


def test_it_looks_again_when_a_permit_ends_and_often_while_a_tree_is_on_its_way(
    watched: EnforcedEngine, permit: Permit
) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    permit.extend(10_000)
    watched.tick(stop_pressed=False, now_ns=1)
    assert watched.due_ns == 10_000
    tree.obedient = False
    watched.tick(stop_pressed=False, now_ns=10_000)
    assert watched.due_ns == 10_000 + 2_000_000
    tree.still = True
    watched.tick(stop_pressed=False, now_ns=20_000)
    assert watched.due_ns == 0, "nothing ends by itself"


def test_a_ring_is_heard_at_once_and_one_that_nobody_hears_is_lost(short_dir: Path) -> None:
    bell = short_dir / "bell"
    ring(bell)
    listener = Listener(bell)
    listener.wait(0.001)
    ringing = threading.Timer(0.05, ring, (bell,))
    began = time.monotonic()
    ringing.start()
    listener.wait(60.0)
    assert time.monotonic() - began < 30.0
    for _ in range(3):
        ring(bell)
    listener.wait(60.0)
    listener.close()


def test_a_permit_that_was_closed_and_rung_for_stops_its_engine(
    watched: EnforcedEngine, permit: Permit, short_dir: Path
) -> None:
    tree = TreeInMemory()
    watched.put(tree)
    permit.extend(time.monotonic_ns() + 9_000_000_000)
    enforcer = Enforcer(lambda: False, short_dir / "bell")
    enforcer.watch(watched)
    enforcer.start()
    permit.close_now()
    ring(short_dir / "bell")
    assert wait_for(lambda: watched.state is STOPPED, 60.0)
    enforcer.stop()
