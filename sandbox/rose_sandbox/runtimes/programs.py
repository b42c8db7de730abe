"""Runs a program or a call, to its end, and reports its output when it fails.

Next step: ``volume`` and ``runc`` call it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

from rose_sandbox.errors import RuntimeFailed

_T = TypeVar("_T")

SECONDS = 120.0
"""The longest that a program of the runtime may take: tar of a full disk on a busy machine."""


async def run(
    path: str, *arguments: str | Path, quiet: bool = False, pipes: tuple[int, int] | None = None
) -> bytes:
    """Run a program; returns its stdout. A cancelled call ends when the program has.

    Args:
        path: ``PATH`` to find it by.
        arguments: the program and its arguments.
        quiet: give it no streams, for what it starts would keep them.
        pipes: its stdin and stdout, for what it starts; it has no stderr then.

    Raises:
        RuntimeFailed: it failed or took over ``SECONDS``.
    """
    return await whole(_run(path, *arguments, quiet=quiet, pipes=pipes))


async def call(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of the kernel's in a thread. A cancelled call ends when the function has.

    Raises:
        RuntimeFailed: it raised ``OSError``.
    """
    try:
        await whole(asyncio.to_thread(function, *arguments))
    except OSError as error:
        doing = " ".join(map(str, (function.__name__, *arguments)))
        raise RuntimeFailed(f"{doing}: {error.strerror or error}") from error


async def whole(doing: Coroutine[None, None, _T]) -> _T:
    """Wait for something to its end, also when cancelled."""
    running = asyncio.create_task(doing)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # Half a dump or half a mount is worse than a late one, and a start that is cancelled
        # between fork and return would leave a process that nobody waits for.
        await asyncio.gather(running, return_exceptions=True)
        raise


async def _run(
    path: str, *arguments: str | Path, quiet: bool, pipes: tuple[int, int] | None
) -> bytes:
    program = shutil.which(arguments[0], path=path)
    if program is None:
        raise RuntimeFailed(f"{arguments[0]} is not there (PATH is {path})")
    streams = asyncio.subprocess.DEVNULL if quiet or pipes else asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(program, *map(str, arguments[1:])),
        stdin=pipes[0] if pipes else asyncio.subprocess.DEVNULL,
        stdout=pipes[1] if pipes else streams,
        stderr=streams,
        env={"PATH": path, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/")},
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise RuntimeFailed(f"{arguments[0]} took over {SECONDS:.0f} s") from None
    if process.returncode:
        output = (err or out or b"").decode(errors="replace").strip()[-2000:]
        raise RuntimeFailed(
            f"exit code {process.returncode} from {' '.join(map(str, arguments))}: {output}"
        )
    return out or b""
