"""What every caller of a store or relay shares: how long it waits, and what a refusal means.

Next step: ``client`` is a receiver's side, ``publishing`` a publisher's, ``relay`` stands between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TypeVar

from rose_weights.errors import from_text
from rose_wire.errors import Refused, Unavailable

_ItemT = TypeVar("_ItemT")

ANSWER_SECONDS = 30.0
"""For answers that cost the other side no work."""

PLAN_SECONDS = 600.0
"""A merge over many versions or a full state takes the store this long at most."""

ATTEMPTS = 3


@contextlib.contextmanager
def understanding() -> Iterator[None]:
    """Refusals of the store as the errors it raised."""
    try:
        yield
    except Refused as error:
        known = from_text(str(error))
        if known is None:
            raise
        raise known from error


async def promptly(
    stream: AsyncIterator[_ItemT], seconds: float, what: str
) -> AsyncGenerator[_ItemT, None]:
    """What a stream brings, as long as each item comes in time; the stream is ended afterwards.

    A connection whose other side is gone breaks by itself. One whose other side answers pings and
    does nothing else (a disk that hangs) would be waited for without end.

    Args:
        stream: nobody else reads from it; ended with ``aclose`` where it has that.
        seconds: for each item.
        what: for people, who is waited for.

    Raises:
        Unavailable: an item did not come in time.
    """
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    item = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                message = f"{what} did not come within {seconds:.0f} s"
                raise Unavailable(message) from error
            yield item
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
