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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rose_demo.records import Agents
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


class NotYet(SandboxError):
    """The router knows no host that answers."""


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

    async def _ask(self) -> None:
        prompt = [*self.ids[-1], 4 + self.turn]
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0}
        body = {"input_ids": prompt, "session_id": self.session, "sampling_params": sampling}
        said = await self._post("/generate", body)
        self.ids.append([*prompt, *said["output_ids"]])

    async def _restore(self) -> None:
        """Sandbox and session back at another host; the agent goes on from their turn."""
        self.host = await self.back()
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            try:
                said = await self._post(f"/sessions/{self.session}/restore", {})
                break
            except NotYet:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        turn = int(said["told"]["turn"])
        self.restored.append(turn)
        # The record is of the moment at which the model was asked; what it said then is known.
        del self.ids[turn + 1 :]

    async def _post(self, path: str, body: Json) -> Json:
        async with self.http.post(f"{self.router}{path}", json=body) as reply:
            if reply.status == 503:
                raise NotYet(f"{path}: {(await reply.text())[:300]}")
            if reply.status != 200:
                raise SandboxError(f"{path} answers {reply.status}: {(await reply.text())[:300]}")
            said: Json = await reply.json()
            return said

    async def verify(self) -> str:
        """What differs from an undisturbed end; empty: nothing."""
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

    def told(self) -> Json:
        """The figures of ``Agents``."""
        return {
            "saved": dict(self.saved),
            "written_bytes": int(self.sums["record_bytes"]),
            "state_bytes": int(self.sums["state_bytes"]),
            "saving_s": self.sums["checkpoint_seconds"],
            "held_s": self.sums["held_seconds"],
        }


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
    began, counted = time.monotonic(), Counted()
    made: dict[str, RemoteHost] = {}
    limit = aiohttp.ClientTimeout(total=BACK_SECONDS)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as http:

        async def there() -> RemoteHost:
            url = await host()
            return made.setdefault(url, RemoteHost(url, host_token))

        agents: list[Agent] = []
        failed: list[str] = []
        try:
            first = await there()
            agents = [
                Agent(http, router, f"shell-{number}", first, there) for number in range(AGENTS)
            ]
            await asyncio.gather(*(agent.begin() for agent in agents))
            await asyncio.gather(*(agent.play(KILLED_AFTER) for agent in agents))
            counted.add(await _metrics(http, await host()))
            before = [list(agent.ids) for agent in agents]
            await kill()
            await asyncio.gather(*(agent.play(len(TASK)) for agent in agents))
            for agent, known in zip(agents, before, strict=True):
                differs = await agent.verify()
                if agent.ids[: len(known)] != known[: len(agent.ids)]:
                    differs = "the model's words are others"
                if differs:
                    failed.append(f"{agent.session}: {differs}")
                await agent.host.end(agent.session, forget=True)
            counted.add(await _metrics(http, await host()))
        except (SandboxError, WeightsError, aiohttp.ClientError, TimeoutError, OSError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            for one in made.values():
                await one.close()
    return Agents(
        agents=AGENTS,
        turns=sum(agent.turn for agent in agents),
        restored=tuple(turn for agent in agents for turn in agent.restored),
        failed=tuple(failed),
        seconds=time.monotonic() - began,
        **counted.told(),
    )


async def _metrics(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/metrics") as answer:
        return await answer.text()
