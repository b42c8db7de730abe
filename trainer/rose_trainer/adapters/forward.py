"""``rose forward``: gives a token to the calls of trainers that send none.

Routers hear nobody without a token. Some trainers take none (slime, AReaL), or not for
their control calls. This process stands beside such a trainer on its own machine, passes every
request on to the lease's URL with the token in it, and the answers back as they come.

    rose forward --url http://ROUTER:8000 --token-file /etc/rose/turn.token

It listens on this machine alone: its only caller is the trainer. The file of the token is read
at every request, so what the kubelet renews counts at once.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from rose_wire import flags
from rose_wire.daemon import listen, stop_signal
from rose_wire.flags import VerbParser

LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
# Of one connection and not of the request (RFC 9110, section 7.6.1), and what aiohttp makes anew.
_OF_THE_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect"}
)


class Forwarder:
    """Passes requests on.

    Args:
        url: of the lease.
        token_file: what every request is given; of the caller's own it keeps nothing.
        session: to ask the router with.
    """

    def __init__(self, url: str, token_file: Path, session: aiohttp.ClientSession) -> None:
        self._url, self._token_file, self._session = url.rstrip("/"), token_file, session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The router's answer; 502 where it does not come."""
        try:
            headers = self._headers(request)
        except OSError as error:
            return web.json_response({"message": f"rose forward: {error}"}, status=502)
        began: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                self._url + request.path_qs,
                headers=headers,
                data=request.content if request.can_read_body else None,
                allow_redirects=False,
            ) as reply:
                began = web.StreamResponse(status=reply.status, headers=_kept(reply.headers))
                await began.prepare(request)
                async for chunk in reply.content.iter_any():
                    await began.write(chunk)
                await began.write_eof()
                return began
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            LOG.warning("%s %s: %s", request.method, request.path, error or "no connection")
            if began is None:
                message = f"rose forward: {self._url} does not answer: {error}"
                return web.json_response({"message": message}, status=502)
            if request.transport is not None:
                request.transport.abort()  # a stream that was cut must not look like a whole one
            return began

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        made = _kept(request.headers)
        made["Authorization"] = f"Bearer {flags.token(self._token_file)}"
        return made


def _kept(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _OF_THE_HOP
    )


@asynccontextmanager
async def forwarding(url: str, token_file: Path, address: str) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port."""
    patience = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=patience, auto_decompress=False
    ) as session:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", Forwarder(url, token_file, session).answer)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, auto_decompress=False
        )
        await runner.setup()
        try:
            yield await listen(runner, address)
        finally:
            await runner.cleanup()


def _on_this_machine(text: str) -> str:
    """``HOST:PORT`` of the loopback."""
    address = flags.listener(text)
    host = address.rpartition(":")[0].strip("[]")
    try:
        alone = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = False
    if not alone:
        message = (
            f"{text!r}: whoever reaches this port calls with your token, so it must be of this "
            "machine, for example 127.0.0.1:8000; run one on each machine that sends turns"
        )
        raise argparse.ArgumentTypeError(message)
    return address


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose forward", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--url", type=flags.web, required=True, help="the lease's status.routerURL")
    add("--token-file", type=Path, required=True, help="of a token for the lease")
    add(
        "--address",
        type=_on_this_machine,
        default="127.0.0.1:8000",
        help="where the trainer finds it, on this machine alone",
    )
    flags.add_log_level(made)
    return made


async def _serve(given: argparse.Namespace) -> None:
    stop = stop_signal()
    flags.token(given.token_file)
    async with forwarding(given.url, given.token_file, given.address) as port:
        sys.stdout.write(f"rose forward: port {port} is {given.url}\n")
        sys.stdout.flush()
        await stop.wait()


def main(argv: list[str]) -> int:
    """``rose forward``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(given))
    except OSError as error:
        sys.stderr.write(f"rose forward: {flags.complaint(error, argv)}\n")
        return 1
    return 0
