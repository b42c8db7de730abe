"""A sandbox host on virtual time: what is saved when is decided by production's own functions.

| decided | in ``rose_core.sandboxes`` by |
|---|---|
| what a boundary saves, and whether the sandbox is suspended | ``policy.decide`` |
| which boundary is saved however long its look takes | ``policy.is_starved`` |
| what a host counts with after each | ``policy.learn_from``, ``policy.SaveCosts`` |
| which boundaries save now | ``traffic.admit`` |
| the states of a sandbox | ``turns.SandboxClock`` |

Only what the shell does between these is written here: a boundary waits for a place, looks, saves
for as long as was measured and publishes; a reply is held until then, ``HOLD_SECONDS`` at most if
its boundary does not save yet; one that is being saved is waited for, as the next command is, which
waits for a look too.
Next step: ``agents`` lives on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rose_core.sandboxes.policy import (
    BoundaryAction,
    HostPressure,
    ModelWait,
    SaveCosts,
    TurnBoundary,
    decide,
    is_starved,
    learn_from,
)
from rose_core.sandboxes.traffic import PLACES, CheckpointRequest, admit, is_memory_short
from rose_core.sandboxes.turns import HOLD_SECONDS, SandboxClock, SandboxPhase
from rose_simulate.model.clock import SECOND, VirtualClock


@dataclass(frozen=True)
class TurnChanges:
    """What a turn changed, as ``rose_core.sandboxes.policy.SandboxChanges``."""

    files: bool = False
    processes: bool = False
    unknown: tuple[str, ...] = ()

    def joined(self, other: TurnChanges) -> TurnChanges:
        """Both, since the record before the first of them."""
        return TurnChanges(
            self.files or other.files,
            self.processes or other.processes,
            tuple(dict.fromkeys((*self.unknown, *other.unknown))),
        )


@dataclass(frozen=True)
class HostSetting:
    """A host and what else happens on its machine.

    Attributes:
        saving: seconds of each action, from its place to its durable record.
        resuming: seconds until a suspended sandbox runs again.
        looking: seconds of a look beyond those, before a boundary knows what to save.
        room: sandboxes whose memory the machine has; None: enough for all.
        costs: that ``decide`` is told at first; the host learns them as it goes.
        burns_share: part of the time in which serving of the node burns its budget.
        burn_s: seconds of one such stretch.
    """

    saving: Mapping[BoundaryAction, float]
    resuming: float
    looking: float = 0.0
    room: float | None = None
    costs: SaveCosts = field(default_factory=SaveCosts)
    burns_share: float = 0.0
    burn_s: float = 3.0


@dataclass(eq=False)
class SimulatedSandbox:
    """One sandbox.

    Attributes:
        key: its name on the host.
        clock: production's.
        changes: since its newest record.
        held_since: nanoseconds at which its reply came and was not let go; None: none is held.
        release: called when the agent may act on the reply.
        action: of the boundary that is being saved.
        looks: its boundary has a place and does not know yet what to save.
    """

    key: str
    clock: SandboxClock = field(default_factory=SandboxClock)
    changes: TurnChanges = field(default_factory=TurnChanges)
    held_since: int | None = None
    release: Callable[[], None] = lambda: None
    action: BoundaryAction = BoundaryAction.NONE
    looks: bool = False


@dataclass
class HostTally:
    """What a host did, and what its agents waited for it.

    Attributes:
        actions: boundaries by what was saved.
        held_s: seconds of each reply, from its arrival until it was let go.
        late: replies that were let go before their turn had a record.
        busy_ns: of all places.
        resident_ns: nanoseconds at each number of sandboxes in memory.
    """

    actions: dict[BoundaryAction, int] = field(default_factory=dict)
    held_s: list[float] = field(default_factory=list)
    late: int = 0
    busy_ns: int = 0
    resident_ns: dict[int, int] = field(default_factory=dict)


class SimulatedSandboxHost:
    """Sandboxes of one machine.

    Args:
        clock: of the world.
        setting: of this host.
    """

    def __init__(self, clock: VirtualClock, setting: HostSetting) -> None:
        self._clock, self._setting = clock, setting
        self._costs = setting.costs
        self._waiting: dict[str, tuple[CheckpointRequest, SimulatedSandbox]] = {}
        self._saving = 0
        self._resident = 0
        self._looked_ns = 0
        self._looking = False
        self.tally = HostTally()

    def create(self, key: str) -> SimulatedSandbox:
        """Start a sandbox; that it takes a moment is not modelled."""
        self._count(1)
        return SimulatedSandbox(key)

    def end(self, box: SimulatedSandbox) -> None:
        """End a sandbox whose agent acts."""
        self._waiting.pop(box.key, None)
        box.clock = box.clock.ended()
        self._count(-1)

    def begin_turn(self, box: SimulatedSandbox, wait: ModelWait | None, made: TurnChanges) -> None:
        """The agent asks the model, and its sandbox has changed as told."""
        box.changes = box.changes.joined(made)
        box.clock = box.clock.begin_wait(self._clock.now_s, wait)
        # A boundary that nobody waited for is this one's now.
        since = box.clock.unsaved_since
        asked = self._clock.now_s if since is None else since
        request = CheckpointRequest(box.key, asked, box.clock.expected)
        self._waiting[box.key] = request, box
        self._admit()

    def end_turn(self, box: SimulatedSandbox, release: Callable[[], None]) -> None:
        """The model has answered; ``release`` is called when the agent may act on it."""
        box.held_since, box.release = self._clock.now_ns, release
        undecided = box.looks or box.key in self._waiting
        if box.clock.phase is SandboxPhase.WAITING and undecided:
            turn = box.clock.turn
            self._clock.after(HOLD_SECONDS, lambda: self._let_go(box, turn))
        elif box.clock.phase is not SandboxPhase.SAVING:
            self._release(box)

    def begin_tally(self) -> None:
        """Count from now on."""
        self._count(0)
        self.tally = HostTally()

    def close(self) -> HostTally:
        """Count up to now."""
        self._count(0)
        return self.tally

    def pressure(self) -> HostPressure:
        """What else happens on the machine."""
        room, setting = self._setting.room, self._setting
        short = room is not None and is_memory_short(1 - self._resident / room)
        burns = setting.burns_share > 0 and self._clock.now_ns < self._burns_until()
        return HostPressure(burns, short)

    def _burns_until(self) -> int:
        """When the stretch ends in which serving burns its budget, ns; before now: it does not."""
        stretch = round(self._setting.burn_s * SECOND)
        period = round(self._setting.burn_s / self._setting.burns_share * SECOND)
        return self._clock.now_ns // period * period + stretch

    def _admit(self) -> None:
        burns, now = self.pressure().serving_burns, self._clock.now_s
        requests = [request for request, _ in self._waiting.values()]
        while begin := admit(requests, now, PLACES - self._saving, serving_burns=burns):
            for one in begin:
                _, box = self._waiting.pop(one.key)
                # One whose reply was let go gives its place back at once.
                if box.clock.phase is SandboxPhase.WAITING:
                    self._save(box)
            requests = [request for request, _ in self._waiting.values()]
        if burns and self._waiting and not self._looking:
            self._looking = True
            self._clock.at(self._burns_until(), self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self._admit()

    def _save(self, box: SimulatedSandbox) -> None:
        self._saving += 1
        if is_starved(box.clock.unsaved(self._clock.now_s), self._costs):
            box.clock = box.clock.saving()
        if self._setting.looking:
            box.looks = True
            self._clock.after(self._setting.looking, lambda: self._looked(box))
        else:
            self._decide(box)

    def _looked(self, box: SimulatedSandbox) -> None:
        box.looks = False
        self.tally.busy_ns += round(self._setting.looking * SECOND)
        if box.clock.phase is SandboxPhase.ACTING:  # its reply was let go: the next one has it
            self._saving -= 1
            self._hand_over(box)
            self._admit()
        else:
            self._decide(box)

    def _decide(self, box: SimulatedSandbox) -> None:
        turn = TurnBoundary(box.clock.turn, box.clock.saved)
        pressure = replace(self.pressure(), serving_burns=False)  # admitted
        wait = box.clock.wait if box.held_since is None else None
        made = decide(turn, box.changes, wait, self._costs, pressure)
        self._costs = learn_from(made, wait, self._costs, pressure)
        if box.clock.phase is not SandboxPhase.SAVING:
            box.clock = box.clock.saving()
        box.action, box.changes = made.action, TurnChanges()
        seconds = self._setting.saving[made.action]
        self.tally.actions[made.action] = self.tally.actions.get(made.action, 0) + 1
        self.tally.busy_ns += round(seconds * SECOND)
        self._clock.after(seconds, lambda: self._saved(box))

    def _saved(self, box: SimulatedSandbox) -> None:
        self._saving -= 1
        if box.action is BoundaryAction.SUSPEND:
            box.clock = box.clock.suspended()
            self._costs = self._costs.suspended(self._setting.saving[box.action])
            self._count(-1)
        else:
            box.clock = box.clock.stored()
            self._costs = self._costs.saved(self._setting.saving[box.action])
        if box.held_since is not None:
            self._release(box)
        self._admit()

    def _let_go(self, box: SimulatedSandbox, turn: int) -> None:
        """A reply has been held for as long as one may be whose boundary does not save."""
        waits = box.clock.phase is SandboxPhase.WAITING and box.clock.turn == turn
        if not waits or box.held_since is None:
            return
        if box.looks:  # what the agent does next waits for the look
            box.clock = box.clock.ready(self._clock.now_s)
        else:
            self._release(box)

    def _release(self, box: SimulatedSandbox) -> None:
        if box.clock.phase is SandboxPhase.SUSPENDED:
            self._count(1)
            box.clock = box.clock.ready(self._clock.now_s)
            self._clock.after(self._setting.resuming, lambda: self._resumed(box))
            return
        box.clock = box.clock.ready(self._clock.now_s)
        self._hand_over(box)

    def _resumed(self, box: SimulatedSandbox) -> None:
        box.clock = box.clock.resumed()
        self._costs = self._costs.resumed(self._setting.resuming)
        self._hand_over(box)

    def _hand_over(self, box: SimulatedSandbox) -> None:
        since = box.held_since
        if since is None:
            return
        box.held_since = None
        self.tally.held_s.append((self._clock.now_ns - since) / SECOND)
        self.tally.late += box.clock.saved < box.clock.turn
        box.release()

    def _count(self, more: int) -> None:
        if spent := self._clock.now_ns - self._looked_ns:
            known = self.tally.resident_ns
            known[self._resident] = known.get(self._resident, 0) + spent
        self._looked_ns, self._resident = self._clock.now_ns, self._resident + more
