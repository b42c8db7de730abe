"""Fake engines and a router on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_core.rollouts.requests.logprobs import LogitScale
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import Owner, owner
from rose_engines.fake.scheduler import FakeScheduler, Script
from rose_engines.fake.server import FakeServer
from rose_engines.weights.session import WeightSession
from rose_router.config import Settings
from rose_router.main import RunningRouter, running
from rose_router.turns import turn_queue
from tests.router.pushing import FakeIngest

if TYPE_CHECKING:
    from tests.trainer.test_publisher import RunningStore

LEASE = "team/grpo"
VERSION = "run@1.0"


@dataclass
class Fake:
    """A fake engine on a real socket."""

    name: str
    url: str
    scheduler: FakeScheduler
    runner: web.AppRunner
    traceparents: list[str]
    owner: Owner = field(init=False)

    async def die(self) -> None:
        """Break every connection, as a killed process does."""
        server = self.runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()


def _noting(traceparents: list[str]) -> Middleware:
    """Writes down which spans requests for turns belong to."""

    @web.middleware
    async def note(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/generate":
            traceparents.extend(request.headers.getall("traceparent", []))
        return await handler(request)

    return note


class Stage:
    """A router, its engines and a caller."""

    def __init__(
        self, router: RunningRouter, http: aiohttp.ClientSession, stack: AsyncExitStack
    ) -> None:
        self.router = router
        self.http = http
        self._stack = stack
        self.url = f"http://127.0.0.1:{router.http_port}"

    async def engine(
        self,
        name: str = "a",
        kind: EngineKind = EngineKind.BORROWED,
        *,
        token_seconds: float = 0.002,
        prefill_token_seconds: float = 0.0,
        scale: str = LogitScale.TEMPERATURE.value,
        script: Script | None = None,
        label: str = VERSION,
        **update: Any,  # noqa: ANN401  # fields of EngineUpdate
    ) -> Fake:
        """Start a fake engine and attach it; ``label`` is what it calls its weights itself."""
        scheduler = FakeScheduler(
            WeightSession({}, label),
            token_seconds=token_seconds,
            prefill_token_seconds=prefill_token_seconds,
            script=script,
        )
        application, traceparents = FakeServer(scheduler, scale=scale).application(), list[str]()
        application.middlewares.append(_noting(traceparents))
        runner = web.AppRunner(
            application,
            handler_cancellation=True,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        fake = Fake(name, url, scheduler, runner, traceparents)
        fields: dict[str, Any] = {"gate_open": True, "cap": 8, "version": VERSION, **update}
        sent = EngineUpdate(engine=name, kind=kind, lease=LEASE, url=fake.url, **fields)
        token = self.router.service.settings.attach_token
        fake.owner = await self._stack.enter_async_context(
            owner(self.router.attach_port, sent, token)
        )
        while self.router.service.fleet.get(name) is None:
            await self.router.service.fleet.changed.wait()
        return fake

    def post(self, path: str, body: object, **kwargs: Any) -> Any:  # noqa: ANN401  # aiohttp's
        """POST JSON to the router."""
        return self.http.post(self.url + path, json=body, **kwargs)

    async def get(self, path: str) -> Any:  # noqa: ANN401  # JSON
        """GET JSON from the router."""
        async with self.http.get(self.url + path) as reply:
            return await reply.json()


@asynccontextmanager
async def _stage(**settings: Any) -> AsyncIterator[Stage]:  # noqa: ANN401  # of Settings
    async with (
        aiohttp.ClientSession() as http,
        running(Settings(lease=LEASE, drain_seconds=0.2, **settings)) as router,
        AsyncExitStack() as stack,
    ):
        yield Stage(router, http, stack)


@pytest.fixture
def soon_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no engine attached may run waits a second for another, and not a minute."""
    monkeypatch.setattr(turn_queue, "_OTHERS_SECONDS", 1.0)


@pytest.fixture
def stage() -> Callable[..., Any]:
    """``async with stage(**settings) as s``: a router on free ports."""
    return _stage


@pytest.fixture
async def ingest() -> AsyncIterator[FakeIngest]:
    """``rose ingest``, as far as a router asks it."""
    fake = FakeIngest()
    app = web.Application()
    app.router.add_post("/ingest", fake.ingest)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    """A store of weights in a thread of its own."""
    from tests.trainer.test_publisher import RunningStore  # noqa: PLC0415  # few tests need one

    made = RunningStore(tmp_path / "store")
    yield made
    made.close()
