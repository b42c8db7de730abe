"""Count the output tokens that pass a data route, without holding back a byte of it.

SGLang's ``/generate`` says how many tokens a request has so far (``meta_info.completion_tokens``,
cumulative per choice); OpenAI completions say it once in ``usage``, and until then every event
with a choice counts as one token. Bytes are looked at after they have been passed on.

SGLang's events repeat everything so far, so decoding each would cost more than passing it on: the
two numbers are searched for instead. Inside a JSON text a quote is escaped, so no generated text
can look like one of the keys. Next step: ``proxy`` feeds it.
"""

from __future__ import annotations

import re

import msgspec

from rose_core.unreadable import UNREADABLE

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


_TOKENS = b'"completion_tokens":'
_INDEX = b'"index":'
_NUMBER = re.compile(rb"\s*(\d+)")
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
            if not line.startswith(b"data:") or line[5:].lstrip() == b"[DONE]":
                continue
            if b'"meta_info":' in line:
                self._count(_number(line, _INDEX) or 0, _number(line, _TOKENS) or 0)
            else:
                self._payload(line[5:], 1)

    def _count(self, index: int, tokens: int) -> None:
        self._by_index[index] = max(self._by_index.get(index, 0), tokens)

    def _payload(self, payload: bytes, tokens_per_event: int) -> None:
        try:
            replies = _DECODER.decode(payload)
        except UNREADABLE:
            return
        for position, reply in enumerate(replies if isinstance(replies, list) else [replies]):
            if reply.meta_info is not None:
                self._count(reply.index or position, reply.meta_info.completion_tokens)
            if reply.usage is not None:
                self._usage = reply.usage.completion_tokens
            self._events += tokens_per_event if reply.choices else 0


def _number(line: bytes, key: bytes) -> int | None:
    """The number after the last occurrence of a key."""
    start = line.rfind(key)
    found = _NUMBER.match(line, start + len(key)) if start >= 0 else None
    return int(found[1]) if found else None
