"""A publisher's first words with the store: take the run over, or say why that cannot be.

A trainer may start before its store, so a store that does not answer, or whose disk is full, is
asked again for a while; who waits learns it at once, and what to look at when the time is up.
Next step: ``publisher`` and ``sharded`` publish as the incarnation that this opened.
"""

from __future__ import annotations

import asyncio
import logging

from rose_trainer.errors import PublishFailed
from rose_weights.errors import StoreFailed
from rose_weights.messages import Description
from rose_weights.send.publishing import WeightsWriter
from rose_wire.errors import Unavailable

LOG = logging.getLogger(__name__)

LONGEST_SECONDS = 60.0
"""A store that has not answered by then is not there, whatever the patience later."""

_PAUSE_SECONDS = 0.5
_REMIND_SECONDS = 10.0


async def open_run(
    writer: WeightsWriter, address: str, run: str, name: str, patience_seconds: float
) -> Description:
    """Take the run over as its only publisher.

    Args:
        writer: of the store at ``address``.
        address: the store, for people.
        run: the run.
        name: who publishes, for people.
        patience_seconds: how long the store may be away; at most ``LONGEST_SECONDS`` here.

    Raises:
        PublishFailed: the store did not answer in that time.
        WeightsError, Refused: the store's reason; a full disk's after that time.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    patience = min(patience_seconds, LONGEST_SECONDS)
    remind = began
    while True:
        try:
            return await writer.open(run, name)
        except (Unavailable, StoreFailed) as error:
            now = loop.time()
            if now >= began + patience:
                if isinstance(error, StoreFailed):
                    raise
                raise PublishFailed(_unreachable(address, patience, error)) from error
            if now >= remind:
                does = "cannot write" if isinstance(error, StoreFailed) else "does not answer"
                left = began + patience - now
                LOG.warning(
                    "the store at %s %s, asked again for %.0f s: %s", address, does, left, error
                )
                remind = now + _REMIND_SECONDS
        await asyncio.sleep(_PAUSE_SECONDS)


def _unreachable(address: str, seconds: float, error: Unavailable) -> str:
    return (
        f"the store at {address} did not answer in {seconds:.0f} s ({error}); start `rose weights "
        f"serve` there, or look at the address, at tls:// and at what may reach its port"
    )
