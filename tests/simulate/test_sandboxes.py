"""Sandboxes on virtual time are decided about by what the sandbox host decides with."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import rose_core.sandboxes.policy
import rose_core.sandboxes.traffic
import rose_core.sandboxes.turns
from rose_core.sandboxes.policy import BoundaryAction, HostPressure, ModelWait, SaveCosts
from rose_core.sandboxes.turns import HOLD_SECONDS, SandboxPhase
from rose_simulate.main import main
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.jobs.workload import PlannedTurn
from rose_simulate.model.sandboxes import host as simulated
from rose_simulate.model.sandboxes.agents import AgentsOutcome, AgentsSetting, live
from rose_simulate.model.sandboxes.host import (
    HostSetting,
    SimulatedSandbox,
    SimulatedSandboxHost,
    TurnChanges,
)
from tests.sandbox.test_host import World

SAVING = {
    BoundaryAction.NONE: 0.1,
    BoundaryAction.FILES: 0.5,
    BoundaryAction.PROCESSES: 0.5,
    BoundaryAction.FULL: 1.0,
    BoundaryAction.SUSPEND: 1.0,
}
SETTING = HostSetting(SAVING, 0.5, costs=SaveCosts(math.inf, math.inf))
SHARES = (50.0, 20.0, 10.0, 20.0)
# A reply of 200 tokens takes 8 s where a token takes 40 ms.
EPISODES = (tuple(PlannedTurn(10, 200, 8.0) for _ in range(5)),)


def lived(agents: int, host: HostSetting, *, inspected: bool = True) -> AgentsOutcome:
    return live(AgentsSetting(agents, 0.04, SHARES, inspected), host, EPISODES, 1, 600.0)


class Stage:
    """One host, its clock, and when replies were let go."""

    def __init__(self, setting: HostSetting = SETTING) -> None:
        self.clock = VirtualClock()
        self.host = SimulatedSandboxHost(self.clock, setting)
        self.released: dict[str, float] = {}

    def turn(
        self, key: str, reply_s: float, changes: TurnChanges, wait: ModelWait | None = None
    ) -> SimulatedSandbox:
        box = self.host.create(key)
        self.again(box, reply_s, changes, wait)
        return box

    def again(
        self,
        box: SimulatedSandbox,
        reply_s: float,
        changes: TurnChanges,
        wait: ModelWait | None = None,
    ) -> None:
        def release() -> None:
            self.released[box.key] = self.clock.now_s

        self.host.begin_turn(box, wait, changes)
        self.clock.after(reply_s, lambda: self.host.end_turn(box, release))

    def until(self, seconds: float) -> None:
        self.clock.run(round(seconds * SECOND))


def test_the_simulator_holds_the_sandbox_hosts_own_functions() -> None:
    assert vars(simulated)["decide"] is rose_core.sandboxes.policy.decide
    assert vars(simulated)["is_starved"] is rose_core.sandboxes.policy.is_starved
    assert vars(simulated)["learn_from"] is rose_core.sandboxes.policy.learn_from
    assert vars(simulated)["admit"] is rose_core.sandboxes.traffic.admit
    assert vars(simulated)["SandboxClock"] is rose_core.sandboxes.turns.SandboxClock


def test_a_reply_is_held_only_for_what_its_wait_did_not_hide() -> None:
    stage = Stage()
    stage.turn("long", 5.0, TurnChanges(files=True))
    stage.turn("short", 0.4, TurnChanges(files=True))
    stage.until(10)
    assert stage.released == {"long": 5.0, "short": 1.0}
    assert stage.host.close().late == 0


def test_the_soonest_reply_is_saved_first_and_one_without_a_place_is_let_go_unsaved() -> None:
    stage = Stage(replace(SETTING, saving={**SAVING, BoundaryAction.FULL: 4.0}))
    for key in ("a", "b"):
        stage.turn(key, 9.0, TurnChanges(), ModelWait(9.0, 0.5))
    late = stage.turn("late", 9.0, TurnChanges(), ModelWait(9.0, 0.5))
    soon = stage.turn("soon", 4.5, TurnChanges(), ModelWait(4.5, 0.5))
    never = stage.turn("never", 0.5, TurnChanges(files=True), ModelWait(60.0, 0.5))
    stage.until(4.2)
    assert (soon.clock.phase, late.clock.phase) == (SandboxPhase.SAVING, SandboxPhase.SAVING)
    assert stage.released["never"] == 0.5 + HOLD_SECONDS
    stage.again(never, 30.0, TurnChanges(processes=True))
    stage.until(40)
    tally = stage.host.close()
    assert (tally.late, never.clock.saved) == (1, 2)
    assert tally.actions == {BoundaryAction.FULL: 5}, "of the turn before it is saved with it"


def test_what_a_turn_left_unsaved_changed_is_saved_with_the_next() -> None:
    stage = Stage(replace(SETTING, burns_share=0.25, burn_s=5.0))
    box = stage.host.create("box")
    stage.until(6)  # serving burns from 0 s to 5 s, and from 20 s to 25 s
    stage.again(box, 2.0, TurnChanges())
    stage.until(21)
    stage.again(box, 0.5, TurnChanges(files=True))
    stage.until(24)
    assert (box.clock.phase, box.clock.saved) == (SandboxPhase.ACTING, 1)
    stage.again(box, 9.0, TurnChanges(processes=True))
    stage.until(40)
    assert box.clock.saved == 3
    assert stage.host.close().actions == {BoundaryAction.FULL: 2}


def test_looks_that_outlast_every_reply_do_not_keep_all_turns_from_being_saved() -> None:
    stage = Stage(replace(SETTING, looking=HOLD_SECONDS + 1))
    box = stage.host.create("box")
    saved = []
    for turn in range(1, 8):
        stage.again(box, 0.5, TurnChanges(files=True))
        stage.until(8.0 * turn)
        saved.append(box.clock.saved)
        assert stage.released["box"] == 8.0 * (turn - 1) + HOLD_SECONDS + 1 + (
            SAVING[box.action] if saved[-1] == turn else 0.0
        )
    # A save is taken for 0.6 s before the first one: 6 s after the first turn without a record.
    assert saved == [0, 2, 2, 4, 4, 6, 6]


def test_a_host_whose_saves_take_long_makes_an_agent_wait_for_one_less_often() -> None:
    stage = Stage(replace(SETTING, saving=dict.fromkeys(SAVING, 6.0), looking=HOLD_SECONDS + 1))
    box = stage.host.create("box")
    saved = []
    for turn in range(1, 6):
        stage.again(box, 0.5, TurnChanges(files=True))
        stage.until(12.0 * turn)
        saved.append(box.clock.saved)
    # Taken for 0.6 s before the first, and for 1.68 s after it: 16.8 s are two turns and not one.
    assert saved == [0, 2, 2, 2, 5]


def test_a_turn_that_had_no_place_asks_for_the_next_since_it_began() -> None:
    stage = Stage(replace(SETTING, saving=dict.fromkeys(SAVING, 6.0)))
    for key in ("a", "b"):
        stage.turn(key, 9.0, TurnChanges(), ModelWait(1.0, 0.5))
    old = stage.turn("old", 0.5, TurnChanges(), ModelWait(60.0, 0.5))
    stage.until(3)
    assert (old.clock.phase, old.clock.saved) == (SandboxPhase.ACTING, 0)
    stage.again(old, 60.0, TurnChanges(), ModelWait(60.0, 0.5))
    young = [stage.turn(key, 9.0, TurnChanges(), ModelWait(3.0, 0.5)) for key in ("c", "d")]
    stage.until(6.1)
    phases = [box.clock.phase for box in (old, *young)]
    assert phases == [SandboxPhase.SAVING, SandboxPhase.SAVING, SandboxPhase.WAITING]


def test_a_host_that_found_resuming_slow_suspends_again() -> None:
    found = lived(16, replace(SETTING, room=12.0, costs=SaveCosts(1.0, 40.0)))
    assert found.tally.actions[BoundaryAction.SUSPEND] > 0


def test_a_sandbox_that_waits_long_is_suspended_where_memory_is_short_and_its_reply_resumes() -> (
    None
):
    stage = Stage(replace(SETTING, room=1.0, costs=SaveCosts(1.0, 0.5)))
    box = stage.turn("box", 9.0, TurnChanges(), ModelWait(9.0, 0.9))
    stage.until(5)
    assert box.clock.phase is SandboxPhase.SUSPENDED
    assert not stage.host.pressure().memory_short
    stage.until(20)
    assert stage.released == {"box": 9.5}
    resident = stage.host.close().resident_ns
    assert resident == {1: 12 * SECOND, 0: 8 * SECOND}


def test_replies_are_held_more_where_more_live_on_a_host_or_nobody_inspects() -> None:
    few, many = lived(4, SETTING), lived(64, SETTING)
    blind = lived(64, SETTING, inspected=False)
    assert few.held_share < many.held_share < blind.held_share
    assert few.busy_share < many.busy_share < blind.busy_share
    assert set(blind.tally.actions) == {BoundaryAction.FULL}


def test_suspending_frees_memory_and_costs_replies() -> None:
    kept = lived(16, replace(SETTING, room=12.0))
    away = lived(16, replace(SETTING, room=12.0, costs=SaveCosts()))
    assert BoundaryAction.SUSPEND not in kept.tally.actions
    assert set(kept.tally.resident_ns) == {16}
    assert min(away.tally.resident_ns) < 12
    assert away.held_share > kept.held_share


def test_equal_seeds_give_equal_runs() -> None:
    first, second = (lived(32, replace(SETTING, burns_share=0.2)) for _ in range(2))
    assert first == second


async def test_the_host_does_at_each_boundary_what_the_simulated_one_does(tmp_path: Path) -> None:
    """The same turns for production's host, whose sandboxes are in this process."""
    turns = (
        ("true", TurnChanges(), None),
        ("true", TurnChanges(), None),
        ("echo 1 > /home/a", TurnChanges(files=True), ModelWait(3.0, 0.5)),
        ("sleep 100 &", TurnChanges(processes=True), ModelWait(19.0, 0.5)),
        ("echo 2 > /home/b; export X=1", TurnChanges(True, True), ModelWait(21.0, 0.5)),
        ("true", TurnChanges(), ModelWait(4.5, 0.5)),
    )
    world = World(tmp_path)
    stage = Stage(HostSetting(SAVING, 0.5))
    box = stage.host.create("box")
    await world.host.create("box")
    for number, (command, changes, wait) in enumerate(turns):
        await world.host.exec("box", command, 5)
        short = number == len(turns) - 1
        world.traffic = HostPressure(memory_short=short)
        if short:
            stage.host._setting = replace(stage.host._setting, room=1.0)
        await world.host.turn_began("box", wait=wait)
        boundary = world.host._box("box").boundary
        assert boundary is not None
        await boundary
        stage.again(box, 30.0, changes, wait)
        stage.until(stage.clock.now_s + 20)
        result = await world.host.state("box")
        real = (result.action, result.phase, result.turn, result.recoverable_to)
        assert real == (box.action, box.clock.phase, box.clock.turn, box.clock.saved), command
        await world.host.tokens_ready("box")
        stage.until(stage.clock.now_s + 20)
        assert (await world.host.state("box")).phase == box.clock.phase == SandboxPhase.ACTING
    await world.host.close()


def test_the_command_prints_three_tables_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sandboxes", "--agents", "16", "--middle", "16", "--rooms", "0.5", "--burns", "0.95"]
    assert main([*given, "--seeds", "1", "--seconds", "900", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n|---|") == 3
    found = json.loads((tmp_path / "sandboxes.json").read_text())
    plain, blind, roomy, burning = found["levels"]
    assert plain["turns"] > 20
    assert set(blind["actions"]) == {"full"}
    assert roomy["actions"]["suspend"]
    assert roomy["over_share"] > 0
    assert burning["held_share"] > plain["held_share"]
    assert (
        main([*given, "--seeds", "1", "--seconds", "300", "--out", str(tmp_path), "--faster=4"])
        == 0
    )
    faster = json.loads((tmp_path / "sandboxes.json").read_text())
    assert faster["saving"]["full"] == found["saving"]["full"] / 4
    assert faster["levels"][1]["busy_share"] < blind["busy_share"]
    assert main(["sandboxes", "--faster=0"]) == 2


def test_the_command_names_a_trace_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sandboxes", "--episodes", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err
