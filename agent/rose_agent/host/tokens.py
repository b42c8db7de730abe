"""Count the output tokens that pass a data route, without holding back a byte of it.

SGLang's ``/generate`` says how many tokens a request has so far (``meta_info.completion_tokens``,
cumulative per choice); OpenAI completions say it once in ``usage``, and until then every event
with a choice counts as one token. Bytes are looked at after they have been passed on.
"""

from __future__ import annotations

import msgspec

# An event larger than this is not looked into; what a stream counts is then a lower bound.
_LONGEST_EVENT = 8 * 1024 * 1024


class _Meta(msgspec.Struct):
    completion_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    meta_info: _Meta | None = None
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []
    index: int = 0


_DECODER = msgspec.json.Decoder(_Reply | list[_Reply])


class TokenCount:
    """Tokens of one request; feed it the reply's bytes in order."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._buffer = bytearray()
        self._by_index: dict[int, int] = {}
        self._events = 0
        self._usage: int | None = None

    @property
    def total(self) -> int:
        """Tokens seen so far."""
        if self._usage is not None:
            return self._usage
        return sum(self._by_index.values()) or self._events

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the reply."""
        self._buffer += data
        if not self._streamed:
            return
        while (end := self._buffer.find(b"\n\n")) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._event(event)
        if len(self._buffer) > _LONGEST_EVENT:
            self._buffer.clear()

    def finish(self) -> int:
        """The reply is complete; returns its tokens."""
        if not self._streamed and len(self._buffer) <= _LONGEST_EVENT:
            self._payload(bytes(self._buffer), 0)
        self._buffer.clear()
        return self.total

    def _event(self, event: bytes) -> None:
        for line in event.splitlines():
            if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                self._payload(line[5:], 1)

    def _payload(self, payload: bytes, tokens_per_event: int) -> None:
        try:
            replies = _DECODER.decode(payload)
        except msgspec.MsgspecError:
            return
        for position, reply in enumerate(replies if isinstance(replies, list) else [replies]):
            if reply.meta_info is not None:
                index = reply.index or position
                known = self._by_index.get(index, 0)
                self._by_index[index] = max(known, reply.meta_info.completion_tokens)
            if reply.usage is not None:
                self._usage = reply.usage.completion_tokens
            self._events += tokens_per_event if reply.choices else 0
