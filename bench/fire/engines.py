"""Engines as processes that can be killed, paused and given new weights.

Stubs (``rose_engines.fake``) name the prefix and the version that made a token in the token itself.
Real engines run SGLang with a peaked model: greedily, the same prompt gives the same tokens under
every version, because all versions hold the same weights under other names.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rose_core.identity import WeightVersion
from rose_core.wire.routing import EngineKind
from rose_dev.engine_template import ProcessHandle
from rose_dev.engine_testing import PermitHolder, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, make_named
from rose_dev.owners import Owner
from rose_engines.weights.control import ControlClient

MODEL = "tiny-peaked"
_TOKEN_SECONDS = 0.004


class Process(Protocol):
    """One incarnation of an engine."""

    @property
    def url(self) -> str:
        """Data route."""
        ...

    @property
    def control(self) -> Path:
        """Control socket."""
        ...

    @property
    def holder(self) -> PermitHolder:
        """Holder of the engine's permit."""
        ...

    @property
    def process(self) -> ProcessHandle:
        """The process; leader of a session of its own."""
        ...


Start = Callable[[Path, str], AbstractContextManager[Process]]


@dataclass
class StubProcess:
    """A running fake engine."""

    url: str
    control: Path
    holder: PermitHolder
    process: ProcessHandle


@contextmanager
def start_stub(folder: Path, version: str) -> Iterator[StubProcess]:
    """Start a fake engine under an open permit; it is gone afterwards.

    Raises:
        RuntimeError: it did not start.
    """
    holder = PermitHolder(folder / "permit")
    holder.open()
    control = folder / "plugin.sock"
    command = [sys.executable, "-m", "rose_engines.fake", "--permit", str(folder / "permit")]
    command += ["--plugin-socket", str(control), "--model", str(make_named(MODEL))]
    command += ["--weight-version", version, "--max-running", "16"]
    command += ["--token-seconds", str(_TOKEN_SECONDS)]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        line = process.stdout.readline().decode() if process.stdout else ""
        if not line.startswith("url="):
            message = f"the stub did not start: {(folder / 'engine.log').read_text()[-500:]}"
            raise RuntimeError(message)
        yield StubProcess(line.removeprefix("url=").strip(), control, holder, process)
    finally:
        end(process)
        if process.stdout:
            process.stdout.close()
        holder.end()


def start_real(folder: Path, version: str) -> AbstractContextManager[Process]:
    """Start SGLang under an open permit."""
    return start_engine(folder, MODEL, version=version)


def end(process: ProcessHandle) -> None:
    """Kill the process and everything it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@dataclass(eq=False)
class Engine:
    """One name in a lease, through all its incarnations.

    Attributes:
        busy: a deed is being done to it.
        owner: who speaks for it at the router.
        alive: it could take turns.
        kills: when a process of it was ended here that ran until then, in monotonic seconds.
    """

    name: str
    kind: EngineKind
    folder: Path
    start: Start
    run: str
    cap: int
    stack: ExitStack = field(default_factory=ExitStack)
    process: Process | None = None
    owner: Owner | None = None
    busy: bool = False
    starts: int = 0
    kills: list[float] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it runs and its gate is open."""
        return self.process is not None and self.owner is not None and not self.busy

    @property
    def url(self) -> str:
        """Data route of the incarnation that runs, or empty."""
        return self.process.url if self.process else ""

    async def begin(self) -> None:
        """Start an incarnation with the base weights."""
        self.starts += 1
        folder = self.folder / f"{self.name}.{self.starts}"
        folder.mkdir(parents=True)
        starting = self.start(folder, version_of(self.run, 0))
        self.process = await asyncio.to_thread(self.stack.enter_context, starting)

    async def kill(self) -> None:
        """End the incarnation as a crash does."""
        if self.process is not None:
            if self.process.process.poll() is None:
                self.kills.append(time.monotonic())
            await asyncio.to_thread(end, self.process.process)
            self.process = None
            await asyncio.to_thread(self.stack.close)

    async def commit(self, bundle: Path, version: str) -> None:
        """Change the weights between two tokens.

        Raises:
            EngineError: the engine refused, or died.
        """
        if self.process is None:
            return
        async with await ControlClient.connect(self.process.control) as control:
            await control.stage(bundle)
            await control.commit(version, 5.0)


def version_of(run: str, number: int) -> str:
    """Name of a version."""
    return str(WeightVersion(run, 1, number))


class Bundles:
    """Versions of a run, written when first asked for; all hold the same weights."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._state = state_of(RECIPES[MODEL])
        self._lock = asyncio.Lock()

    async def of(self, number: int) -> Path:
        """The bundle of a version."""
        folder = self._folder / str(number)
        async with self._lock:
            if not folder.exists():
                target = WeightVersion(self._run, 1, number)
                await asyncio.to_thread(write_bundle, folder, target, self._state)
        return folder
