"""A host, its store or its inspector that dies at any step loses, doubles and mixes nothing.

A step is where a call of the host's to its runtime or its inspector begins or ends, or an operation
of its store's disk. With ``kill -9`` nothing that the host does after it has an effect, so each
later step of it fails too. Another host over the same store then goes on, or one that starts anew
beside the sandbox that was left behind.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from rose_core.sandboxes.outside import EffectsCrossed, EgressEffect
from rose_sandbox.box import BoundTokens, key_of
from rose_sandbox.errors import CannotCheckpoint, UnknownTurn
from rose_sandbox.host import Host
from rose_sandbox.inspector.inspector import Inspector
from rose_sandbox.runtimes.fake import FakeRuntime
from rose_sandbox.runtimes.runtime import Runtime
from rose_weights.store.records import Records
from rose_weights.store.store import Store
from tests.sandbox.test_host import World
from tests.weights.faulty import Crash, FaultyDisk

State = tuple[bytes, bytes]


@pytest.fixture
def tmp_path(memory_dir: Path) -> Path:
    """Of more than two thousand hosts, each with a store of its own."""
    return memory_dir


@dataclass
class Life:
    """Of a host; None: it lives on.

    Attributes:
        at: steps that it does.
        once: its next step alone fails, by an error and not by its death.
        steps: done.
    """

    at: int | None = None
    once: bool = False
    steps: int = 0

    def ends(self) -> bool:
        self.steps += 1
        if self.at is None:
            return False
        return self.steps == self.at + 1 if self.once else self.steps > self.at

    def step(self) -> None:
        if self.ends():
            raise OSError(5, "Input/output error") if self.once else Crash


class LivingDisk(FaultyDisk):
    """A disk each operation of which is a step of its host's life."""

    def __init__(self, life: Life) -> None:
        super().__init__(full=life.once)
        self.life = life

    def _fails(self) -> bool:
        self.operations += 1
        return self.life.ends()


class Stepped:
    """Calls whose beginning and end are steps."""

    def __init__(self, inner: object, life: Life) -> None:
        self._inner, self._life = inner, life

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name == "facts" or not inspect.iscoroutinefunction(found):
            return found

        async def call(*given: object, **named: object) -> object:
            self._life.step()
            made: object = await cast("Callable[..., Awaitable[object]]", found)(*given, **named)
            self._life.step()
            return made

        return call


class Mortal(World):
    """A world whose host dies."""

    def __init__(
        self, root: Path, name: str, life: Life, runtime: FakeRuntime | None = None
    ) -> None:
        self.life = life
        super().__init__(root, name, runtime)

    def started(self) -> Host:
        self.disk = LivingDisk(self.life)
        self.records = Records(Store(self.root / "store", disk=self.disk), "grpo")
        return Host(
            cast("Runtime", Stepped(self.runtime, self.life)),
            cast("Inspector", Stepped(self.inspector, self.life)),
            self.records,
            owner=self.name,
            scratch=self.root / self.name / "scratch",
            pressure=lambda: self.traffic,
        )

    async def state(self, session: str) -> State:
        return await self.inspector._look(key_of(session))


# A trajectory: of each turn its commands. Each counts how often it was run.
TURNS = (
    ("echo 1 >> /home/log", "export X=1"),
    ("sleep 100 &", "echo 2 >> /home/log"),
    ("echo on",),
    ("echo 4 >> /home/other",),
)
PAID = EgressEffect(0, "POST", "pay.example/orders")
"""Leaves the sandbox in the second turn."""


@dataclass
class CallerLog:
    """What its host had answered when it died.

    Attributes:
        turn: the newest that it called recoverable; -1: it has said nothing.
        paid: the effect was let out.
        children: of a fork.
        back: it has answered that it went back.
        steps: that it had done by then.
    """

    turn: int = -1
    paid: bool = False
    children: tuple[str, ...] = ()
    back: bool = False
    steps: int = 0
    states: list[State] = field(default_factory=list)


def ids(turn: int) -> list[int]:
    return list(range(2 * turn))


async def act(world: World, turn: int, reported: CallerLog) -> None:
    """The commands of a turn, counted from 1."""
    for number, command in enumerate(TURNS[turn - 1]):
        await world.host.exec("s", command, 5, name=f"{turn}.{number}")
    if turn == 2 and not reported.paid:
        await world.host._left(world.host._box("s"), PAID)
        reported.paid = True


async def play(world: Mortal, reported: CallerLog, turns: int = len(TURNS)) -> None:
    """From where the session stands to its last turn."""
    begin = (await world.host.state("s")).turn
    for turn in range(begin + 1, turns + 1):
        await act(world, turn, reported)
        if turn == 3:  # the model's answer takes long
            await world.host.suspend("s")
            reported.turn = max(reported.turn, (await world.host.state("s")).recoverable_to)
        else:
            reported.turn = max(
                reported.turn, (await world.host.checkpoint("s", ids(turn))).recoverable_to
            )
        reported.states.append(await world.state("s") if turn != 3 else (b"", b""))


async def begun(world: Mortal, reported: CallerLog) -> None:
    await world.host.create("s")
    reported.turn = 0


async def forward(world: Mortal, reported: CallerLog) -> None:
    await begun(world, reported)
    await play(world, reported)


async def forked(world: Mortal, reported: CallerLog) -> None:
    await begun(world, reported)
    await play(world, reported, 2)
    reported.children = (await world.host.fork("s", 2)).sessions
    for name in reported.children:
        await world.host.exec(name, "echo child >> /home/log", 5)
        await world.host.checkpoint(name)


async def went_back(world: Mortal, reported: CallerLog) -> None:
    await begun(world, reported)
    await play(world, reported, 2)
    await world.host.restore("s", 1, flag=True)
    reported.back = True


async def forgotten(world: Mortal, reported: CallerLog) -> None:
    await begun(world, reported)
    await play(world, reported, 1)
    await world.host.end("s", forget=True)
    reported.back = True


async def ended_twice(world: Mortal, reported: CallerLog) -> None:
    """By two replicas of a router, of which the first had missed the session's turn."""
    await begun(world, reported)
    await world.host.turn_began("s", ids(1))
    reported.turn = (await world.host.tokens_ready("s")).recoverable_to
    await world.host.exec("s", "echo 1 >> /home/log", 5)
    reported.turn = (await world.host.ended("s")).recoverable_to
    await world.host.ended("s", BoundTokens((*ids(1), 7), prompt=len(ids(1))))
    reported.back = True


Script = Callable[[Mortal, CallerLog], Awaitable[None]]


def lived(root: Path, life: Life, script: Script) -> tuple[Mortal, CallerLog]:
    """A host's life, to its end."""
    world, reported = Mortal(root, "one", life), CallerLog()

    async def live() -> None:
        await script(world, reported)
        reported.steps = life.steps
        await world.host.close()

    if life.at is None:
        asyncio.run(live())
    else:
        with pytest.raises(Crash):
            asyncio.run(live())
    return world, reported


def lives(root: Path, script: Script) -> tuple[int, CallerLog]:
    """Steps of a life that nobody ends, and what it told."""
    _, reported = lived(root, Life(), script)
    assert reported.steps > 20
    return reported.steps, reported


def after(world: Mortal, where: str) -> Mortal:
    """A host that comes after: elsewhere, on the same machine, or after the store's power loss."""
    if where == "power":
        world.disk.lose_power()
    runtime = world.runtime if where == "here" else None
    return Mortal(world.root, "one" if where == "here" else "two", Life(), runtime)


WHERE = pytest.mark.parametrize("where", ["elsewhere", "here", "power"])


@WHERE
def test_an_agent_ends_as_if_its_host_had_not_been_killed(tmp_path: Path, where: str) -> None:
    steps, whole = lives(tmp_path / "whole", forward)

    async def go_on(world: Mortal, received: CallerLog) -> None:
        try:
            back = await world.host.restore("s", flag=received.paid)
        except UnknownTurn:
            assert received.turn < 0, "it had answered that there is a sandbox"
            await world.host.create("s")
        else:
            turn = back.told.turn
            assert turn >= received.turn, "a turn that was called recoverable is lost"
            assert back.ids == (() if turn == 3 else tuple(ids(turn))), "tokens of another turn"
            if turn not in {0, 3}:
                assert await world.state("s") == whole.states[turn - 1], "a mixture"
        received.states = []
        await play(world, received)
        assert received.states[-1] == whole.states[-1]
        assert await world.output_of("s", "cat /home/log") == "1\n2"
        with pytest.raises(EffectsCrossed, match=r"pay\.example"):
            await world.host.restore("s", 1)
        await world.host.close()

    for at in range(steps):
        world, received = lived(tmp_path / f"{at}", Life(at), forward)
        asyncio.run(go_on(after(world, where), received))
        shutil.rmtree(world.root)


@WHERE
def test_a_fork_that_was_answered_is_whole_and_its_parent_always(
    tmp_path: Path, where: str
) -> None:
    steps, whole = lives(tmp_path / "whole", forked)

    async def go_on(world: Mortal, reported: CallerLog) -> None:
        for name in reported.children:
            await world.host.restore(name)
            assert await world.output_of(name, "cat /home/log") in {"1\n2", "1\n2\nchild"}
            await world.output_of(name, "pgrep sleep")
        if reported.turn == 2:
            await world.host.restore("s")
            assert await world.state("s") == whole.states[1]
            (child,) = (await world.host.fork("s", 1)).sessions
            assert child not in reported.children
            assert await world.output_of(child, "cat /home/log") == "1\n2"
        await world.host.close()

    for at in range(steps):
        world, reported = lived(tmp_path / f"{at}", Life(at), forked)
        asyncio.run(go_on(after(world, where), reported))
        shutil.rmtree(world.root)


@WHERE
def test_a_step_back_is_done_or_not_and_forgets_no_effect(tmp_path: Path, where: str) -> None:
    steps, whole = lives(tmp_path / "whole", went_back)

    async def go_on(world: Mortal, reported: CallerLog) -> None:
        if reported.paid:
            turns = world.records.turns("s")
            if turns[-1] > 1:
                assert not reported.back
                with pytest.raises(EffectsCrossed, match=r"pay\.example"):
                    await world.host.restore("s", 1)
            back = await world.host.restore("s", flag=True)
            assert back.told.turn >= (1 if reported.back else reported.turn if turns[-1] > 1 else 1)
            assert await world.state("s") == whole.states[back.told.turn - 1]
            effects = world.host._box("s").effects
            assert [one.target for one in effects] == ["pay.example/orders"], "once"
        await world.host.close()

    for at in range(steps):
        world, reported = lived(tmp_path / f"{at}", Life(at), went_back)
        asyncio.run(go_on(after(world, where), reported))
        shutil.rmtree(world.root)


@WHERE
def test_a_session_is_forgotten_or_whole(tmp_path: Path, where: str) -> None:
    steps, whole = lives(tmp_path / "whole", forgotten)

    async def go_on(world: Mortal, reported: CallerLog) -> None:
        try:
            back = await world.host.restore("s")
        except UnknownTurn:
            await world.host.create("s")
        else:
            assert not reported.back, "it had answered that all is gone"
            if back.told.turn:
                assert await world.state("s") == whole.states[0]
        await world.host.close()

    for at in range(steps):
        world, reported = lived(tmp_path / f"{at}", Life(at), forgotten)
        asyncio.run(go_on(after(world, where), reported))
        shutil.rmtree(world.root)


@WHERE
def test_a_session_that_is_ended_twice_is_bound_to_all_its_tokens_or_to_none(
    tmp_path: Path, where: str
) -> None:
    steps, _ = lives(tmp_path / "whole", ended_twice)

    async def go_on(world: Mortal, reported: CallerLog) -> None:
        if reported.turn > 0:
            back = await world.host.restore("s")
            assert back.told.turn >= reported.turn, "a turn that was called recoverable is lost"
            if back.told.turn == 1:
                assert back.ids == tuple(ids(1))
            else:
                assert await world.output_of("s", "cat /home/log") == "1"
                everything = (*ids(1), 7)
                assert back.ids == everything if reported.back else back.ids in {(), everything}
        await world.host.close()

    for at in range(steps):
        world, reported = lived(tmp_path / f"{at}", Life(at), ended_twice)
        asyncio.run(go_on(after(world, where), reported))
        shutil.rmtree(world.root)


@pytest.mark.parametrize("way", ["full", "files", "suspend"])
def test_any_one_step_of_a_boundary_may_fail_and_the_next_record_has_all(
    tmp_path: Path, way: str
) -> None:
    """Runtime, inspector and store, the disk of which is full for one operation."""

    async def live(root: Path, at: int | None) -> tuple[int, State]:
        life = Life()
        world = Mortal(root, "one", life)
        await world.host.create("s")
        await world.host.checkpoint("s", ids(1))
        await world.output_of("s", "echo 2 >> /home/log")
        if way != "files":
            await world.output_of("s", "sleep 100 &")
        life.steps, life.at, life.once = 0, at, True
        world.disk._full = True
        try:
            if way == "suspend":
                result = await world.host.suspend("s")
            else:
                result = await world.host.checkpoint("s", ids(2))
        except CannotCheckpoint:
            result = await world.host.state("s")
            assert result.phase == "acting", "the agent is held"
        failed, life.at = life.steps, None
        await world.output_of("s", "echo 3 >> /home/log")
        assert (await world.host.checkpoint("s", ids(3))).recoverable_to == 3
        there = await world.state("s")
        other = Mortal(root, "two", Life())
        await other.host.restore("s")
        assert await other.state("s") == there
        if result.recoverable_to == 2:
            await other.host.restore("s", 2)
            assert await other.output_of("s", "cat /home/log") == "2"
        await other.host.close()
        await world.host.close()
        return failed, there

    steps, whole = asyncio.run(live(tmp_path / "whole", None))
    assert steps > 4
    for at in range(steps):
        assert asyncio.run(live(tmp_path / f"{at}", at))[1] == whole, at
