"""Conversations behind responses, for ``previous_response_id``.

Tokens stand in the message tree; here are the messages that lead to them. A response whose caller
says ``store: false`` is not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from rose_router.errors import NotFound
from rose_router.http.conversations.conversation import Message

_PART = 8
"""One conversation may have an eighth of it."""


class StoredResponses:
    """The conversations most recently gone on with.

    Args:
        most_bytes: of all of them, as JSON; a forgotten one costs its caller a request with all
            messages.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, job: str, identity: str, messages: Sequence[Message]) -> None:
        """Keep a response's conversation, its answer the last of the messages.

        One that would push out too many others is not kept.
        """
        raw = msgspec.json.encode(messages)
        if len(raw) * _PART > self._most:
            return
        self._bytes += len(raw) - len(self._kept.pop((job, identity), b""))
        self._kept[job, identity] = raw
        while self._bytes > self._most:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def find(self, job: str, identity: str) -> list[Message]:
        """The conversation behind a response of this job.

        Raises:
            NotFound: none is kept under that id.
        """
        raw = self._kept.get((job, identity))
        if raw is None:
            message = (
                f"previous_response_id: {identity!r:.80} is not kept here (forgotten, never "
                "stored, too long, or another job's); send the whole conversation as input"
            )
            raise NotFound("UnknownResponse", message)
        self._kept.move_to_end((job, identity))
        found: list[Message] = msgspec.json.decode(raw)
        return found
