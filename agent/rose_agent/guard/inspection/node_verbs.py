"""``rose agent report | trace | stop | resume``: what people ask of the guard on a node.

``report`` and ``trace`` read the guard's pages on ``agent.sock``. ``stop`` and ``resume`` are the
node's stop button, a file of the run directory: they work while no guard runs too. ``trace`` shows
the flight recorder of a running guard, or a dump it kept after a breach.

| format of ``trace`` | what |
|---|---|
| ``json`` | the entries (``recorder``) |
| ``perfetto`` | trace events for ui.perfetto.dev and chrome://tracing |
| ``svg`` | a picture of requests and gates over time |

Next step: ``pages`` makes the pages, ``perfetto`` and ``timeline`` the last two formats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from rose_agent.guard.flight.perfetto import perfetto
from rose_agent.guard.flight.recorder import dumps
from rose_agent.guard.flight.timeline import timeline
from rose_engines.node.rundir import RunDir
from rose_wire.flags import VerbParser

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
    parser = VerbParser(prog=f"rose agent {what}", description=LOOKS[what])
    parser.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="of the guard; default /run/rose"
    )
    if what == "trace":
        return _trace(parser, argv)
    folder: Path = parser.parse_args(argv).rundir
    try:
        sys.stdout.write(_answer(what, folder) + "\n")
    except (aiohttp.ClientError, OSError) as error:
        sys.stderr.write(f"rose agent {what}: no guard runs in {folder}: {error}\n")
        return 1
    return 0


def _trace(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Print the running guard's recorder, a dump, or the list of dumps.

    Args:
        parser: knows ``--rundir`` already.
        argv: the verb's arguments.

    Returns:
        1 when there is no guard or no such dump.
    """
    add = parser.add_argument
    add(
        "--format",
        choices=["json", "perfetto", "svg"],
        default="json",
        help="perfetto = for ui.perfetto.dev, svg = a picture",
    )
    add("--last", type=float, default=0.0, help="only the last so many seconds; 0 = all")
    add("--list", action="store_true", help="name the dumps that breaches left")
    add("--file", type=Path, help="show this dump instead of the running guard")
    options = parser.parse_args(argv)
    if options.list:
        found = dumps(options.rundir / "flight")
        sys.stdout.writelines(f"{path}\n" for path in found)
        if not found:
            sys.stderr.write(f"no dump in {options.rundir / 'flight'}: no breach has left one\n")
        return 0
    try:
        if options.file:
            dump = json.loads(options.file.read_bytes())
        else:
            dump = asyncio.run(fetch(options.rundir, "/trace"))
    except (aiohttp.ClientError, OSError) as error:
        nobody = f"no guard answers in {options.rundir}"
        where = f"{options.file} cannot be read" if options.file else nobody
        sys.stderr.write(f"rose agent trace: {where}: {error}\n")
        return 1
    except ValueError as error:
        sys.stderr.write(f"rose agent trace: {options.file} is no dump: {error}\n")
        return 1
    sys.stdout.write(show(recent(dump, options.last), options.format))
    return 0


def recent(dump: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The dump's last ``seconds``; all of it for 0."""
    entries = dump["entries"]
    if not seconds or not entries:
        return dump
    since = max(entry["t"] for entry in entries) - round(seconds * 1e9)
    return {**dump, "entries": [entry for entry in entries if entry["t"] >= since]}


def show(dump: dict[str, Any], form: str) -> str:
    """The dump in one of the formats."""
    if form == "svg":
        return timeline(dump)
    return json.dumps(perfetto(dump) if form == "perfetto" else dump) + "\n"


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
