"""``rose router``: the process behind a lease's URL."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import uvloop
from aiohttp import web

from rose_router.config import Settings
from rose_router.engines.attach import Attachments
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import EngineClient, HttpEngineClient, send_drafts
from rose_router.enrolment import enrolled
from rose_router.errors import BadRequest, LoopEnded
from rose_router.flags import parser, settings
from rose_router.http import app
from rose_router.http.admission import bearer
from rose_router.http.admission.memory import limit_of_process
from rose_router.http.tokenizer.model_tokenizer import ModelTokenizer, over_http
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.http.whole_requests import WHOLE_ROUTES, choose_protocol
from rose_router.listener import HEAD_BYTES, ConnectionLimiter, MakeProtocol, listening
from rose_router.replicas import relay
from rose_router.replicas.peers import Peers
from rose_router.turns.barrier import Barrier, HttpIngest
from rose_router.turns.demand import DemandFeed
from rose_router.turns.sandbox_hosts import SandboxHosts
from rose_router.turns.service import Service
from rose_router.turns.turn_clock import TurnClock
from rose_wire import tls
from rose_wire.daemon import stop_signal
from rose_wire.errors import Unavailable
from rose_wire.flags import complaint
from rose_wire.rpc import Server

if TYPE_CHECKING:
    from rose_router.turns.tracing import Tracing

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningRouter:
    """A router that serves.

    Attributes:
        http_port, attach_port: where; of interest when port 0 was asked for.
        peer_port: of the other replicas, 0 where they speak plain text.
        loops: what watches turns, callers, demand and replicas; while the router serves, none ends.
    """

    service: Service
    http_port: int
    attach_port: int
    peer_port: int = 0
    loops: frozenset[asyncio.Task[None]] = frozenset()

    def check_loops(self) -> None:
        """Turns would wait for ever, or the lease lose its slots, and nobody would see why.

        Raises:
            LoopEnded: one of the loops has ended.
        """
        for loop in self.loops:
            if loop.done():
                name = getattr(loop.get_coro(), "__qualname__", loop.get_name())
                raise LoopEnded(f"{name} has ended") from loop.exception()


def _peers(config: Settings, service: Service, session: aiohttp.ClientSession) -> Peers | None:
    if config.replicas is None:
        return None
    return Peers(
        config.replica,
        service.fleet,
        config.replicas,
        config.attach_token,
        leaving=lambda: service.leaving,
        link=config.link,
        ask=partial(relay.answers, session),
    )


def _sandbox_hosts(
    config: Settings, service: Service, session: aiohttp.ClientSession
) -> SandboxHosts | None:
    if not config.sandbox_hosts:
        return None
    hosts = SandboxHosts(config.sandbox_hosts, config.sandbox_token, session, service.clock)
    service.sandboxes = TurnClock(hosts, service.reply_seconds, service.clock, service.tracing)
    return hosts


def _tracing(config: Settings) -> Tracing | None:
    if not config.traces:
        return None
    # Only then: it takes as long to import as the rest of the router.
    from rose_router.turns import tracing  # noqa: PLC0415

    return tracing.exporting(config.lease, config.model, config.traces)


@contextlib.asynccontextmanager
async def _listening_to_peers(
    connection: MakeProtocol, doors: ConnectionLimiter, address: str, config: Settings
) -> AsyncIterator[int]:
    if config.link is None:
        yield 0
        return
    link = config.link
    async with listening(
        connection, doors, address, link.folder, link.authority, named=link.name
    ) as port:
        yield port


@contextlib.asynccontextmanager
async def running(
    config: Settings,
    *,
    http_address: str = "127.0.0.1:0",
    attach_address: str = "127.0.0.1:0",
    peer_address: str = "127.0.0.1:0",
    client: EngineClient | None = None,
) -> AsyncIterator[RunningRouter]:
    """Serve until the block ends; callers are sent elsewhere then, and live turns are drained.

    Args:
        config: knobs.
        http_address: ``host:port`` of the lease's URL; port 0 picks one.
        attach_address: ``host:port`` for engine owners.
        peer_address: ``host:port`` for the other replicas, where they speak TLS.
        client: reaches engines; the real one by default.
    """
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer else None
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as kept,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as fresh,
    ):
        connections = Connections()
        tracing = _tracing(config)
        service = Service(
            config,
            client or HttpEngineClient(connections),
            tracing=tracing,
            send=partial(send_drafts, connections),
        )
        memory = config.memory_bytes or limit_of_process()
        model_tokenizer = ModelTokenizer(
            service.fleet, tokenizer, over_http(fresh), memory_bytes=memory
        )
        ours = (config.operator_ca, config.link.authority if config.link else None)
        hosts = _sandbox_hosts(config, service, kept)
        believed = dict.fromkeys(file for file in ours if file is not None)
        credentials = tls.server_credentials(config.tls_dir, config.tls_client_ca, *believed)
        server = Server(token=config.attach_token, credentials=credentials)
        attachments = Attachments(service.fleet, config.lease, config.dedicated)
        attachments.serve_on(server)
        asked = DemandFeed(service)
        asked.serve_on(server)
        doors = ConnectionLimiter(config.limits)
        barrier = Barrier(
            service.fleet,
            service.queue,
            HttpIngest(fresh, config.ingest_url, config.ingest_token, config.quorum.seconds),
            config.quorum,
            labels=service.labels,
            clock=service.clock,
        )
        peers = _peers(config, service, kept)
        application = app.create(
            service,
            model_tokenizer,
            doors,
            barrier,
            hosts=hosts,
            peers=peers,
            session=kept,
        )
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        connection = choose_protocol(
            *(_manager_of(runner), application[WHOLE_ROUTES]),
            loop=asyncio.get_running_loop(),
            access_log=None,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
            lingering_time=0.0,  # ``pass_by`` does it
        )
        watching = [asyncio.create_task(one) for one in (asked.run(), model_tokenizer.run())]
        try:
            await service.start()
            async with (
                listening(connection, doors, http_address, config.http_tls_dir) as port,
                _listening_to_peers(connection, doors, peer_address, config) as peer_port,
            ):
                attach_port = await server.start(attach_address)
                if peers:
                    await peers.start()
                asking = application[bearer.RUNNING].loops
                replicas = peers.loops if peers else ()
                loops = frozenset([*watching, *asking, *service.loops, *replicas])
                yield RunningRouter(service, port, attach_port, peer_port, loops)
                await service.drain(peers.finish if peers else None)
        finally:
            for one in watching:
                one.cancel()
            if peers:
                await peers.close()
            await service.close()
            await service.sandboxes.close()
            await server.stop()
            await runner.cleanup()
            connections.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


def _manager_of(runner: web.AppRunner) -> web.Server:
    """What answers the connections of an application that was set up."""
    if runner.server is None:
        raise RuntimeError("aiohttp made no server")
    runner.server.request_handler = app.below_sessions(runner.server.request_handler)
    return runner.server


def spare_collections() -> None:
    """Let the cycle collector look less often, and never at what was there at the start.

    Turns are freed by their reference counts; a full collection walks all that live, and while it
    does no stream moves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    # A thread that reads a long body gives way to the loop after so much.
    sys.setswitchinterval(0.001)


async def serve(given: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT; exit code 0.

    Raises:
        LoopEnded: the router could not go on; whoever started it starts it again.
    """
    stop = stop_signal()
    spare_collections()
    async with contextlib.AsyncExitStack() as until:
        stopped = asyncio.create_task(stop.wait())
        until.callback(stopped.cancel)
        enrolling = asyncio.create_task(until.enter_async_context(enrolled(settings(given))))
        until.callback(enrolling.cancel)
        await asyncio.wait({enrolling, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        identity = await enrolling
        async with running(
            identity.settings,
            http_address=given.http_address,
            attach_address=given.attach_address,
            peer_address=given.peer_address,
        ) as router:
            LOG.info("turns on port %d, engines on port %d", router.http_port, router.attach_port)
            outdated = asyncio.create_task(identity.outdated.wait())
            until.callback(outdated.cancel)
            until_then = {stopped, outdated, *router.loops}
            await asyncio.wait(until_then, return_when=asyncio.FIRST_COMPLETED)
            router.check_loops()
            LOG.info("draining %d turns", len(router.service.ledger))
    return 0


def main(argv: list[str]) -> int:
    """``rose router``: 0 stopped, 1 could not start or go on."""
    given = parser().parse_args(argv)
    logging.basicConfig(
        level=given.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        # A good part of a turn's cost is the loop's own, and uvloop's is the smaller one.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(given))
    except (OSError, ValueError, Unavailable, BadRequest) as error:
        sys.stderr.write(f"rose router: {complaint(error, argv)}\n")
        return 1
    except LoopEnded:
        LOG.exception("rose router: a loop has ended; turns in flight were aborted")
        return 1
