"""``python -m rose_engines.fake``: the fake engine as a process, with permit and control socket."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

from aiohttp import web

from rose_engines.fake.scheduler import FakeScheduler
from rose_engines.fake.server import FakeServer
from rose_engines.live import Live, host_tensors
from rose_engines.permit import Permit
from rose_engines.safetensors import read_checkpoint
from rose_engines.session import WeightSession
from rose_engines.sglang.control import ControlServer


def parser() -> argparse.ArgumentParser:
    """Flags of the fake engine."""
    flags = argparse.ArgumentParser(prog="rose_engines.fake", description=__doc__)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=0, help="0 = any; it is printed as url=...")
    flags.add_argument("--permit", type=Path, help="compute only while this permit is open")
    flags.add_argument("--plugin-socket", type=Path, help="control socket: stage, commit, status")
    flags.add_argument("--model", type=Path, help="model folder whose tensors are the weights")
    flags.add_argument("--weight-version", default="base", help="label at the start")
    flags.add_argument("--token-seconds", type=float, default=0.005, help="time per iteration")
    flags.add_argument("--prefill-token-seconds", type=float, default=0.0)
    flags.add_argument("--max-running", type=int, default=8)
    return flags


def load_weights(model: Path | None) -> Live:
    """Private copies of a model folder's tensors; no weights without a folder.

    Raises:
        UnsupportedEngine: the folder holds no readable safetensors.
    """
    if model is None:
        return {}
    stored = read_checkpoint(model)
    return host_tensors(
        {k: (kind, shape, bits.copy()) for k, (kind, shape, bits) in stored.items()}
    )


async def serve(flags: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    session = WeightSession(
        load_weights(flags.model),
        flags.weight_version,
        wake=lambda: _discard(loop.call_soon_threadsafe(scheduler.wake)),
    )
    permit = Permit.attach(flags.permit, writable=False) if flags.permit else None

    def permit_open() -> bool | None:
        return permit.is_open(time.monotonic_ns()) if permit else None

    scheduler = FakeScheduler(
        session,
        permit_open=lambda: permit_open() is not False,
        token_seconds=flags.token_seconds,
        prefill_token_seconds=flags.prefill_token_seconds,
        max_running=flags.max_running,
    )
    session.permit_open = permit_open
    control = ControlServer(flags.plugin_socket, session.handle) if flags.plugin_socket else None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        FakeServer(scheduler, str(flags.model or "fake")).application(), access_log=None
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, flags.host, flags.port)
        await site.start()
        if control:
            control.start()
        port = runner.addresses[0][1]
        sys.stdout.write(f"url=http://{flags.host}:{port}\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        if control:
            control.close()
        await runner.cleanup()


def _discard(_: object) -> None:
    """Makes a callback of something whose value nobody wants."""


def main(argv: list[str] | None = None) -> int:
    """Run the fake engine."""
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(parser().parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
