"""Workers: processes that verify, one function each, kept for the next reward of that function.

| a worker is | from | left by |
|---|---|---|
| idle | it has answered and waits for the next | ``take``, or ended to make room |
| busy | ``take`` | its answer, its time limit or its death |

At most ``most`` exist. Where that many do, a function without an idle worker takes the place of
another function's, the one idle for longest. A worker that overran or died is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_rewards import metrics
from rose_rewards.errors import BadFunctions, WorkerEnded, WorkerKilled
from rose_rewards.functions import RewardFunction
from rose_rewards.worker import Terms

# An answer is a number, or an object with two; more is a function that has gone wrong.
_LONGEST_ANSWER = 64 << 10
# Importing a large library (sympy, torch) on a cold disk.
_START_SECONDS = 60.0
# Between the end of a pipe and that of its process.
_END_SECONDS = 1.0


def users(functions: Mapping[str, RewardFunction], first: int) -> dict[str, int]:
    """The user of each function's workers, one per team; ROSE's own rules have one too.

    Args:
        functions: the platform's list.
        first: user id of the first team.

    Raises:
        BadFunctions: this process is no root, and more than one team has functions.
    """
    teams = sorted({one.team for one in functions.values() if one.takes_worker})
    if os.geteuid() == 0:
        return {
            name: first + teams.index(one.team)
            for name, one in functions.items()
            if one.takes_worker
        }
    if len(teams) > 1:
        message = (
            f"functions of {len(teams)} teams ({', '.join(team or 'all' for team in teams)}) need "
            "a user each, which takes root; start one process per team, or as root"
        )
        raise BadFunctions(message)
    return dict.fromkeys(functions, 0)


@dataclass
class Machines:
    """Where a copy of a verification runs, and where it had better not.

    Attributes:
        apart: machines that had its reward before, or have the other copy: not taken where there
            is another. All copies and tries of a reward share it, and each adds its own.
        mine: the one that has this copy; None = none has yet.
    """

    apart: set[object] = field(default_factory=set)
    mine: object = None


@dataclass
class Worker:
    """One process; ``folder`` is its home and its alone."""

    process: asyncio.subprocess.Process
    transport: asyncio.SubprocessTransport
    folder: Path

    @classmethod
    async def start(cls, function: RewardFunction, user: int, above: Path | None = None) -> Worker:
        """Start one and wait until its function is imported.

        Args:
            function: that it runs.
            user: whom it runs as; 0 = as this process.
            above: folder that its home is made in; None = the system's temporary one.

        Raises:
            WorkerEnded: it could not be confined, or the function cannot be imported, or not in
                time; says why.
        """
        folder = Path(tempfile.mkdtemp(prefix="rose-reward-", dir=above))
        loop = asyncio.get_running_loop()
        try:
            if user:
                os.chown(folder, user, user)
            transport, protocol = await loop.subprocess_exec(
                lambda: asyncio.subprocess.SubprocessStreamProtocol(_LONGEST_ANSWER, loop),
                *(sys.executable, "-I", "-m", "rose_rewards.worker"),
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                # Nothing of ours: a token in the environment would be the team's.
                env={
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "PATH": os.defpath,
                    "LANG": "C.UTF-8",
                },
                start_new_session=True,
            )
        except BaseException:  # also when cancelled: nobody else knows the folder
            shutil.rmtree(folder, ignore_errors=True)
            raise
        process = asyncio.subprocess.Process(transport, protocol, loop)
        made = cls(process, transport, folder)
        terms = Terms(
            function.entry,
            str(function.path or ""),
            user,
            function.memory_mebibytes << 20,
            function.network,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await made.ask(msgspec.json.encode(terms))
        except TimeoutError as error:
            await made.end()
            # No verification has run: it is no verdict, and may be tried again.
            message = f"{function.entry} was not imported within {_START_SECONDS:g} s"
            raise WorkerEnded(message) from error
        except BaseException:  # also when cancelled: nobody else knows the process
            await made.end()
            raise
        if "failed" in reply:
            await made.end()
            message = f"{function.entry} cannot be confined or imported: {reply['failed']}"
            raise WorkerEnded(message)
        return made

    async def ask(self, line: bytes) -> dict[str, Any]:
        """One line in, one out.

        Raises:
            WorkerEnded: it is gone, or wrote no answer.
        """
        assert self.process.stdin is not None  # noqa: S101  # both are pipes, see start
        assert self.process.stdout is not None  # noqa: S101
        try:
            self.process.stdin.write(line + b"\n")
            await self.process.stdin.drain()
            answer = await self.process.stdout.readline()
            reply = msgspec.json.decode(answer, type=dict[str, Any])
        except (OSError, ValueError, *UNREADABLE) as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self.process.wait()
            code = self.process.returncode
            message = "the worker wrote no answer" if code is None else f"exit code {code}"
            kind = WorkerKilled if code == -signal.SIGKILL else WorkerEnded
            raise kind(message) from error
        return reply

    async def end(self) -> None:
        """End it and whatever it has started, and remove its folder."""
        # Not process.kill(): it polls, which takes the exit code from the event loop.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A program in a session of its own may hold our pipes, and wait() lasts until they end.
        assert self.process.stdin is not None  # noqa: S101  # a pipe, see start
        if not self.process.stdin.transport.is_closing():
            self.process.stdin.transport.abort()
        if (answers := self.transport.get_pipe_transport(1)) is not None:
            answers.close()
        await self.process.wait()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


@dataclass
class WorkerPool:
    """The workers of one gateway.

    Args:
        functions: the platform's list.
        users: of each function's workers.
        most: workers at a time.
        above: folder that their homes are made in.
    """

    functions: Mapping[str, RewardFunction]
    users: Mapping[str, int]
    most: int = 1
    above: Path | None = None
    _idle: list[tuple[str, Worker]] = field(default_factory=list)
    _busy: int = 0

    def room(self, _name: str, verifying: Counter[str]) -> bool:
        """Whether one more verification may begin."""
        return verifying.total() < self.most

    def idle(self, _team: str, verifying: Counter[str]) -> int:
        """How many workers have nothing to do, whosever the verifications are."""
        return max(0, self.most - verifying.total())

    def leaves(self, _machine: object) -> bool:
        """Whether one takes nothing more: none of these does while there is something to do."""
        return False

    async def verify(
        self, name: str, body: bytes, seconds: float, _machines: Machines | None = None
    ) -> tuple[object, float]:
        """Run one verification; whoever calls it sees to it that no more than may run do.

        Two of the same reward are in two processes, whatever was said of other tries.

        Returns:
            What the function said, and its seconds; the start of a worker is not among them.

        Raises:
            WorkerEnded: the worker died or failed; the text says how.
            TimeoutError: it took longer than ``seconds``; its worker is gone.
        """
        self._busy += 1
        try:
            worker = await self._take(name)
            began = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    reply = await worker.ask(body)
            except BaseException:  # also when cancelled: what it computes is another's answer
                metrics.ENDED.labels(name).inc()
                await worker.end()
                raise
            took = time.monotonic() - began
            self._idle.append((name, worker))
        finally:
            self._busy -= 1
        if "failed" in reply:
            message = str(reply["failed"])
            raise WorkerEnded(message)
        return reply.get("said"), took

    async def _take(self, name: str) -> Worker:
        for place, (of, worker) in enumerate(self._idle):
            if of == name:
                del self._idle[place]
                return worker
        if self._idle and len(self._idle) + self._busy > self.most:
            _, oldest = self._idle.pop(0)
            # To its end, also when cancelled: nobody else knows its folder.
            await asyncio.shield(oldest.end())
        return await Worker.start(self.functions[name], self.users[name], self.above)

    async def close(self) -> None:
        """End every idle worker."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.end() for _, worker in idle))
