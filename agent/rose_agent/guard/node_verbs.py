"""``rose agent report | trace | stop | resume``: what people ask of the guard on a node.

``report`` and ``trace`` read the guard's pages on ``agent.sock``. ``stop`` and ``resume`` are the
node's stop button, a file of the run directory: they work while no guard runs too. Next step:
``guard.inspect`` makes the pages, ``guard.trace`` shows the flight recorder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from rose_agent.guard import trace
from rose_engines.node.rundir import RunDir

LOOKS = {
    "report": "What the guard of this node knows now: pools, replicas, slots, latency; JSON.",
    "trace": "The guard's flight recorder: arrivals, decisions and their reasons.",
    "stop": "Stop every rollout engine of this node now, until resume.",
    "resume": "Release this node's stop button.",
}


def main(what: str, argv: list[str]) -> int:
    """Carry out one of ``LOOKS``.

    Returns:
        Exit code: 0 done, 1 no guard runs there.
    """
    parser = argparse.ArgumentParser(prog=f"rose agent {what}", description=LOOKS[what])
    parser.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="of the guard; default /run/rose"
    )
    if what == "trace":
        return trace.main(parser, argv, fetch)
    folder: Path = parser.parse_args(argv).rundir
    try:
        sys.stdout.write(_answer(what, folder) + "\n")
    except (aiohttp.ClientError, OSError) as error:
        sys.stderr.write(f"rose agent {what}: no guard runs in {folder}: {error}\n")
        return 1
    return 0


def _answer(what: str, folder: Path) -> str:
    """Carry it out; what is printed."""
    button = RunDir(folder).stop
    if what == "report":
        return json.dumps(asyncio.run(fetch(folder, "/report")), indent=2)
    if what == "stop":
        button.touch()
        return "stopped; `rose agent resume` lends again"
    folder.stat()  # a wrong folder must not look like a released button
    button.unlink(missing_ok=True)
    return "the stop button is not pressed any more"


async def fetch(rundir: Path, page: str) -> dict[str, Any]:
    """A JSON page of the guard that runs on this run directory.

    Raises:
        aiohttp.ClientError, OSError: nobody listens there.
    """
    connector = aiohttp.UnixConnector(str(rundir / "agent.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"http://agent{page}") as answer,
    ):
        content: dict[str, Any] = await answer.json()
        return content
