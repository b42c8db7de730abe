"""The faults: how each one strikes, how the world is mended, which word the recorder must have.

``strike`` returns the moment from which rollouts have to stop, CLOCK_MONOTONIC seconds; ``mend`` is
what a kubelet or whoever looks after the node would do (start anew what has ended, take away what
fills the disk) and nothing more: all else has to come back by itself. Next step: ``__main__``
runs the cases and judges them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from bench.faults.fault_node import FaultNode

BURST_TOKENS = 600
SERVING = "serving-0"
_INTERFACE, _PEER = f"rose{os.getpid()}a", f"rose{os.getpid()}b"
_HOURS = 7 * 3600.0

_START = {
    "agent": FaultNode.start_agent,
    "host": FaultNode.start_host,
    "tap": FaultNode.start_tap,
    "serving": FaultNode.start_serving,
}

_WELL: dict[str, object] = {"interfaces": ["lo"], "pid": 0}

_bursts: set[asyncio.Task[None]] = set()

FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
MEMORY_HOG = "held = []\nwhile True: held.append(bytearray(4 << 20))"
_guests: list[subprocess.Popen[bytes]] = []

_UNKNOWN = ("SignalMissing", "SignalStale", "SignalLost", "SignalUnverified")
_BUSY = frozenset({"ServingBusy"})


@dataclass(frozen=True)
class Case:
    """One line of the matrix.

    Attributes:
        reasons: words of which the flight recorder must have one afterwards.
        stops: the rollouts must stop; else they must go on.
        serves: serving itself is well and must answer all along.
        arguments: flags of the rollout engine for this case.
    """

    name: str
    strike: Callable[[FaultNode], Awaitable[float]]
    mend: Callable[[FaultNode], Awaitable[None]]
    reasons: frozenset[str]
    stops: bool = True
    serves: bool = True
    arguments: tuple[tuple[str, str], ...] = ()


async def _signalled(world: FaultNode, names: tuple[str, ...], number: signal.Signals) -> float:
    struck = time.monotonic()
    for name in names:
        _signal_all(world, name, number)
    return struck


def _signal_all(world: FaultNode, name: str, number: signal.Signals) -> None:
    """The tap is two processes; what one of them forked belongs to it."""
    pid = world.processes[name].pid
    children = psutil.Process(pid).children() if name == "tap" else []
    world.signal(name, number)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the other one
            child.send_signal(number)


async def _again(world: FaultNode, names: tuple[str, ...], number: signal.Signals) -> None:
    for name in names:
        if number is signal.SIGSTOP:
            _signal_all(world, name, signal.SIGCONT)
        else:
            await world.kill(name)
            await _START[name](world)


def _death(names: tuple[str, ...], number: signal.Signals, *reasons: str) -> Case:
    names_of = {"agent": "guard", "host": "engine host", "tap": "tap", "serving": "serving engine"}
    how = "killed" if number is signal.SIGKILL else "stopped"
    return Case(
        f"{' and '.join(names_of[name] for name in names)} {how}",
        functools.partial(_signalled, names=names, number=number),
        functools.partial(_again, names=names, number=number),
        frozenset(reasons),
        serves="serving" not in names,
    )


async def _namespace_gone(world: FaultNode) -> float:
    """The pod's process has ended, and its namespace with it.

    A guard in Kubernetes hears of a pod at once, one with a file when it looks into it. So the file
    is written while it waits for the operator's answer, after which it looks.
    """
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()

    def strike() -> float:
        world.write_replicas(pid=ended.pid)
        return time.monotonic()

    return await world.operator.when_asked(strike)


async def _well(world: FaultNode) -> None:
    world.write_replicas(**_WELL)
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("link", "delete", _INTERFACE)


async def _interface_down(world: FaultNode) -> float:
    _ip("link", "add", _INTERFACE, "type", "veth", "peer", "name", _PEER)
    for end in (_INTERFACE, _PEER):
        _ip("link", "set", end, "up")
    world.write_replicas(interfaces=["lo", _INTERFACE])
    # The tap opens its sockets anew, is verified, and only then the fault begins.
    await asyncio.sleep(1.0)
    await world.flowing(time.monotonic())
    struck = time.monotonic()
    _ip("link", "set", _INTERFACE, "down")
    return struck


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)


async def _burst(world: FaultNode) -> None:
    # Serving may end in the middle: that is one of the cases.
    with contextlib.suppress(Exception):  # whatever the client of a replaced pod sees is no news
        await world.generate(BURST_TOKENS)


async def _request(world: FaultNode) -> float:
    struck = time.monotonic()
    task = asyncio.create_task(_burst(world))
    _bursts.add(task)
    task.add_done_callback(_bursts.discard)
    return struck


async def _calm(_world: FaultNode) -> None:
    await asyncio.gather(*_bursts, return_exceptions=True)


async def _replaced(world: FaultNode) -> float:
    """A new pod takes the place of one that is in the middle of a burst."""
    struck = await _request(world)
    await asyncio.sleep(0.3)
    await world.kill("serving")
    return struck


async def _filled(world: FaultNode) -> float:
    ballast = world.root / "run" / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return await _request(world)


async def _emptied(world: FaultNode) -> None:
    await _calm(world)
    (world.root / "run" / "ballast").unlink()


async def _skewed(world: FaultNode, by_s: float) -> float:
    world.skew.write_text(str(by_s))
    return time.monotonic()


async def _right(world: FaultNode) -> None:
    world.skew.write_text("0")


async def _bombed(world: FaultNode) -> float:
    """The bomb has filled its limit before serving needs the machine."""
    _guests.append(world.inside_the_engine(FORK_BOMB))
    await asyncio.sleep(1.0)
    return await _request(world)


async def _disarmed(world: FaultNode) -> None:
    """Nobody disarms it but the host: the operator orders the engine anew."""
    await _calm(world)
    world.operator.generation += 1
    await world.until(lambda: _guests[-1].poll() is not None, "the bomb ends with its engine")
    _guests.pop()


async def _hogged(world: FaultNode) -> float:
    """The hog is still growing when serving needs the machine: it is held with the others."""
    _guests.append(world.inside_the_engine(MEMORY_HOG))
    return await _request(world)


async def _killed(world: FaultNode) -> None:
    """By the kernel, at the engine's limit."""
    await _calm(world)
    await world.until(lambda: _guests[-1].poll() is not None, "the hog is killed")
    _guests.pop()


KILL, STOP = signal.SIGKILL, signal.SIGSTOP

CASES: tuple[Case, ...] = (
    _death(("agent",), KILL, *_UNKNOWN, "NotGranted"),
    _death(("agent",), STOP, *_UNKNOWN),
    _death(("host",), KILL, "HostStale"),
    _death(("host",), STOP, "HostStale"),
    _death(("agent", "host"), KILL, *_UNKNOWN, "HostStale", "NotGranted"),
    _death(("agent", "host"), STOP, *_UNKNOWN, "HostStale"),
    _death(("tap",), KILL, *_UNKNOWN),
    _death(("tap",), STOP, *_UNKNOWN),
    _death(("agent", "tap"), KILL, *_UNKNOWN, "NotGranted"),
    Case("namespace gone", _namespace_gone, _well, frozenset({"SignalLost"})),
    Case("interface down", _interface_down, _well, frozenset({"SignalLost"})),
    Case("serving busy", _request, _calm, _BUSY),
    Case(
        "engine ignores its permit",
        _request,
        _calm,
        _BUSY,
        arguments=(("ignore-permit", "true"),),
    ),
    Case(
        "run directory full",
        _filled,
        _emptied,
        _BUSY,
    ),
    Case(
        "serving pod replaced in a burst",
        _replaced,
        FaultNode.start_serving,
        frozenset({"ServingGone"}),
        serves=False,
    ),
    _death(("serving",), KILL, "ServingGone"),
    Case(
        "clock jumps ahead",
        functools.partial(_skewed, by_s=_HOURS),
        _right,
        frozenset(),
        stops=False,
    ),
    Case(
        "clock jumps back",
        functools.partial(_skewed, by_s=-_HOURS),
        _right,
        frozenset(),
        stops=False,
    ),
    Case("fork bomb in the engine", _bombed, _disarmed, _BUSY),
    Case("memory hog in the engine", _hogged, _killed, _BUSY),
)
