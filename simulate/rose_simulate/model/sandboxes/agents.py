"""Agents that live on one host, each in a sandbox, with waits of recorded turns.

An agent acts for as long as the recorded environment did, asks the model, and waits as long as the
recorded reply takes at a speed. What its commands changed is drawn by measured shares. The host is
told of the wait what a router knows: how long replies have been so far, and how often one took as
long as that (``rose_core.rollouts.capacity.reply_time.Trust``). Where an episode ends the next one
begins, in a new sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from rose_core.rollouts.capacity.reply_time import Trust
from rose_core.sandboxes.policy import ModelWait
from rose_core.sandboxes.traffic import PLACES
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.jobs.workload import Episode, PlannedTurn
from rose_simulate.model.sandboxes.host import (
    HostSetting,
    HostTally,
    SimulatedSandbox,
    SimulatedSandboxHost,
    TurnChanges,
)

WARMUP_S = 300.0
"""Not counted: most agents have ended their first episode by then."""
_SPREAD_S = 120.0
"""Over which agents begin: the longest gap of a recorded turn."""
USUAL_TOKENS = 256.0
"""Of a reply, before the first one has ended."""
CLASSES = (
    TurnChanges(),
    TurnChanges(files=True),
    TurnChanges(processes=True),
    TurnChanges(files=True, processes=True),
)
"""What a turn may change, in the order of ``AgentsSetting.shares``."""


@dataclass(frozen=True)
class AgentsSetting:
    """Agents of one host.

    Attributes:
        agents: beside each other.
        token_s: seconds of one token of a reply.
        shares: of turns that change nothing, files, processes, both; any sum.
        inspected: an inspector tells what a turn changed; without one nobody knows.
    """

    agents: int
    token_s: float
    shares: tuple[float, float, float, float]
    inspected: bool = True


@dataclass(frozen=True)
class AgentsOutcome:
    """A run.

    Attributes:
        seconds: of virtual time.
        tally: of the host.
    """

    setting: AgentsSetting
    seconds: float
    tally: HostTally

    @property
    def held_share(self) -> float:
        """Seconds for which replies were held, over all others of the agents."""
        held = sum(self.tally.held_s)
        return held / (self.setting.agents * self.seconds - held)

    @property
    def busy_share(self) -> float:
        """Of the host's places for saving, over the time."""
        return self.tally.busy_ns / SECOND / self.seconds / PLACES


class _Agent:
    """One agent: acts, asks, waits."""

    def __init__(self, world: _World, key: str) -> None:
        self._world, self._key = world, key
        self._episodes = 0
        self._left: list[PlannedTurn] = []
        self._turn = PlannedTurn(0, 0, 0.0)
        self._box: SimulatedSandbox | None = None

    def begin(self) -> None:
        """Begin an episode."""
        world = self._world
        self._episodes += 1
        self._left = list(reversed(world.draw_episode()))
        self._box = world.host.create(f"{self._key}.{self._episodes}")
        self._act()

    def _act(self) -> None:
        self._turn = self._left.pop()
        self._world.clock.after(self._turn.gap_s, self._ask)

    def _ask(self) -> None:
        world, box = self._world, self._box
        if box is None:
            return
        wait = world.expected()
        seconds = self._turn.output * world.setting.token_s
        world.host.begin_turn(box, wait, world.draw_changes())
        world.clock.after(seconds, lambda: self._answered(box, wait, seconds))

    def _answered(self, box: SimulatedSandbox, wait: ModelWait, seconds: float) -> None:
        self._world.note(wait, seconds, self._turn.output)
        self._world.host.end_turn(box, self._released)

    def _released(self) -> None:
        if self._left:
            self._act()
        elif self._box is not None:
            self._world.host.end(self._box)
            self.begin()


class _World:
    """The host, its agents, and what their router knows of replies."""

    def __init__(
        self, setting: AgentsSetting, host: HostSetting, episodes: Rows[Episode], seed: int
    ) -> None:
        self.setting = setting
        self.clock = VirtualClock()
        self.host = SimulatedSandboxHost(self.clock, host)
        self.trust = Trust()
        self._dice = random.Random(seed)  # noqa: S311 - a study
        self._episodes = episodes
        self._tokens, self._replies = 0, 0
        for number in range(setting.agents):
            agent = _Agent(self, f"{number}")
            # Beside each other agents are anywhere in an episode, and not all at its begin.
            self.clock.after(self._dice.random() * _SPREAD_S, agent.begin)

    def draw_episode(self) -> Episode:
        return self._episodes[self._dice.randrange(len(self._episodes))]

    def draw_changes(self) -> TurnChanges:
        (made,) = self._dice.choices(CLASSES, self.setting.shares)
        return made if self.setting.inspected else TurnChanges(unknown=("no inspector",))

    def expected(self) -> ModelWait:
        usual = self._tokens / self._replies if self._replies else USUAL_TOKENS
        return ModelWait(usual * self.setting.token_s, self.trust.confidence)

    def note(self, wait: ModelWait, took: float, tokens: int) -> None:
        self.trust.note(wait.seconds, took)
        self._tokens += tokens
        self._replies += 1


def live(
    setting: AgentsSetting,
    host: HostSetting,
    episodes: Rows[Episode],
    seed: int,
    seconds: float,
) -> AgentsOutcome:
    """Let agents live on a host.

    Args:
        setting: of the agents.
        host: they live on.
        episodes: that they are drawn from.
        seed: equal seeds give equal runs.
        seconds: of virtual time, after those of the warm-up.
    """
    world = _World(setting, host, episodes, seed)
    world.clock.run(round(WARMUP_S * SECOND))
    world.host.begin_tally()
    world.clock.run(round((WARMUP_S + seconds) * SECOND))
    return AgentsOutcome(setting, seconds, world.host.close())
