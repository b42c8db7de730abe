"""``rose weights VERB``: the weight store and relay, looking into it, files to and from it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from rose_core.delta import DeltaError
from rose_weights import inspection, metrics
from rose_weights.errors import StoreFailed, WeightsError
from rose_weights.inspection import InspectionResult
from rose_weights.send import importing
from rose_weights.send.deltadirs import CHECKSUMS
from rose_weights.serve.access import OPEN, Identification, StoreAccess
from rose_weights.serve.records_service import RecordsService
from rose_weights.serve.relay import KEEP_BYTES, RelayHandlers
from rose_weights.serve.service import WeightService
from rose_weights.serve.tenants import Tenants
from rose_weights.store.blocks import Blocks
from rose_weights.store.open_store import open_store
from rose_weights.store.retention import WINDOW
from rose_wire import faults, flags, memory, observability, rpc, tls
from rose_wire.daemon import stop_signal
from rose_wire.errors import WireError
from rose_wire.flags import VerbParser
from rose_wire.rpc import Server

LOG = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
"""Freed memory that a store or relay keeps for the next blocks."""


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    top = VerbParser(prog="rose weights", description="The weight store.")
    verbs = top.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve", help="serve a store over gRPC")
    serve.add_argument("--root", required=True, help="folder of the store, or s3://bucket/prefix")
    serve.add_argument(
        "--address", type=flags.listener, default="0.0.0.0:7446", help="host:port to listen on"
    )
    serve.add_argument(
        "--http-port", type=flags.port, default=9105, help="metrics and health; 0 = any"
    )
    _caller_flags(serve)
    serve.add_argument(
        "--window", type=flags.count, default=WINDOW, help="versions kept behind the head"
    )
    flags.add_log_level(serve)
    relay = verbs.add_parser("relay", help="serve another store's blocks to this cluster")
    relay.add_argument(
        "--upstream", type=flags.target, required=True, help="host:port of the store"
    )
    relay.add_argument("--upstream-token-file", type=Path, help="bearer token of the store")
    relay.add_argument("--root", type=Path, required=True, help="folder of the kept blocks")
    _caller_flags(relay)
    relay.add_argument(
        "--keep-bytes", type=flags.count, default=KEEP_BYTES, help="what it may hold"
    )
    relay.add_argument(
        "--address", type=flags.listener, default="0.0.0.0:7446", help="host:port to listen on"
    )
    relay.add_argument(
        "--http-port", type=flags.port, default=9105, help="metrics and health; 0 = any"
    )
    flags.add_log_level(relay)
    inspect = verbs.add_parser("inspect", help="show a store, a bundle or a manifest")
    inspect.add_argument("path", help="folder, file, or s3://bucket/prefix")
    inspect.add_argument("--run", default="", help="of a store: only this run")
    verify = verbs.add_parser("verify", help="check every block and digest of a store or bundle")
    verify.add_argument("path", help="folder, or s3://bucket/prefix")
    verify.add_argument("--base", type=Path, help="checkpoint to apply a bundle to")
    diff = verbs.add_parser("diff", help="compare two Hugging Face checkpoints bit by bit")
    diff.add_argument("old", type=Path, help="checkpoint before")
    diff.add_argument("new", type=Path, help="checkpoint after")
    _import_parser(verbs.add_parser("import", help="publish checkpoints and delta directories"))
    _export_parser(verbs.add_parser("export", help="write a bundle as a weight_vNNNNNN directory"))
    return top


def _caller_flags(parser_: argparse.ArgumentParser) -> None:
    """Who may call: deny by default."""
    parser_.add_argument(
        "--tenants", type=Path, help="who may publish and read which runs: rose tenant grant"
    )
    parser_.add_argument(
        "--token-file",
        type=Path,
        help="the installation's own bearer token: who shows it reads every run, publishes none",
    )
    parser_.add_argument(
        "--service-account-keys",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="keys of a cluster (kubectl get --raw /openid/v1/jwks), whose service accounts "
        "--tenants may name; repeatable",
    )
    tls.add_flag(parser_)
    tls.add_clients_flag(parser_)
    parser_.add_argument("--access", type=Path, help="JSON: certificate name -> runs it may use")


def _import_parser(parser_: argparse.ArgumentParser) -> None:
    parser_.description = (
        "The first path is a Hugging Face checkpoint; the others are checkpoints of the same model "
        "or weight_vNNNNNN directories of slime and miles, in order."
    )
    parser_.add_argument("paths", type=Path, nargs="+", help="in order")
    parser_.add_argument("--run", type=flags.run, required=True, help="name of the run")
    goal = parser_.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "--store", type=flags.target, help="host:port to publish to, every path as a version"
    )
    goal.add_argument("--out", type=Path, help="folder for one bundle from the first to the last")
    parser_.add_argument("--token-file", type=Path, help="bearer token of the store")


def _export_parser(parser_: argparse.ArgumentParser) -> None:
    parser_.add_argument("bundle", type=Path, help="folder of the bundle")
    parser_.add_argument("base", type=Path, help="checkpoint the bundle starts from")
    parser_.add_argument("root", type=Path, help="folder in which weight_vNNNNNN is made")
    parser_.add_argument(
        "--number", type=flags.one_or_more, required=True, help="NNNNNN; the base is one less"
    )
    parser_.add_argument(
        "--encoding",
        choices=("xor", "overwrite"),
        default="xor",
        help="of a delta: differences, or new values",
    )
    parser_.add_argument(
        "--checksum", choices=sorted(CHECKSUMS), default="xxh3-128", help="of each file"
    )


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
        text, good = _LOOKING[arguments.verb](arguments)
    except (WeightsError, DeltaError, WireError, OSError, ValueError) as error:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        message = flags.complaint(error, argv)
        sys.stderr.write(f"rose weights {arguments.verb}: {kind}{message}\n")
        return 1
    sys.stdout.write(text)
    return 0 if good else 1


def _inspect(arguments: argparse.Namespace) -> InspectionResult:
    return InspectionResult(inspection.inspect(arguments.path, arguments.run))


def _verify(arguments: argparse.Namespace) -> InspectionResult:
    return inspection.verify(arguments.path, arguments.base)


def _diff(arguments: argparse.Namespace) -> InspectionResult:
    return InspectionResult(inspection.diff(arguments.old, arguments.new))


def _import(arguments: argparse.Namespace) -> InspectionResult:
    if arguments.out is not None:
        manifest = importing.bundle(arguments.paths, arguments.out, arguments.run)
        return InspectionResult(
            f"{manifest.target}: {manifest.changes} changes in {arguments.out}\n"
        )
    token = flags.token(arguments.token_file)
    done = asyncio.run(
        importing.publish(arguments.paths, arguments.store, arguments.run, token=token)
    )
    lines = (f"{one.version}  {one.changes} changes  {one.bytes} bytes\n" for one in done)
    return InspectionResult("".join(lines))


def _export(arguments: argparse.Namespace) -> InspectionResult:
    folder = importing.export(
        arguments.bundle,
        arguments.base,
        arguments.root,
        arguments.number,
        encoding=arguments.encoding,
        checksum=arguments.checksum,
    )
    return InspectionResult(f"{folder}\n")


_LOOKING: dict[str, Callable[[argparse.Namespace], InspectionResult]] = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "import": _import,
    "export": _export,
}


async def serve(arguments: argparse.Namespace) -> None:
    """Serve a store or a relay until SIGTERM or SIGINT.

    Raises:
        Unavailable: the address cannot be bound.
    """
    faults.arm()
    memory.keep_freed(KEPT_BYTES)
    credentials = tls.server_credentials(arguments.tls_dir, arguments.tls_client_ca)
    identify, access = _callers(arguments)
    server = Server(identify=identify, credentials=credentials)
    bind = _bind_relay if arguments.verb == "relay" else _bind
    close = bind(server, arguments, access)
    stop = stop_signal()
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(close)
        undo.push_async_callback(server.stop)
        port = await server.start(arguments.address)
        pages, http_port = await observability.serve(
            metrics.REGISTRY,
            host="0.0.0.0",  # noqa: S104  # scraped from other nodes
            port=arguments.http_port,
        )
        undo.push_async_callback(pages.cleanup)
        where = (arguments.verb, arguments.root, port, http_port)
        LOG.info("%s %s: gRPC port %d, HTTP port %d", *where)
        await stop.wait()


def _callers(arguments: argparse.Namespace) -> tuple[Identification | None, StoreAccess]:
    """Who is let in, and what they may do.

    Raises:
        ValueError: nobody was named, and not only this machine reaches the port.
        BadTenants: the file of tenants is none.
    """
    tenants = Tenants(arguments.tenants) if arguments.tenants is not None else None
    token = flags.token(arguments.token_file)
    if tenants is None and not token and arguments.access is None:
        if arguments.tls_client_ca is None and _is_local(arguments.address):
            LOG.warning("only this machine reaches %s: all its users may do all", arguments.address)
            return None, StoreAccess(OPEN)
        raise ValueError(
            f"nobody may do anything at {arguments.address} yet: give --tenants FILE and let "
            "`rose tenant grant NAME --publish RUN --tenants FILE` write it, or --access with "
            "--tls-client-ca; an address on 127.0.0.1 asks for neither"
        )
    if arguments.service_account_keys and tenants is None:
        raise ValueError("--service-account-keys needs --tenants, which says what accounts may do")
    access = (
        StoreAccess(tenants=tenants)
        if arguments.access is None
        else StoreAccess.load(arguments.access, tenants)
    )
    # Behind --tls-client-ca every caller has proven a name already.
    certified = arguments.tls_client_ca is not None
    keys = arguments.service_account_keys
    return Identification(tenants, token, keys, anonymous=certified), access


def _is_local(address: str) -> bool:
    """Whether only this machine reaches it: a socket's path, or the loopback."""
    if address.startswith(("unix:", "local:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _writable(folder: Path) -> None:
    """Refuse a folder that nothing can be kept in, before anything is promised.

    Raises:
        StoreFailed: says why it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"--root {folder} cannot be written: {error.strerror or error}"
        raise StoreFailed(message) from error


def _bind(
    server: Server, arguments: argparse.Namespace, access: StoreAccess
) -> Callable[[], Awaitable[None]]:
    store = open_store(arguments.root)
    if "://" not in arguments.root:
        _writable(Path(arguments.root))
    service = WeightService(store, window=arguments.window, access=access)
    service.bind(server)
    RecordsService(store, access).bind(server)
    return service.close


def _bind_relay(
    server: Server, arguments: argparse.Namespace, access: StoreAccess
) -> Callable[[], Awaitable[None]]:
    _writable(arguments.root)
    channel = rpc.connect(arguments.upstream)
    relay = RelayHandlers(
        channel,
        Blocks(arguments.root / "blocks"),
        token=flags.token(arguments.upstream_token_file),
        keep_bytes=arguments.keep_bytes,
        access=access,
    )
    relay.bind(server)

    async def close() -> None:
        await channel.close()

    return close
