"""``rose agent trace``: the flight recorder of a running guard, or a dump it kept after a breach.

| format | what |
|---|---|
| ``json`` | the entries (``recorder``) |
| ``perfetto`` | trace events for ui.perfetto.dev and chrome://tracing |
| ``svg`` | a picture of requests and gates over time |

Next step: ``perfetto`` and ``timeline`` make the last two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from rose_agent.guard.blackbox import dumps
from rose_agent.guard.perfetto import perfetto
from rose_agent.guard.timeline import timeline

Fetch = Callable[[Path, str], Awaitable[dict[str, Any]]]


def main(parser: argparse.ArgumentParser, argv: list[str], fetch: Fetch) -> int:
    """Print the running guard's recorder, a dump, or the list of dumps.

    Args:
        parser: knows ``--rundir`` already.
        argv: the verb's arguments.
        fetch: reads a page of the guard that runs on a run directory.

    Returns:
        1 when there is no guard or no such dump.
    """
    add = parser.add_argument
    add("--format", choices=["json", "perfetto", "svg"], default="json")
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
            dump = asyncio.run(_running(options.rundir, fetch))
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


async def _running(rundir: Path, fetch: Fetch) -> dict[str, Any]:
    return await fetch(rundir, "/trace")


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
