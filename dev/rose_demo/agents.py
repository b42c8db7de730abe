"""Agents with a shell task beside the token game, whose sandbox host is killed in mid-run.

Each agent writes files, keeps a variable of its shell, a job in the background and a small service.
After each command it asks the lease's model, by the lease's router, which tells the host of the
turn. In the middle the host's pod is killed without a word. What the agents have at the end is
compared with what they would have, had nothing happened. It begins when everything that is measured
has ended, so it disturbs no figure of the others.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from rose_demo.records import Agents
from rose_demo.stack import Stack
from rose_dev.errors import DevelopmentError
from rose_sandbox.client import RemoteHost
from rose_sandbox.errors import HostAway, SandboxError, UnknownSandbox
from rose_sandbox.runtimes.runtime import Limits
from rose_weights.errors import WeightsError

AGENTS = 3
COMMAND_SECONDS = 30.0
BACK_SECONDS = 60.0
"""Until another host has taken the place of the one that was killed."""
_TOKENS = 8
_LIMITS = Limits(cpus=0.5, memory_bytes=256 << 20, disk_bytes=256 << 20)
TASK = (
    "export STEPS=1; echo one >> log; nohup sleep 4000 >/dev/null 2>&1 &",
    "STEPS=$((STEPS + 1)); cat log | wc -l",
    "STEPS=$((STEPS + 1)); echo two >> log; mkdir -p site && echo hello > site/index.html",
    "STEPS=$((STEPS + 1)); echo three >> log; "
    "(cd site && nohup python3 -m http.server 8000 >/dev/null 2>&1 &) ; sleep 1",
    "ls -l site; grep -c . log",
    "STEPS=$((STEPS + 1)); echo $STEPS >> log; pgrep -x sleep | wc -l >> log",
)
"""A command a turn; two of them change nothing that has to be saved but their shell's memory."""
KILLED_AFTER = 4
"""Turns until the host is killed: by then there are a job in the background and a service."""
LOG = b"one\ntwo\nthree\n5\n1\n"
"""What ``TASK`` leaves behind where nothing happens."""

Json = dict[str, Any]
T = TypeVar("T")
LOST = (SandboxError, WeightsError, aiohttp.ClientError, TimeoutError, OSError)
"""What an agent may meet that ends it; ``DevelopmentError`` is of the demo's own tools."""


class NotYet(SandboxError):
    """The router knows no host that answers."""


class _Answer(msgspec.Struct):
    output_ids: list[int]


class _SessionState(msgspec.Struct):
    turn: int


class _Restored(msgspec.Struct):
    told: _SessionState
    ids: list[int]


def _read(document: Json, kind: type[T]) -> T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise SandboxError(
            f"the router answers something else: {error}; {document!r:.300}"
        ) from error


@dataclass
class Agent:
    """One agent, as a harness would have it: a command that found no host is asked again.

    Args:
        http: with the token of the lease.
        router: the lease's URL.
        session: of the trajectory.
        host: the sandbox host.
        back: gives the host that is there after one was lost.
    """

    http: aiohttp.ClientSession
    router: str
    session: str
    host: RemoteHost
    back: Callable[[], Awaitable[RemoteHost]]
    ids: list[list[int]] = field(default_factory=lambda: [[1, 2, 3]])
    restored: list[int] = field(default_factory=list)
    differs: str = ""

    @property
    def turn(self) -> int:
        """Turns that it has had."""
        return len(self.ids) - 1

    async def begin(self) -> None:
        """Start its sandbox."""
        await self.host.create(
            self.session, image="base", limits=_LIMITS, environment={}, folder="/home"
        )

    async def play(self, upto: int) -> None:
        """Have turns until there were so many."""
        while self.turn < upto:
            try:
                await self._act()
            except (HostAway, UnknownSandbox):
                await self._restore()
                continue
            await self._ask()

    async def _act(self) -> None:
        made = await self.host.exec(  # noqa: S604 - in a sandbox
            self.session,
            TASK[self.turn],
            COMMAND_SECONDS,
            name=f"turn-{self.turn}",
            shell="main",
        )
        if made.exit_code:
            raise SandboxError(
                f"{TASK[self.turn]!r} exits {made.exit_code}: {made.stderr[-200:]!r}"
            )

    def _prompt(self, turn: int) -> list[int]:
        """What the model is asked with at a turn; the first is 1."""
        return [*self.ids[turn - 1], 3 + turn]

    async def _ask(self) -> None:
        prompt = self._prompt(self.turn + 1)
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0}
        body = {"input_ids": prompt, "session_id": self.session, "sampling_params": sampling}
        document = await self._post("/generate", body)
        self.ids.append([*prompt, *_read(document, _Answer).output_ids])

    async def _restore(self) -> None:
        """Sandbox and session back at another host; the agent goes on from their turn."""
        self.host = await self.back()
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            try:
                document = await self._post(f"/sessions/{self.session}/restore", {})
                break
            except NotYet:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        back = _read(document, _Restored)
        turn = back.told.turn
        if not 0 <= turn <= self.turn:
            raise SandboxError(f"it is given back at turn {turn}, and has had {self.turn}")
        self.restored.append(turn)
        if turn and back.ids != self._prompt(turn):
            self.differs = f"the model's words up to turn {turn} are others: {back.ids!r:.300}"
        # The record is of the moment at which the model was asked; what it said then is known.
        del self.ids[turn + 1 :]

    async def _post(self, path: str, body: Json) -> Json:
        async with self.http.post(f"{self.router}{path}", json=body) as reply:
            if reply.status == 503:
                raise NotYet(f"{path}: {(await reply.text())[:300]}")
            if reply.status != 200:
                raise SandboxError(f"{path} answers {reply.status}: {(await reply.text())[:300]}")
            text = await reply.read()
        try:
            return msgspec.json.decode(text, type=Json)
        except msgspec.MsgspecError as error:
            raise SandboxError(f"{path} answers {text[:300]!r}: {error}") from error

    async def verify(self) -> str:
        """What differs from an undisturbed end; empty: nothing."""
        if self.differs:
            return self.differs
        log = await self.host.read_file(self.session, "/home/log")
        if log != LOG:
            return f"its log is {log!r}, not {LOG!r}"
        asked = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').status)"
        made = await self.host.exec(
            self.session, f'python3 -c "{asked}"', COMMAND_SECONDS, name=None, shell=None
        )
        if made.stdout.strip() != b"200":
            return f"its service says {made.stdout!r} {made.stderr[-200:]!r}"
        return ""


@dataclass
class Counted:
    """Counters of hosts, of one that was killed too: it was asked just before."""

    saved: Counter[str] = field(default_factory=Counter)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, page: str) -> None:
        """Take in a page of metrics."""
        for line in page.splitlines():
            found = re.fullmatch(r"rose_sandbox_(\w+?)_total(?:\{(.*)\})? (\S+)", line)
            if found is None:
                continue
            name, labels, value = found[1], found[2] or "", float(found[3])
            if name == "turns":
                self.saved[re.findall(r'saved="([^"]*)"', labels)[0]] += int(value)
            else:
                self.sums[name] += value

    def as_json(self) -> Json:
        """The figures of ``Agents``."""
        return {
            "saved": dict(self.saved),
            "written_bytes": int(self.sums["record_bytes"]),
            "state_bytes": int(self.sums["state_bytes"]),
            "saving_s": self.sums["checkpoint_seconds"],
            "held_s": self.sums["held_seconds"],
        }


async def play_on(stack: Stack) -> Agents:
    """Agents with a shell task, at the lease of a stack, after all that is measured."""
    if stack.sandbox_parts is None:
        return Agents(skipped=stack.no_sandboxes)

    async def host() -> str:
        deadline = time.monotonic() + BACK_SECONDS
        while not (url := await asyncio.to_thread(stack.sandbox_host)):
            if time.monotonic() > deadline:
                raise HostAway(f"no sandbox host is ready after {BACK_SECONDS:.0f} s")
            await asyncio.sleep(0.5)
        return url

    async def kill() -> None:
        await asyncio.to_thread(stack.kill_sandbox_host)

    try:
        router, token = stack.router(), stack.turn_token().read_text().strip()
    except DevelopmentError as error:
        made = Agents(agents=AGENTS, stopped=_named(error))
    else:
        made = await play(router, token, host, stack.sandbox_token, kill)
    stack.step(
        f"{made.verified} of {made.agents} agents outlived their host {made.stopped}".strip()
    )
    return made


@dataclass
class Run:
    """Agents that play together; what ends one of them ends no other.

    Args:
        agents: all of them.
        failed: session -> what it met, or in what it differs in the end.
        stopped: session -> what of the demo's own tools failed; ``all``: of none alone.
        verified: sessions that differ in nothing.
    """

    agents: Sequence[Agent]
    failed: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)

    async def each(self, step: Callable[[Agent], Awaitable[None]]) -> None:
        """Have every agent that is left do this."""
        async with asyncio.TaskGroup() as group:
            for agent in self.agents:
                if agent.session not in self.failed.keys() | self.stopped.keys():
                    group.create_task(self._do(agent, step))

    async def _do(self, agent: Agent, step: Callable[[Agent], Awaitable[None]]) -> None:
        try:
            await step(agent)
        except LOST as error:
            self.failed[agent.session] = _named(error)
        except DevelopmentError as error:
            self.stopped[agent.session] = _named(error)

    async def begin(self, agent: Agent) -> None:
        """Until the host is killed."""
        await agent.begin()
        await agent.play(KILLED_AFTER)

    async def end(self, agent: Agent) -> None:
        """Until the task is done, and a look at what is there then."""
        await agent.play(len(TASK))
        if differs := await agent.verify():
            self.failed[agent.session] = differs
        else:
            self.verified.add(agent.session)
        with suppress(SandboxError):  # what is left of it ends with the node
            await agent.host.end(agent.session, forget=True)


async def play(
    router: str,
    token: str,
    host: Callable[[], Awaitable[str]],
    host_token: str,
    kill: Callable[[], Awaitable[None]],
) -> Agents:
    """Agents play their task, their host is killed, and they play on.

    Args:
        router: the lease's URL.
        token: of the lease, for turns and restores.
        host: waits for a host that answers, and gives its URL.
        host_token: that it asks for.
        kill: ends the host without a word.
    """
    began, counted, run = time.monotonic(), Counted(), Run(())
    made: dict[str, RemoteHost] = {}
    limit = aiohttp.ClientTimeout(total=BACK_SECONDS)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as http:

        async def there() -> RemoteHost:
            url = await host()
            if url not in made:
                made[url] = RemoteHost(url, host_token)
            return made[url]

        try:
            first = await there()
            run.agents = [
                Agent(http, router, f"shell-{number}", first, there) for number in range(AGENTS)
            ]
            await run.each(run.begin)
            counted.add(await _metrics(await host()))
            await kill()
            await run.each(run.end)
            counted.add(await _metrics(await host()))
        except (*LOST, DevelopmentError) as error:
            run.stopped["all"] = _named(error)
        finally:
            for one in made.values():
                await one.close()
    return Agents(
        agents=AGENTS,
        turns=sum(agent.turn for agent in run.agents),
        restored=tuple(turn for agent in run.agents for turn in agent.restored),
        verified=len(run.verified),
        failed=tuple(f"{session}: {what}" for session, what in run.failed.items()),
        stopped="; ".join(f"{whose}: {what}" for whose, what in run.stopped.items()),
        seconds=time.monotonic() - began,
        **counted.as_json(),
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def _metrics(url: str) -> str:
    """A host's page, which is asked for without the lease's token: it is none of its business."""
    limit = aiohttp.ClientTimeout(total=BACK_SECONDS)
    async with aiohttp.ClientSession(timeout=limit) as http, http.get(f"{url}/metrics") as answer:
        return await answer.text()
