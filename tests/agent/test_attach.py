"""The streams to the router: the newest state only, closed gates at once, back after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rose_agent.guard.links.routerlink import Attachment, update_of
from rose_core.identity import GpuUuid, GrantKey, PodUid, SlotKey, SlotUid
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.routing import (
    AdapterVersion,
    EngineKind,
    EngineUpdate,
    RouterNote,
    each_adapter,
)
from rose_core.wire.sync import AdapterSpec, EngineSpec, Grant, RouterProof, WeightSource
from rose_dev.waiting import until
from rose_wire import certificates, tls
from rose_wire.rpc import Server
from rose_wire.services import ATTACH

UPDATE = EngineUpdate(
    engine="slot", kind=EngineKind.BORROWED, lease="ns/lease", url="http://x", gate_open=True
)
CLOSED = msgspec.structs.replace(UPDATE, gate_open=False)


class Router:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.received: list[EngineUpdate] = []
        self.streams = 0

    async def attach(self, updates: AsyncIterator[EngineUpdate]) -> AsyncIterator[RouterNote]:
        self.streams += 1
        async for update in updates:
            self.received.append(update)
            yield RouterNote()

    async def serve(self, address: str, folder: Path | None = None) -> tuple[Server, int]:
        server = Server(token="secret", credentials=tls.server_credentials(folder))
        server.bidirectional(ATTACH, self.attach)
        return server, await server.start(address)


@contextlib.asynccontextmanager
async def attached(
    port: int, scheme: str = "", proof: RouterProof | None = None
) -> AsyncIterator[Attachment]:
    attachment = Attachment(f"{scheme}localhost:{port}", "secret", proof or RouterProof())
    task = asyncio.create_task(attachment.run())
    try:
        yield attachment
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_changes_are_sent_once_and_the_newest_counts() -> None:
    router = Router()
    server, port = await router.serve("127.0.0.1:0")
    async with attached(port) as attachment:
        attachment.set(UPDATE)
        await until(lambda: router.received == [UPDATE])
        attachment.set(UPDATE)
        attachment.set(CLOSED)
        await until(lambda: router.received[-1] == CLOSED)
        assert len(router.received) == 2
        attachment.leave()
        await until(lambda: router.received[-1].leaving)
        assert not router.received[-1].gate_open
    await server.stop(0)


async def test_a_router_that_restarts_hears_the_present() -> None:
    router = Router()
    server, port = await router.serve("127.0.0.1:0")
    async with attached(port) as attachment:
        attachment.set(UPDATE)
        await until(lambda: router.received == [UPDATE])
        await server.stop(0)
        attachment.set(CLOSED)
        again = Router()
        server, _ = await again.serve(f"127.0.0.1:{port}")
        await until(lambda: again.received[-1:] == [CLOSED])
    await server.stop(0)


async def test_a_router_that_restarts_is_believed_by_its_grants_authority_again(
    tmp_path: Path,
) -> None:
    now, life = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    authority = certificates.make_authority("routers", life, now)
    key, leaf = certificates.issue(["localhost"], authority, life, now)
    certificates.keep(tmp_path / "router", {tls.KEY: key, tls.CERTIFICATE: leaf})
    router = Router()
    server, port = await router.serve("127.0.0.1:0", tmp_path / "router")
    async with attached(port, tls.SCHEME, RouterProof("secret", authority[1])) as attachment:
        attachment.set(UPDATE)
        await until(lambda: router.received == [UPDATE])
        await server.stop(0)
        again = Router()
        server, _ = await again.serve(f"127.0.0.1:{port}", tmp_path / "router")
        await until(lambda: again.received[-1:] == [UPDATE])
    await server.stop(0)


def test_a_router_hears_of_a_publish_before_the_engine_has_it() -> None:
    slot = SlotKey(SlotUid("slot"), 1)
    grant = Grant(
        key=GrantKey(1, slot),
        ttl_seconds=60.0,
        slot_name="slot",
        lease="ns/lease",
        pool="ns/pool",
        pod_uid=PodUid("pod"),
        pod_name="pod",
        gpu_uuids=(GpuUuid("GPU-0"),),
        engine=EngineSpec("fake", "small"),
        weights=WeightSource("store:1", "run"),
        router="router:1",
    )
    own = "run@base.0123456789ab"
    status = EngineStatus(
        *(slot, EngineState.SERVING),
        version=own,
        head="run@1.0",
        tokenizer="3f9a",
        drafts=True,
        refuses=("min_p",),
    )
    update = update_of(grant, status, "", gate_open=True, leaving=False, cap=1)
    assert (update.version, update.head) == (own, "run@1.0")
    assert update.tokenizer == "3f9a"
    assert update.drafts
    assert update.refuses == ("min_p",)
    assert not update.adapters
    held = (AdapterVersion("run", own, "d"), AdapterVersion("other", "other@1.2", "e", "other@1.3"))
    several = msgspec.structs.replace(status, adapters=held)
    update = update_of(grant, several, "", gate_open=True, leaving=False, cap=4)
    assert [(one.engine, one.version, one.head, one.named) for one in each_adapter(update)] == [
        ("slot/run", own, "", False),
        ("slot/other", "other@1.2", "other@1.3", True),
    ]
    # What the engine does, not what it was asked for.
    wish = replace(grant, engine=replace(grant.engine, drafts=True))
    quiet = replace(status, drafts=False)
    assert not update_of(wish, quiet, "", gate_open=True, leaving=False, cap=1).drafts
    assert update_of(grant, None, "", gate_open=True, leaving=False, cap=1).head == ""
    # Before its host has said anything, so that the router never takes it for an engine of one run.
    sharing = replace(
        grant,
        engine=replace(grant.engine, adapter=AdapterSpec(8, (), slots=4)),
        weights=replace(grant.weights, others=("other",)),
    )
    begins = update_of(sharing, None, "", gate_open=True, leaving=False, cap=4)
    assert [(one.engine, one.version, one.gate_open) for one in each_adapter(begins)] == [
        ("slot/run", "", False),
        ("slot/other", "", False),
    ]
