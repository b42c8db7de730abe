"""What processes that serve until they are told to stop do alike."""

from __future__ import annotations

import asyncio
import signal

from aiohttp import web


def stop_signal() -> asyncio.Event:
    """Set at SIGTERM or SIGINT, which no longer end this process by themselves."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def listen(runner: web.AppRunner, address: str) -> int:
    """Serve a runner that is set up.

    Args:
        runner: of the application.
        address: ``host:port``, ``[host]:port``; port 0 picks one.

    Returns:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    return int(runner.addresses[0][1])
