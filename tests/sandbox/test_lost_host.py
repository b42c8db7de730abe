"""Agents with a shell task: their sandbox host is killed in mid-run, and nobody can tell after.

Real hosts (processes of their own) on runc and CRIU, a real router that tells them of turns, and
agents that ask a model, write files, keep a job in the background and a small service.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rose_dev.waiting import until
from rose_router.turns.turn_clock import TurnClock
from rose_sandbox.client import RemoteHost
from rose_sandbox.errors import HostAway, UnknownSandbox
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Limits
from tests.router.conftest import Stage, stage  # noqa: F401  # a fixture
from tests.router.scripts import folder
from tests.sandbox.hosts import Running, two_hosts

pytestmark = pytest.mark.sandbox

Json = dict[str, Any]
Staging = Callable[..., AbstractAsyncContextManager[Stage]]
TURNS = (
    "export STEPS=1; echo one >> log; nohup sleep 4000 >/dev/null 2>&1 &",
    "STEPS=$((STEPS + 1)); echo two >> log; mkdir -p site && echo hello > site/index.html",
    "STEPS=$((STEPS + 1)); echo three >> log; "
    "(cd site && nohup python3 -m http.server 8000 >/dev/null 2>&1 &) ; "
    "until grep -qs ':1F40 ' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done",
    "STEPS=$((STEPS + 1)); echo $STEPS >> log; pgrep -x sleep | wc -l >> log",
)
LOG = b"one\ntwo\nthree\n4\n1\n"


@pytest.fixture
async def hosts(parts: Parts, tmp_path: Path) -> AsyncIterator[list[Running]]:
    async with two_hosts(tmp_path, parts, RuncRuntime) as made:
        yield made


@dataclass
class Agent:
    """Asks the model after each command; a command that fails for its host is asked again."""

    stage: Stage
    session: str
    hosts: dict[str, RemoteHost]
    at: str
    talk: list[Json] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    turn: int = 0

    @property
    def host(self) -> RemoteHost:
        return self.hosts[self.at]

    async def play(self, upto: int) -> None:
        while self.turn < upto:
            await self._again_if_lost(self._act)
            await self._ask()

    async def _act(self) -> None:
        command = TURNS[self.turn]
        made = await self.host.exec(  # noqa: S604 - in a sandbox
            self.session, command, 60, name=f"turn-{self.turn}", shell="main"
        )
        assert made.exit_code == 0, made

    async def _ask(self) -> None:
        found = {"role": "user", "content": f"turn {self.turn} is done"}
        body = {"messages": [*self.talk, found], "max_tokens": 6, "session_id": self.session}
        async with self.stage.post("/v1/chat/completions", body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        message = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        self.talk += [found, message]
        self.turn += 1

    async def _again_if_lost(self, work: Callable[[], Any]) -> None:
        try:
            await work()
        except (HostAway, UnknownSandbox):
            async with self.stage.post(f"/sessions/{self.session}/restore", {}) as reply:
                back = await reply.json()
                assert reply.status == 200, back
            self.at, turn = back["host"], back["told"]["turn"]
            self.restored.append(turn)
            # The record is of the moment at which the model was asked the turn-th time; what it
            # said then is known.
            self.turn, self.talk = turn, self.talk[: 2 * turn]
            await work()

    async def verify(self) -> None:
        assert await self.host.read_file(self.session, "/home/log") == LOG
        url = f"{self.at}/sessions/{self.session}/port/8000/index.html"
        headers = {"Authorization": "Bearer word"}
        async with self.stage.http.get(url, headers=headers) as answer:
            assert (answer.status, await answer.text()) == (200, "hello\n")


async def test_agents_end_as_if_no_host_had_been_killed(
    stage: Staging,  # noqa: F811  # the fixture
    hosts: list[Running],
) -> None:
    urls = tuple(one.url for one in hosts)
    given = {"sandbox_hosts": {"": urls}, "sandbox_token": "word", "tokenizer": folder()}
    far = {url: RemoteHost(url, "word") for url in urls}
    async with stage(**given) as s:
        await s.engine("a", token_seconds=0.05)  # the host hears of a turn first
        agents = [Agent(s, f"agent-{n}", far, urls[n % 2]) for n in range(3)]
        for agent in agents:
            await agent.host.create(
                agent.session, image="base", limits=Limits(), environment={}, folder="/home"
            )
        await asyncio.gather(*(agent.play(2) for agent in agents))
        clock = s.router.service.sandboxes
        assert isinstance(clock, TurnClock)
        await until(lambda: not clock._lines)
        for agent in agents:  # a busy machine's reply is let go before its turn is durable
            async with asyncio.timeout(60):
                while (await agent.host.state(agent.session)).recoverable_to < 2:  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(0.05)
        before = {agent.session: list(agent.talk) for agent in agents}
        hosts[0].process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(hosts[0].process.wait)
        await asyncio.gather(*(agent.play(len(TURNS)) for agent in agents))
        for agent in agents:
            await agent.verify()
            assert agent.talk[:4] == before[agent.session], "the model had said it already"
            (row,) = (await s.get(f"/sessions/{agent.session}/rows"))["rows"]
            assert len(row["turns"]) == len(TURNS)
            await agent.host.end(agent.session, forget=True)
    assert [agent.restored for agent in agents] == [[2], [], [2]]
    assert {agent.at for agent in agents} == {urls[1]}
    for one in far.values():
        await one.close()
