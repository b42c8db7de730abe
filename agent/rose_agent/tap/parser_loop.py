"""The parser's loop: packets, the guard's socket, the metrics page; until it is told to end.

``main`` imports this after the fork and before the parser gives up its rights.
Next step: ``parser``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from pathlib import Path

from rose_agent.metrics import REGISTRY
from rose_agent.tap.parser import Parser
from rose_wire import plainpages

_log = logging.getLogger("rose.tap")


def parse(
    channel: socket.socket,
    rundir: Path,
    sample_from: float,
    listener: socket.socket,
    http: socket.socket,
) -> None:
    """Run until SIGTERM, SIGINT, or the opener's end.

    Args:
        channel: socket pair to the opener.
        rundir: where pods' own taps listen.
        sample_from: segments per second above which token streams are sampled; 0 = never.
        listener: ``tap.sock``.
        http: where the metrics are read.
    """
    asyncio.run(_run(Parser(channel, rundir, sample_from), listener, http))


async def _run(parser: Parser, listener: socket.socket, http: socket.socket) -> None:
    pages = await plainpages.serve(http, REGISTRY)
    task = asyncio.create_task(parser.run(listener))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    _log.info("tap on port %s for metrics", http.getsockname()[1])
    with contextlib.suppress(asyncio.CancelledError):
        await task
    pages.close()
