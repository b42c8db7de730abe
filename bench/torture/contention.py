"""Scripts about several hands on one engine: its gate, a second caller, other ranks, its links."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from bench.torture.process import Process, Violation, until
from bench.torture.rig import WINDOW, TortureRig
from rose_core.identity import is_base
from rose_engines.errors import EngineError
from rose_engines.weights.control import ControlClient
from rose_wire.faults import CLOCK

# Bytes of the store after which the link breaks: behind the manifest, inside the first block.
_MID_BLOCK = 9000

_DAY_SECONDS = 86_400


def gate_closes_at(world: TortureRig, process: str, fault: str) -> str:
    """The process stands still at a step, the gate closes, the process goes on."""
    before = world.weights.version
    world.restart(process, fault)
    world.publish()
    until(lambda: world[process].stopped, f"{process} reaches {fault}")
    world.close_gate()
    world[process].send(signal.SIGCONT)
    time.sleep(1.0)  # whatever it does now, it does under a closed gate
    served = world.look()
    if served not in {before, "base", *world.newest()}:
        raise Violation(f"{served} is served instead of {before}")
    world.gate_open = True
    world.restart(process)
    return f"served {served or 'nothing'} under it"


def second_hand(world: TortureRig) -> str:
    """Somebody else stages and aborts on the same control socket while versions are committed."""
    ended = threading.Event()
    calls = [0]

    async def meddle() -> None:
        while not ended.is_set():
            with contextlib.suppress(EngineError):
                async with await ControlClient.connect(world.slot.plugin_socket) as client:
                    await client.abort()
                    calls[0] += 1
                    await client.stage(Path("/nonexistent"))
            await asyncio.sleep(0.05)

    hand = threading.Thread(target=lambda: asyncio.run(meddle()))
    hand.start()
    try:
        for _ in range(3):
            world.publish()
            time.sleep(1.0)
            world.look()
    finally:
        ended.set()
        hand.join()
    if not calls[0]:
        raise Violation("the second hand never reached the engine")
    return "committed all the same"


def clock_jumps(world: TortureRig) -> str:
    """Wall clocks jump by a day and back while versions are published, folded and swept."""
    wearing = ("store", "relay", "weight-sync")
    for name in wearing:
        world.restart(name, f"{CLOCK}{_DAY_SECONDS}")
    for _ in range(WINDOW + 3):
        world.publish()
        world.durable()
        world.look()
    world.settle()
    for name in wearing:
        world.restart(name)
    return "followed all the same"


def partition(world: TortureRig) -> str:
    """The link from relay to store breaks in the middle of a block, and is healed."""
    before = world.weights.version
    world.link.cut_after(_MID_BLOCK)
    world.publish()
    until(lambda: world.link.is_cut, "the link breaks while a block passes")
    time.sleep(1.0)
    served = world.look()
    if served != before:
        raise Violation(f"{served} is served instead of {before}")
    world.link.heal()
    return f"served {served}"


def rank_late(world: TortureRig) -> str:
    """The other rank stops in mid-swap for longer than the vote lasts: all undo, and try again."""
    with _two_ranks(world, "engine.commit.scatter#1=stop"):
        world.publish()
        member = _member(world)
        until(lambda: _stopped(member), "the other rank stops in mid-swap")
        before = world.weights.version
        until(lambda: _is_late(world), "the leader gives the vote up")
        served = world.weights.version
        if world.weights.attested and served not in {before, ""} and not is_base(served):
            raise Violation(f"{world.weights.version} was vouched for without a rank's vote")
        os.kill(member, signal.SIGCONT)
        world.settle()
    return "all ranks undid, then committed"


def rank_never(world: TortureRig) -> str:
    """The other rank stops for ever: the engine says so, and is started anew."""
    with _two_ranks(world, "engine.commit.scatter#1=stop"):
        world.publish()
        member = _member(world)
        until(lambda: _stopped(member), "the other rank stops in mid-swap")
        until(lambda: world.weights.broken, "the engine is broken")
        if world.weights.attested:
            raise Violation(f"{world.weights.version} is vouched for on a broken engine")
        os.kill(member, signal.SIGKILL)
    return "engine broken, nothing served"


def rank_dies(world: TortureRig) -> str:
    """The other rank is killed while it decodes its part: nothing is staged anywhere."""
    with _two_ranks(world, "engine.stage.tile#2=kill"):
        world.publish()
        until(lambda: not world["engine"].alive or bool(world.weights.error), "somebody notices")
        if world.weights.attested and world.weights.version in world.newest():
            raise Violation("the version was vouched for without one rank")
    return "nothing new was served"


class _two_ranks(contextlib.ContextDecorator):  # noqa: N801  # reads as a phrase
    """The engine over two processes; at the end it is one process again."""

    def __init__(self, world: TortureRig, fault: str) -> None:
        self._world = world
        self._engine: Process = world["engine"]
        self._fault = fault

    def __enter__(self) -> None:
        flags = ["--ranks", "2", "--vote-seconds", "2", "--member-fault", self._fault]
        self._before = self._engine.command
        self._engine.command = [*self._before, *flags]
        self._world.restart("engine")

    def __exit__(self, *_: object) -> None:
        self._engine.command = self._before
        self._world.restart("engine")


def _member(world: TortureRig) -> int:
    """Pid of the engine's other rank."""
    leader = world["engine"].pid
    for task in Path(f"/proc/{leader}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if "rose_engines.fake.ranks" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    raise Violation("the engine has no other rank")


def _stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _is_late(world: TortureRig) -> bool:
    log = world["engine"].log
    return "no vote from ranks" in log.read_text(errors="replace")
