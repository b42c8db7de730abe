"""Runs a model's program on its cases, in a sandbox of its own at one of ROSE's sandbox hosts.

    made -> files written -> cases, some at a time -> compared here -> ended, whatever happened

What is expected stays in this process (``rose_core.rewards.answers``); what goes in is the program,
its inputs and ``program_cases``, which runs them.

| the host | then, in a new sandbox |
|---|---|
| is away: no connection, silence, a status that says so | again in its ``seconds``: no try |
| is another process than the one that made the sandbox | the same |
| refuses, or fails before the program has begun | again until ``tries`` are used up: lost |
| says that the sandbox broke once the program had begun | the same, and see below |

A program may end its sandbox, and must not be spared its zero by that. So where every try ended so,
another program has its turn, which does nothing. If that is well, the first has been judged: wrong.

A sandbox is ended when its reward is, also where that is cancelled. One whose gateway is gone ends
by its host's clock (``lifetime``).
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rose_core.rewards.answers import is_answer
from rose_core.rewards.cases import CallCase, Case, StdinCase, program_of
from rose_core.rewards.results import Scored
from rose_core.unreadable import UNREADABLE
from rose_rewards import program_cases
from rose_rewards.asking import AWAY, pause_seconds
from rose_rewards.errors import SandboxBroke, SandboxHostAway, WorkerEnded
from rose_rewards.functions import RewardFunction
from rose_wire import flags
from rose_wire.heartbeat import Heartbeat

LOG = logging.getLogger(__name__)

FOLDER: Final = "/run/rose-program"
"""In the sandbox: in memory and its root's, so that a program that fills the disk fills it not."""
USER: Final = 65_534
"""``nobody``, whom nothing else in a sandbox is."""
WALL: Final = 3.0
"""A case's time on the clock, in its processor time: a host that is shared threefold makes no
answer wrong, and a program that sleeps ends."""
MOST_BYTES: Final = 4 << 20
"""That a case may print: no more is expected than a request's body has."""
_MOST_REPORTED = 192 << 10
"""A host hands back 256 KiB of a command's output, and cuts what is longer."""
_FILE_BYTES = 64 << 20
_OWN_MEBIBYTES = 64  # of the sandbox's shells, ``program_cases`` and its folder, beside the program
_MOST_AT_ONCE = 16
"""Cases of one command. They begin with one and double: most wrong programs fail the first."""
_SLACK_SECONDS = 10.0  # of a command's limit, beyond that of its cases
_CALL_SECONDS = 30.0
_END_SECONDS = 10.0
_PAUSE_SECONDS = 0.2  # after the first time; a host of the same node is back so soon
_LIFE = "Rose-Host-Life"
_CONTROL = "print('rose')\n"


class _Reply(msgspec.Struct):
    """How a command ended, as ``rose_sandbox.runtimes.runtime.ExecResult`` has it."""

    exit_code: int
    stdout: bytes
    stderr: bytes = b""
    timed_out: bool = False
    cut: bool = False


class _Ran(msgspec.Struct):
    """How a case ended, as ``program_cases`` says it."""

    case: int
    end: str
    code: int
    seconds: float
    cpu: float
    bytes: int
    error: str = ""


@dataclass
class _Sandbox:
    """One sandbox at one host.

    Args:
        function: says where and how large.
        session: for calls.
        url: of the host, at one of its addresses.
    """

    function: RewardFunction
    session: aiohttp.ClientSession
    url: str
    name: str = field(default_factory=lambda: f"reward-{secrets.token_hex(12)}")
    life: str = ""
    begun: bool = False

    async def make(self, program: str, cases: Sequence[Case]) -> None:
        """Make it, with all that it needs."""
        function = self.function
        limits = {
            "memory_bytes": (function.memory_mebibytes + _OWN_MEBIBYTES) << 20,
            "disk_bytes": function.disk_mebibytes << 20,
        }
        made = {
            "session": self.name,
            "image": function.image,
            "limits": limits,
            "network": False,
            "lifetime": (WALL + 1) * function.seconds
            + WALL * function.case_seconds
            + 2 * _CALL_SECONDS,
        }
        await self._call("POST", "", json=made)
        source = await asyncio.to_thread(Path(program_cases.__file__).read_bytes)
        await self._put("inside.py", source, 0o644)
        await self._put("program.py", program.encode(errors="replace"), 0o644)
        await self._put("job.json", await asyncio.to_thread(_job, function, cases), 0o600)

    async def run(self, first: int, count: int, seconds: float) -> list[tuple[_Ran, bytes]]:
        """Run some cases, one at least; fewer come back where none after them can help.

        Args:
            first: number of the first case.
            count: of cases.
            seconds: none is begun after them.

        Raises:
            SandboxBroke: the program had begun, and it is not said how it ended.
            WorkerEnded: nothing has begun.
        """
        longest = WALL * self.function.case_seconds + program_cases.TIDY_SECONDS
        within = min(count * longest, seconds + longest) + _SLACK_SECONDS
        body = {
            "command": f"python3 -I {FOLDER}/inside.py {first} {count} {seconds:.3f}",
            "within": within,
            "shell": None,
        }
        self.begun = True  # until it is known that it has not
        raw = await self._call("POST", "/exec", json=body, within=within)
        try:
            reply = msgspec.json.decode(raw, type=_Reply)
        except UNREADABLE as error:
            message = f"{self.url} answers a command with what is no result: {error}"
            raise SandboxHostAway(message) from error
        report = reply.stdout
        if report == program_cases.HELLO + program_cases.IN_A_FILE:
            at = {"path": f"{FOLDER}/report"}
            report = program_cases.HELLO + await self._call("GET", "/files", params=at)
        if not report.startswith(program_cases.HELLO):
            self.begun = False
            if report.startswith(program_cases.LACKING):
                name = report[len(program_cases.LACKING) :].decode(errors="replace")
                raise WorkerEnded(f"image {self.function.image} has no {name} for the command")
            text = reply.stderr.decode(errors="replace").strip()[-200:]
            image = self.function.image
            raise WorkerEnded(f"image {image} does not run python3: {text or 'it says nothing'}")
        found = _frames(report[len(program_cases.HELLO) :], first)
        if not found:
            late = "it took too long" if reply.timed_out else "it was killed beside its program"
            raise SandboxBroke(f"what runs the program says nothing: {late}")
        return found

    async def end(self) -> None:
        """End it; one that cannot be ended goes with its lifetime."""
        with suppress(WorkerEnded, TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._call("DELETE", "", params={"forget": "true"})

    async def _put(self, name: str, data: bytes, mode: int) -> None:
        where = {"path": f"{FOLDER}/{name}", "mode": f"{mode:o}"}
        await self._call("PUT", "/files", params=where, data=io.BytesIO(data))

    async def _call(self, method: str, path: str, within: float = 0.0, **asked: Any) -> bytes:  # noqa: ANN401  # of aiohttp
        """The body of an answer.

        Raises:
            SandboxHostAway: there is none, or it is of another process.
            SandboxBroke: the sandbox does no more what it is asked, and the program had begun.
            WorkerEnded: the host refused or failed.
        """
        token = flags.token(self.function.token_file)
        shown = {"Host": urlsplit(str(self.function.sandbox)).netloc}
        if token:
            shown["Authorization"] = f"Bearer {token}"
        at = f"{self.url}/sessions" + (f"/{self.name}{path}" if path or method == "DELETE" else "")
        life = Heartbeat(self._ask)
        limit = aiohttp.ClientTimeout(total=within + _CALL_SECONDS, sock_connect=5.0)
        try:
            async with (
                life.waited_for(),
                self.session.request(method, at, headers=shown, timeout=limit, **asked) as reply,
            ):
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{self.url} is away: {type(error).__name__}: {error}"
            raise SandboxHostAway(message) from error
        if reply.status in AWAY:
            raise SandboxHostAway(f"{self.url} answered {reply.status}: {_words(body)}")
        there = reply.headers.get(_LIFE, "")
        if self.life and there != self.life:
            raise SandboxHostAway(f"{self.url} was started anew")
        self.life = there
        if reply.status < 400:
            return body
        message = f"{self.url} answered {reply.status}: {_words(body)}"
        raise SandboxBroke(message) if self.begun else WorkerEnded(message)

    async def _ask(self) -> None:
        async with self.session.get(f"{self.url}/healthz"):
            pass  # whatever it says, it lives


async def verdict(
    function: RewardFunction,
    session: aiohttp.ClientSession,
    answer: str,
    cases: Sequence[Case],
    clock: Callable[[], float],
) -> Scored:
    """What the program in an answer is worth.

    Args:
        function: says where it runs, and how its cases make a reward.
        session: for calls.
        answer: of the model; ``program_of`` says what of it is the program.
        cases: at least one.
        clock: monotonic seconds.

    Raises:
        WorkerEnded: no verdict, by the host's fault; says what it was last.
    """
    run = _Run(function, session, program_of(answer), cases, clock)
    return await run.verdict()


@dataclass
class _Run:
    """One program, in one sandbox after another where hosts fail."""

    function: RewardFunction
    session: aiohttp.ClientSession
    program: str
    cases: Sequence[Case]
    clock: Callable[[], float]
    spent: float = 0.0  # seconds of the program itself, over all sandboxes

    async def verdict(self) -> Scored:
        self._check_command()
        began, asked, failed, broke = self.clock(), 0, 0, 0
        problem = "it was not asked yet"
        while failed < self.function.tries:
            if asked:
                await asyncio.sleep(pause_seconds(asked, _PAUSE_SECONDS))
            # What the program takes is not the host's.
            if asked and self.clock() - began - self.spent > self.function.seconds:
                message = f"no verdict within {self.function.seconds:g} s of the host; {problem}"
                raise WorkerEnded(message)
            asked += 1
            try_began, spent = self.clock(), self.spent
            try:
                return await self._tried(self.function, self.program, self.cases)
            except SandboxHostAway as error:
                problem = str(error)
            except SandboxBroke as error:
                problem, failed, broke = str(error), failed + 1, broke + 1
                # However long it took the program to break it: no host's time is used up by that.
                self.spent = spent + self.clock() - try_began
            except WorkerEnded as error:
                problem, failed = str(error), failed + 1
        if broke == failed and await self._is_well():
            reason = f"SandboxEnded: the program ended its sandbox {broke} times; {problem}"
            return Scored(0.0, correct=False, seconds=self.spent, reason=reason)
        message = f"sandbox, tried {asked} times: {problem}"
        raise WorkerEnded(message)

    def _check_command(self) -> None:
        if "python" not in self.function.command and not isinstance(self.cases[0], StdinCase):
            message = f"functions are called in Python, and the command is {self.function.command}"
            raise WorkerEnded(message)

    async def _is_well(self) -> bool:
        """Whether the host runs a program that does nothing, of Python, which all images have."""
        function = self.function.model_copy(update={"command": "python3 {file}"})
        try:
            found = await self._tried(function, _CONTROL, [StdinCase("", "rose")])
        except WorkerEnded:
            return False
        return found.correct

    async def _tried(self, function: RewardFunction, program: str, cases: Sequence[Case]) -> Scored:
        box = _Sandbox(function, self.session, await _address(str(function.sandbox)))
        try:
            await box.make(program, cases)
            return await self._judged(box, cases)
        finally:
            # Also where this is cancelled: the program would run on, beside those that come.
            await _whole(box.end())

    async def _judged(self, box: _Sandbox, cases: Sequence[Case]) -> Scored:
        passed, first, count, reason, spent, cpu = 0, 0, 1, "", 0.0, 0.0
        most = self.function.seconds
        while first < len(cases):
            left = max(0.0, WALL * most - spent)
            ran = await box.run(first, min(count, len(cases) - first), left)
            for one, gave in ran:
                spent += one.seconds
                self.spent += one.seconds
                cpu += one.cpu
                case = cases[one.case]
                problem = await asyncio.to_thread(self._problem, case, one, gave)
                passed += not problem
                reason = reason or (problem and f"case {one.case + 1} of {len(cases)}: {problem}")
                first = one.case + 1
            if first < len(cases) and (cpu > most or spent > WALL * most):
                late = f"{cpu:.3g} s of a processor in {spent:.3g} s"
                reason = reason or f"TimeLimit: {late} for {first} of {len(cases)} cases"
                break
            if reason and not self.function.partial:
                break
            count = min(2 * count, _MOST_AT_ONCE)
        share = passed / len(cases)
        reward = share if self.function.partial else float(passed == len(cases))
        return Scored(reward, correct=passed == len(cases), seconds=spent, reason=reason)

    def _problem(self, case: Case, ran: _Ran, gave: bytes) -> str:
        """What is wrong with what a case came to; empty: nothing."""
        if ran.end == "late":
            return f"TimeLimit: it was ended after {ran.seconds:.3g} s"
        if ran.end != "exited":
            return f"OutputLimit: it printed more than {MOST_BYTES} bytes"
        if ran.code:
            lines = "".join(filter(str.isprintable, (ran.error.strip().splitlines() or [""])[-1]))
            return f"Crashed: it ended with {ran.code}: {lines[:200]}"
        right = is_answer(case, gave, self.function.tolerance)
        return "" if right else "WrongAnswer"


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, and be cancelled afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _address(url: str) -> str:
    """The URL at one of the addresses of its name, by chance: each is a host of its own.

    Raises:
        SandboxHostAway: the name is not known now.
    """
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme != "http":  # a certificate is of the name
        return url.rstrip("/")
    port = parts.port or 80
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            str(parts.hostname), port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise SandboxHostAway(f"{url} is away: {error}") from error
    address = str(random.choice(found)[4][0])  # noqa: S311  # no secret
    return (
        f"http://[{address}]:{port}{parts.path}"
        if ":" in address
        else (f"http://{address}:{port}{parts.path}")
    )


def _job(function: RewardFunction, cases: Sequence[Case]) -> bytes:
    """What ``program_cases`` is told; a case's half that goes in, and no more."""
    file = f"{FOLDER}/program.py"
    run = file if isinstance(cases[0], StdinCase) else f"{FOLDER}/inside.py call {file}"
    job = {
        "cases": [_given(one) for one in cases],
        "command": function.command.replace("{file}", run),
        "user": USER,
        "cpu_seconds": math.ceil(function.case_seconds),
        "wall_seconds": WALL * function.case_seconds,
        "file_bytes": _FILE_BYTES,
        "most_bytes": MOST_BYTES,
        "most_reported": _MOST_REPORTED,
        "stop": not function.partial,
    }
    return json.dumps(job).encode()


def _given(case: Case) -> str:
    """What the program reads, or which call is made of it."""
    if isinstance(case, StdinCase):
        return case.given
    if isinstance(case, CallCase):
        return json.dumps({"function": case.function, "arguments": case.given})
    return json.dumps({"source": case.given})


def _frames(report: bytes, first: int) -> list[tuple[_Ran, bytes]]:
    """Cases of a report, as far as it is whole and in order."""
    found: list[tuple[_Ran, bytes]] = []
    while report:
        line, _, rest = report.partition(b"\n")
        try:
            one = msgspec.json.decode(line, type=_Ran)
        except UNREADABLE:
            break
        if one.case != first + len(found) or not 0 <= one.bytes <= len(rest):
            break
        found.append((one, rest[: one.bytes]))
        report = rest[one.bytes :]
    return found


def _words(body: bytes) -> str:
    return body[:300].decode(errors="replace")
