"""``rose batches``: OpenAI's batch files on a lease's engines, after everybody else's turns.

    rose batches --router http://127.0.0.1:8000 --folder /var/lib/rose-batches

The lease's router passes ``/v1/files`` and ``/v1/batches`` on to it (``rose router --batches``),
and it calls that router as any client does. Killed at any moment, it goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from rose_batches.errors import BatchesError
from rose_batches.http import application
from rose_batches.journal import Journal
from rose_batches.worker import Worker
from rose_wire import flags
from rose_wire.daemon import listen, stop_signal
from rose_wire.flags import VerbParser

LOG = logging.getLogger(__name__)
_CONNECT_SECONDS = 5.0
_HOUR = 3600.0


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    router: str,
    *,
    address: str = "127.0.0.1:0",
    token: str = "",
    router_token_file: Path | None = None,
    lines: int = 64,
    tenant_bytes: int = 2 << 30,
    total_bytes: int = 20 << 30,
    keep_seconds: int = 30 * 86_400,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[tuple[Worker, int, asyncio.Task[None]]]:
    """Serve until the block ends; gives the worker, its port, and the task that never ends.

    Raises:
        Damaged: what lies in the folder cannot be used.
        OSError: folder or address cannot.
    """
    flags.token(router_token_file)  # a file that is missing is said at the start
    journal = await asyncio.to_thread(Journal, folder)
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=60, sock_connect=_CONNECT_SECONDS),
        ) as session:
            worker = Worker(
                journal,
                session,
                router.rstrip("/"),
                clock,
                router_token_file,
                lines,
                tenant_bytes,
                total_bytes,
                keep_seconds,
            )
            runner = web.AppRunner(application(worker, token), access_log=None)
            await runner.setup()
            working = asyncio.create_task(worker.run())
            try:
                yield worker, await listen(runner, address), working
            finally:
                await runner.cleanup()
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
    finally:
        journal.close()


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose batches", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--router", type=flags.web, required=True, help="URL of the lease's router")
    add("--router-token-file", type=Path, help="token of the lease, to call its router with")
    add("--folder", type=Path, required=True, help="files, batches and answers; on a durable disk")
    add("--address", type=flags.listener, default="127.0.0.1:8200", help="HOST:PORT")
    add("--token-file", type=Path, help="token that the router shows (--batches-token-file)")
    add(
        "--lines",
        type=flags.one_or_more,
        default=64,
        help="lines under way at a time",
    )
    add(
        "--tenant-mebibytes",
        type=flags.one_or_more,
        default=2048,
        help="of files and answers that one tenant may store",
    )
    add(
        "--total-mebibytes",
        type=flags.one_or_more,
        default=20_480,
        help="of files and answers that all tenants together may store",
    )
    add("--keep-days", type=flags.one_or_more, default=30, help="after which files are deleted")
    flags.add_log_level(made)
    return made


async def _serve(given: argparse.Namespace) -> None:
    stop = stop_signal()
    async with running(
        given.folder,
        given.router,
        address=given.address,
        token=flags.token(given.token_file),
        router_token_file=given.router_token_file,
        lines=given.lines,
        tenant_bytes=given.tenant_mebibytes << 20,
        total_bytes=given.total_mebibytes << 20,
        keep_seconds=given.keep_days * 86_400,
    ) as (worker, port, working):
        LOG.info("ready: port %d", port)
        stopped = asyncio.create_task(stop.wait())
        while not stopped.done() and not working.done():
            await worker.do(worker.journal.expire, worker.clock(), worker.keep_seconds)
            await asyncio.wait(
                {stopped, working}, timeout=_HOUR, return_when=asyncio.FIRST_COMPLETED
            )
        stopped.cancel()
        if working.done():
            working.result()


def main(argv: list[str]) -> int:
    """``rose batches``: 0 stopped, 1 could not start or go on."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        flags.refuse_open(given.address, given.token_file, "everybody could be every tenant")
        asyncio.run(_serve(given))
    except (OSError, ValueError, BatchesError, sqlite3.Error) as error:
        sys.stderr.write(f"rose batches: {flags.complaint(error, argv)}\n")
        return 1
    return 0
