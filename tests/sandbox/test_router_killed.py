"""A router that is killed at any step of its protocol loses, doubles and mixes nothing.

A step is where a request of the router's reaches a sandbox host or an engine, where its answer goes
back, where a token comes, and where a call of the agent's begins or ends. There the router, a
process of its own, gets ``SIGKILL``. Another one, which knows nothing of the session, goes on; what
the killed one had asked of the host is carried out all the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_engines.fake.scheduler import FakeScheduler
from rose_engines.fake.server import FakeServer
from rose_engines.weights.session import WeightSession
from rose_router import main as router_main
from rose_sandbox.http import ServingTraffic, application
from rose_wire.ports import free_port
from tests.router.scripts import Follows, folder
from tests.sandbox.test_host import World

Json = dict[str, Any]
LEASE, VERSION = "team/grpo", "run@1.0"
TURNS = 2
TOKENS = 3
"""Of each answer."""


class RouterGone(Exception):
    """It was killed."""


@dataclass
class Life:
    """Steps of one router until it is killed.

    Attributes:
        at: the step at which it is killed; None: it lives on.
        steps: so far.
        kill: ends its process.
    """

    at: int | None = None
    steps: int = 0
    names: list[str] = field(default_factory=list)
    kill: Callable[[], None] = lambda: None

    def step(self, name: str) -> None:
        self.names.append(name)
        if self.steps == self.at:
            self.kill()
        self.steps += 1


@dataclass
class Following(Follows):
    """The scripted model, each token of which is a step."""

    town: Town

    def __post_init__(self) -> None:
        super().__init__()

    def next_token(self, context: Sequence[int]) -> int:
        self.town.life.step("token")
        return super().next_token(context)


@dataclass
class RouterProcess:
    """A router, its URL, and what attaches the engine to it."""

    process: BaseProcess
    url: str
    attached: AsyncExitStack

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Town:
    """A sandbox host and an engine, which live on, and routers, which are killed."""

    def __init__(self, root: Path, http: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
        self.root, self.http, self._stack = root, http, stack
        self.life = Life()
        self.world = World(root)
        self.model = Following(self)
        self.host_url, self.engine_url = "", ""
        self.delivered = asyncio.Event()
        self.hears_late = 0.0
        self.routers: list[RouterProcess] = []
        # Routers begin where the modules are imported already.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rose_router.main"])

    async def start(self) -> None:
        host = application(self.world.host, ServingTraffic(), lambda: "word")
        scheduler = FakeScheduler(
            WeightSession({}, VERSION), token_seconds=0.005, script=self.model
        )
        self.host_url = await self._serve(host, "host")
        self.engine_url = await self._serve(FakeServer(scheduler).application(), "engine")
        self._stack.push_async_callback(self.world.host.close)
        (self.root / "word").write_text("word")

    async def _serve(self, app: web.Application, name: str) -> str:
        app.middlewares.append(self._steps(name))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _steps(self, name: str) -> Middleware:
        @web.middleware
        async def step(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if not (request.path == "/generate" or "/sessions/" in request.path):
                return await handler(request)
            last = request.path.rpartition("/")[2]
            self.life.step(f"{name} is asked {last}")
            if last == "generate" and not self.hears_late:
                await self._deliver()
            if last == "turn":
                await asyncio.sleep(self.hears_late)
            answer = await handler(request)
            self.life.step(f"{name} answers {last}")
            if last == "turn":
                self.delivered.set()
            return answer

        return step

    async def _deliver(self) -> None:
        """A model takes longer than to tell a host that a turn began; so does this one."""
        while not self.delivered.is_set() and self.routers[-1].process.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def start_router(self) -> None:
        """One that knows nothing."""
        port, attach = free_port(), free_port()
        flags = [
            *(f"--lease={LEASE}", f"--tokenizer={folder()}", f"--sandbox-host={self.host_url}"),
            *(f"--http-address=127.0.0.1:{port}", f"--attach-address=127.0.0.1:{attach}"),
            *(f"--sandbox-token-file={self.root / 'word'}", "--drain-seconds=0.1"),
            *(f"--token-file={self.root / 'word'}", "--log-level=ERROR"),
        ]
        process = self._context.Process(target=router_main.main, args=(flags,), daemon=True)
        process.start()
        made = RouterProcess(process, f"http://127.0.0.1:{port}", AsyncExitStack())
        self.routers.append(made)
        self._stack.callback(made.kill)
        self._stack.push_async_callback(made.attached.aclose)
        await self._until(f"{made.url}/healthz")
        update = EngineUpdate(
            *("a", EngineKind.BORROWED, LEASE, self.engine_url),
            gate_open=True,
            cap=8,
            version=VERSION,
        )
        await made.attached.enter_async_context(owner(attach, update, "word"))
        await self._until(f"{made.url}/ready")

    async def _until(self, url: str) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    async with self.http.get(url) as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.01)

    async def ask(self, path: str, body: Json) -> Json:
        """The router's answer to a POST.

        Raises:
            RouterGone: it was killed before its answer was whole.
        """
        self.delivered.clear()
        self.life.step(f"asks {path}")
        if not self.routers[-1].process.is_alive():
            raise RouterGone
        router = self.routers[-1]
        try:
            async with self.http.post(router.url + path, json=body) as reply:
                answer: Json = await reply.json()
        except (aiohttp.ClientError, ValueError) as error:
            raise RouterGone from error
        assert reply.status < 300, answer
        self.life.step(f"has the answer of {path}")
        return answer

    async def rows(self, session: str) -> list[Json]:
        async with self.http.get(f"{self.routers[-1].url}/sessions/{session}/rows") as reply:
            found: list[Json] = (await reply.json())["rows"]
            return found


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        made = Town(tmp_path, http, stack)
        await made.start()
        yield made


@dataclass
class Agent:
    """Writes the number of its turn, asks the model, and so on.

    Attributes:
        talk: with the model.
        children: of its fork.
        forked: commands of the turn that they go on from.
        durable: the newest turn that the host called recoverable.
        fork_from: the same when the fork was asked for first: its children are made once.
    """

    town: Town
    session: str
    talk: list[Json] = field(default_factory=list)
    children: tuple[str, ...] = ()
    durable: int = 0
    fork_from: int | None = None
    forked: int = 0

    async def begin(self) -> None:
        await self.town.world.host.create(self.session)

    async def live(self) -> None:
        """To the end; whoever had begun goes on where it stands."""
        await self.play()
        await self.fork()
        await self.town.ask(f"/finish_session?session_id={self.session}", {})
        if not self.town.routers[-1].process.is_alive():  # killed at the very last step
            raise RouterGone

    async def settled(self) -> None:
        """The host has heard all that it is told."""
        async with asyncio.timeout(30):
            while (await self.town.world.host.state(self.session)).phase != "suspended":  # noqa: ASYNC110  # of a host
                await asyncio.sleep(0.01)

    async def play(self) -> None:
        """To the last turn."""
        while len(self.talk) < 2 * TURNS:
            turn = len(self.talk) // 2 + 1
            if len(self.talk) % 2 == 0:
                self.talk.append({"role": "user", "content": f"turn {turn}"})
            host = self.town.world.host
            await host.exec(self.session, f"echo {turn} >> /home/log", 5, name=f"{turn}")
            self.durable = max(self.durable, (await host.state(self.session)).recoverable_to)
            answer = await self.town.ask("/v1/chat/completions", self._asked())
            self.talk.append(_message(answer))

    def _asked(self) -> Json:
        return {"messages": self.talk, "max_tokens": TOKENS, "session_id": self.session}

    async def restore(self) -> None:
        """Sandbox and session as they were when the newest turn began."""
        back = await self.town.ask(f"/sessions/{self.session}/restore", {})
        turn = back["told"]["turn"]
        assert turn >= self.durable, "a turn that was called recoverable is lost"
        # The model is asked again what it was asked then: a turn has one command. With the tokens
        # of a session's end it has answered.
        asked = len(self.town.world.records.read(self.session, turn).commands)
        self.talk = self.talk[: max(0, 2 * asked - (back["known_turns"] < asked))]

    async def fork(self) -> None:
        """Two children of the newest turn, each of which does something of its own."""
        body = {"n": 2, "name": "group"}
        if self.fork_from is None:
            self.fork_from = self.durable
        made = await self.town.ask(f"/sessions/{self.session}/fork", body)
        assert made["turn"] >= self.fork_from, "a turn that was called recoverable is lost"
        record = self.town.world.records.read(self.session, made["turn"])
        self.forked = len(record.commands)
        self.children = tuple(made["sessions"])
        for child in self.children:
            await self.town.world.host.exec(child, f"echo {child} >> /home/log", 5, name="own")
        talk = self.talk[: 2 * self.forked - 1]
        body = {"messages": talk, "max_tokens": TOKENS, "session_id": self.children[0]}
        await self.town.ask("/v1/chat/completions", body)


def _message(answer: Json) -> Json:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def _trained(rows: list[Json]) -> list[Json]:
    """Rows without what each request's name is."""
    for row in rows:
        for turn in row["turns"]:
            del turn["rid"]
    return rows


Way = Callable[[Agent], Awaitable[None]]


async def asks_again(agent: Agent) -> None:
    """The sandbox lives, so its agent asks what was not answered."""


async def restores(agent: Agent) -> None:
    """Tokens of the session are the killed router's: the record gives them to its successor."""
    await agent.restore()


@dataclass(frozen=True)
class Ended:
    """What an undisturbed trajectory left.

    Attributes:
        talk: with the model.
        rows: that are trained on, of the session and of its child.
        forked: commands of the turn that its children go on from.
        bound: token ids of records, each with how many commands it has.
    """

    talk: list[Json]
    rows: list[list[Json]]
    forked: int
    bound: set[tuple[int, tuple[int, ...]]]


async def lived(town: Town, number: int, at: int | None, way: Way) -> tuple[Agent, Life]:
    """A trajectory, whose router is killed once."""
    agent = Agent(town, f"agent-{number}")
    await agent.begin()
    life = town.life = Life(at, kill=town.routers[-1].kill)
    try:
        await agent.live()
    except RouterGone:
        town.life = Life()
        await town.start_router()
        await way(agent)
        await agent.live()
    town.life = Life()
    await agent.settled()
    return agent, life


async def left(town: Town, agent: Agent, *, trains: bool) -> Ended:
    """What a trajectory left, and that none of it is doubled or mixed. It is gone then."""
    world = town.world
    log = [str(turn) for turn in range(1, TURNS + 1)]
    everyone = (agent.session, *agent.children)
    rows = [_trained(await town.rows(session)) for session in everyone[:2] if trains]
    assert set(world.host.sessions()) == set(everyone), "there are some of whom nobody knows"
    assert (await world.output_of(agent.session, "cat /home/log")).split() == log
    for child in agent.children:
        assert (await world.output_of(child, "cat /home/log")).split() == [
            *log[: agent.forked],
            child,
        ]
    bound: set[tuple[int, tuple[int, ...]]] = set()
    for turn in reversed(world.records.turns(agent.session)):
        record = world.records.read(agent.session, turn)
        done = [one.name for one in record.commands]
        assert done == log[: len(done)], "each once, and in order"
        await world.host.restore(agent.session, turn)
        if done:
            assert (await world.output_of(agent.session, "cat /home/log")).split() == done
        ids = world.records.ids(record)
        asked = [one[:1] for one in town.model.text(ids).split("turn ")[1:]]
        if asked == done:
            bound.add((len(done), ids))
        else:  # the session's end, of whose tokens its router knew nothing
            assert (done, ids) == (log, ()), "tokens of another turn"
    for session in everyone:
        await world.host.end(session, forget=True)
    return Ended(agent.talk, rows, agent.forked, bound)


@pytest.mark.parametrize("way", [asks_again, restores])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 7])
async def test_a_trajectory_ends_as_if_its_router_had_not_been_killed(
    town: Town, way: Way, every: int
) -> None:
    """At each step, and in the short run at each seventh."""
    await town.start_router()
    agent, life = await lived(town, 0, None, way)
    # A successor that nobody gives the session back to has its own turns alone.
    whole = await left(town, agent, trains=way is restores)
    assert len(whole.bound) == TURNS + 2, "turn 0, each turn, and the end"
    for at in range(0, life.steps, every):
        agent, killed = await lived(town, at + 1, at, way)
        found = await left(town, agent, trains=way is restores)
        where = f"killed at step {at}: {killed.names[: at + 1][-1]}"
        assert found.talk == whole.talk, where
        if way is restores:
            assert found.bound <= whole.bound, where
            assert found.rows[0] == whole.rows[0], where
            if found.forked == whole.forked:
                assert found.rows[1] == whole.rows[1], where


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 11])
async def test_a_router_that_is_killed_while_its_host_hears_late_mixes_no_record(
    town: Town, every: int
) -> None:
    """The agent acts on each reply before the host has heard that its turn began."""
    town.hears_late = 0.3
    await town.start_router()
    agent, life = await lived(town, 0, None, asks_again)
    whole = await left(town, agent, trains=False)
    assert (TURNS, 0) not in {(done, len(ids)) for done, ids in whole.bound}
    for at in range(0, life.steps, every):
        agent, killed = await lived(town, at + 1, at, asks_again)
        found = await left(town, agent, trains=False)
        assert found.talk == whole.talk, f"killed at step {at}: {killed.names[: at + 1][-1]}"
