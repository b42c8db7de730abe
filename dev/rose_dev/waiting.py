"""Waiting for conditions, for tests, benchmarks and the development tools.

Conditions are polled on the real clock with a generous deadline, because the machines that run
this are slow and busy. ``until`` is for coroutines, ``wait_until`` for everything else, and
``wait_for_answer`` where the caller needs what was found. What can announce itself (an event, a
future) is awaited directly instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from rose_dev.errors import CommandFailed, StartFailed

AnswerT = TypeVar("AnswerT")


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until the condition holds; other tasks of the loop run meanwhile.

    Raises:
        TimeoutError: it did not hold in time.
    """
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # anything may change it
            await asyncio.sleep(0.01)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *,
    seconds: float,
    pause: float = 0.1,
    why: Callable[[], object] = str,
) -> None:
    """Block until the condition holds.

    Args:
        condition: asked again and again.
        what: is awaited.
        seconds: until it is given up.
        pause: seconds between two questions.
        why: called once it is given up, says what stands in the way.

    Raises:
        StartFailed: it did not hold in time; the message has ``what`` and ``why``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            message = f"{what}: not within {seconds:.0f} s {why()}".rstrip()
            raise StartFailed(message)
        time.sleep(pause)


def wait_for_answer(
    look: Callable[[], AnswerT | None], what: str, seconds: float = 180.0, *, pause: float = 0.1
) -> AnswerT:
    """Block until a look finds something, and return what.

    Args:
        look: asked again and again, until its answer is true.
        what: is awaited.
        seconds: until it is given up.
        pause: seconds between two looks; longer where a look costs what is measured.

    Raises:
        StartFailed: it found nothing in time; the message has ``what`` and the last answer.
    """
    found: AnswerT | None = None

    def seen() -> bool:
        nonlocal found
        found = look()
        return bool(found)

    wait_until(seen, what, seconds=seconds, pause=pause, why=lambda: f"; last: {found!r}")
    assert found is not None  # noqa: S101  # seen
    return found


def wait_until_established(kubectl: Callable[..., str], *definitions: str) -> None:
    """Block until the API server serves kinds whose definitions were just made.

    Args:
        kubectl: of a cluster.
        definitions: as ``crd/NAME``.

    Raises:
        StartFailed: they are not served in time.
    """

    def established() -> bool:
        # kubectl's own wait ends with an error where a definition has no condition yet.
        try:
            kubectl("wait", "--for=condition=Established", "--timeout=20s", *definitions)
        except CommandFailed:
            return False
        return True

    wait_until(established, f"{', '.join(definitions)} established", seconds=120, pause=0.5)
