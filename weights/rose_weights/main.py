"""``rose weights serve|relay|inspect|verify|diff``: the weight store, and looking into it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from rose_core.delta import DeltaError
from rose_weights import looking, metrics
from rose_weights.blocks import Blocks
from rose_weights.errors import WeightsError
from rose_weights.relay import KEEP_BYTES, Relay
from rose_weights.retention import WINDOW
from rose_weights.service import WeightService
from rose_weights.store import Store
from rose_wire import observability, rpc
from rose_wire.errors import WireError
from rose_wire.rpc import Server

LOG = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    top = argparse.ArgumentParser(prog="rose weights", description="The weight store.")
    verbs = top.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve", help="serve a store over gRPC")
    serve.add_argument("--root", type=Path, required=True, help="folder of the store")
    serve.add_argument("--address", default="0.0.0.0:7446", help="host:port to listen on")
    serve.add_argument("--http-port", type=int, default=9105, help="metrics and health; 0 = any")
    serve.add_argument("--token-file", type=Path, help="bearer token every caller must show")
    serve.add_argument("--window", type=int, default=WINDOW, help="versions kept behind the head")
    serve.add_argument("--log-level", default="INFO")
    relay = verbs.add_parser("relay", help="serve another store's blocks to this cluster")
    relay.add_argument("--upstream", required=True, help="host:port of the store")
    relay.add_argument("--upstream-token-file", type=Path, help="bearer token of the store")
    relay.add_argument("--root", type=Path, required=True, help="folder of the kept blocks")
    relay.add_argument("--keep-bytes", type=int, default=KEEP_BYTES, help="what it may hold")
    relay.add_argument("--address", default="0.0.0.0:7446", help="host:port to listen on")
    relay.add_argument("--http-port", type=int, default=9105, help="metrics and health; 0 = any")
    relay.add_argument("--token-file", type=Path, help="bearer token every caller must show")
    relay.add_argument("--log-level", default="INFO")
    inspect = verbs.add_parser("inspect", help="show a store, a bundle or a manifest")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--run", default="", help="of a store: only this run")
    verify = verbs.add_parser("verify", help="check every block and digest of a store or bundle")
    verify.add_argument("path", type=Path)
    verify.add_argument("--base", type=Path, help="checkpoint to apply a bundle to")
    diff = verbs.add_parser("diff", help="compare two Hugging Face checkpoints bit by bit")
    diff.add_argument("old", type=Path)
    diff.add_argument("new", type=Path)
    return top


def main(argv: list[str]) -> int:
    """Run one sub-verb.

    Returns:
        0 done, 1 something is wrong with the weights or the store.
    """
    arguments = parser().parse_args(argv)
    try:
        if arguments.verb in {"serve", "relay"}:
            logging.basicConfig(level=arguments.log_level.upper())
            asyncio.run(serve(arguments))
            return 0
        if arguments.verb == "inspect":
            text, good = looking.inspect(arguments.path, arguments.run), True
        elif arguments.verb == "verify":
            text, good = looking.verify(arguments.path, arguments.base)
        else:
            text, good = looking.diff(arguments.old, arguments.new), True
    except (WeightsError, DeltaError, WireError, OSError) as error:
        sys.stderr.write(f"rose weights {arguments.verb}: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(text)
    return 0 if good else 1


async def serve(arguments: argparse.Namespace) -> None:
    """Serve a store or a relay until SIGTERM or SIGINT.

    Raises:
        Unavailable: the address cannot be bound.
    """
    server = Server(token=_token(arguments.token_file))
    close = (
        _bind_relay(server, arguments) if arguments.verb == "relay" else _bind(server, arguments)
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = await server.start(arguments.address)
    pages, http_port = await observability.serve(
        metrics.REGISTRY,
        host="0.0.0.0",  # noqa: S104  # scraped from other nodes
        port=arguments.http_port,
    )
    LOG.info("%s %s: gRPC port %d, HTTP port %d", arguments.verb, arguments.root, port, http_port)
    try:
        await stop.wait()
    finally:
        await server.stop()
        await close()
        await pages.cleanup()


def _bind(server: Server, arguments: argparse.Namespace) -> Callable[[], Awaitable[None]]:
    service = WeightService(Store(arguments.root), window=arguments.window)
    service.bind(server)
    return service.close


def _bind_relay(server: Server, arguments: argparse.Namespace) -> Callable[[], Awaitable[None]]:
    channel = rpc.connect(arguments.upstream)
    relay = Relay(
        channel,
        Blocks(arguments.root / "blocks"),
        token=_token(arguments.upstream_token_file),
        keep_bytes=arguments.keep_bytes,
    )
    relay.bind(server)

    async def close() -> None:
        await channel.close()

    return close


def _token(path: Path | None) -> str:
    return path.read_text().strip() if path else ""
