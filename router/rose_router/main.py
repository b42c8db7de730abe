"""``rose router``: the process behind a lease's URL."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from rose_core.rollouts.admission import Queue
from rose_core.rollouts.placement import Policy
from rose_core.rollouts.watch import Patience
from rose_router import app
from rose_router.attach import Attachments
from rose_router.config import Settings
from rose_router.engine_client import EngineClient, HttpEngineClient
from rose_router.errors import BadRequest
from rose_router.service import Service
from rose_router.text import Tokenizer
from rose_wire.errors import Unavailable
from rose_wire.rpc import Server

LOG = logging.getLogger(__name__)

_ANY = "0.0.0.0"  # noqa: S104  # trainers and nodes dial in


def parser() -> argparse.ArgumentParser:
    """The flags."""
    defaults = Settings(lease="")
    flags = argparse.ArgumentParser(prog="rose router", description=__doc__)
    add = flags.add_argument
    add("--lease", required=True, help="namespace/name; engines of another lease are refused")
    add(
        "--http-address", default="0.0.0.0:8000", help="turns, /metrics, /healthz"
    )  # the lease's URL
    add(
        "--attach-address", default="0.0.0.0:7444", help="gRPC of engine owners"
    )  # dialled from nodes
    add("--token-file", type=Path, help="bearer token that engine owners must bring")
    add("--turn-token-file", type=Path, help="bearer token that callers must bring")
    add("--max-staleness", type=int, default=1, help="publishes an engine may lag behind")
    add("--model", default=defaults.model, help="name shown by /v1/models")
    add("--tokenizer", type=Path, help="tokenizer.json or its folder; without: token ids only")
    add("--pause-seconds", type=float, default=defaults.patience.pause_seconds,
        help="a turn on a closed gate moves elsewhere after this")  # fmt: skip
    add("--stall-seconds", type=float, default=defaults.patience.stall_seconds,
        help="a turn on an open gate that says nothing moves after this")  # fmt: skip
    add("--queue-limit", type=int, default=defaults.queue.most, help="turns that may wait")
    add("--queue-seconds", type=float, default=defaults.queue.seconds, help="longest wait")
    add("--interval", type=int, default=defaults.interval,
        help="tokens per event of an engine's stream when the caller does not stream")  # fmt: skip
    add("--max-losses", type=int, default=defaults.max_losses,
        help="engines a turn may lose before it ends with a typed abort")  # fmt: skip
    add("--max-body-bytes", type=int, default=defaults.max_body_bytes, help="largest request")
    add("--drain-seconds", type=float, default=defaults.drain_seconds,
        help="how long live turns may go on after SIGTERM")  # fmt: skip
    add("--log-level", default="INFO", type=str.upper,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"))  # fmt: skip
    return flags


def settings(flags: argparse.Namespace) -> Settings:
    """Flags as settings.

    Raises:
        OSError: a token file cannot be read.
    """
    return Settings(
        lease=flags.lease,
        model=flags.model,
        tokenizer=flags.tokenizer,
        attach_token=_token(flags.token_file),
        turn_token=_token(flags.turn_token_file),
        max_body_bytes=flags.max_body_bytes,
        interval=max(1, flags.interval),
        max_losses=flags.max_losses,
        drain_seconds=flags.drain_seconds,
        policy=Policy(max_staleness=flags.max_staleness),
        patience=Patience(flags.pause_seconds, flags.stall_seconds),
        queue=Queue(flags.queue_limit, flags.queue_seconds),
    )


def _token(path: Path | None) -> str:
    return path.read_text().strip() if path else ""


@dataclass(frozen=True)
class Running:
    """A router that serves.

    Attributes:
        http_port, attach_port: where; of interest when port 0 was asked for.
    """

    service: Service
    http_port: int
    attach_port: int


@contextlib.asynccontextmanager
async def running(
    config: Settings,
    *,
    http_address: str = "127.0.0.1:0",
    attach_address: str = "127.0.0.1:0",
    client: EngineClient | None = None,
) -> AsyncIterator[Running]:
    """Serve until the block ends; live turns are drained then.

    Args:
        config: knobs.
        http_address: ``host:port`` of the lease's URL; port 0 picks one.
        attach_address: ``host:port`` for engine owners.
        client: reaches engines; the real one by default.
    """
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer else None
    # Idle connections end before SGLang's own server closes them (5 s): a request sent into a
    # connection that is just being closed would look like a lost engine.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        service = Service(config, client or HttpEngineClient(session))
        server = Server(token=config.attach_token)
        attachments = Attachments(service.fleet, config.lease, lambda: len(service.room))
        attachments.serve_on(server)
        runner = web.AppRunner(
            app.create(service, tokenizer), access_log=None, handler_cancellation=True
        )
        await runner.setup()
        host, port = http_address.rsplit(":", 1)
        site = web.TCPSite(runner, host.strip("[]"), int(port), backlog=4096)
        try:
            await service.start()
            await site.start()
            attach_port = await server.start(attach_address)
            yield Running(service, runner.addresses[0][1], attach_port)
            await service.drain()
        finally:
            await service.close()
            await server.stop()
            await runner.cleanup()


async def serve(flags: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT; exit code 0."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(
        settings(flags), http_address=flags.http_address, attach_address=flags.attach_address
    ) as router:
        LOG.info("turns on port %d, engines on port %d", router.http_port, router.attach_port)
        await stop.wait()
        LOG.info("draining %d turns", len(router.service.ledger))
    return 0


def main(argv: list[str]) -> int:
    """``rose router``: 0 stopped, 1 could not start."""
    flags = parser().parse_args(argv)
    logging.basicConfig(
        level=flags.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        return asyncio.run(serve(flags))
    except (OSError, Unavailable, BadRequest) as error:
        sys.stderr.write(f"rose router: {error}\n")
        return 1
