"""Two pipes to a sandbox's first process (``served``): one request at a time, in order.

The pipes lie in the sandbox's folder, so that a host that starts anew goes on with them. Whatever
comes back may be a tenant's: it is searched for this request's own number, and never larger than
was asked for.
Next step: ``runsc`` asks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rose_sandbox.errors import RuntimeFailed, UnknownSandbox
from rose_sandbox.runtimes.programs import whole

TO, FROM = "to", "from"
ANSWER_SECONDS = 20.0
"""For an answer that needs no work; it takes milliseconds on a free machine."""
BYTES_A_SECOND = 4 << 20
"""The least that a file comes and goes by, on a machine that many want."""
_LOOK_SECONDS = 0.25
"""Between two looks whether there is still somebody who could answer."""
_HEAD_BYTES = 256
_CHUNK = 1 << 16
_ENDED = "the sandbox has ended: what ran in it is gone"


class Silent(RuntimeFailed):
    """The first process did not answer in time."""


class Channel:
    """The pipes of one sandbox.

    Args:
        folder: where they are.
        alive: whether there is a process that could answer.
    """

    def __init__(self, folder: Path, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._lock = asyncio.Lock()
        # Each end is open for both ways: neither side finds the other gone when it starts anew.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._to, self._from = (os.open(folder / name, flags) for name in (TO, FROM))
        self._torn = True  # an earlier host may have died in the middle of a request
        self._closed = False

    @staticmethod
    def make(folder: Path) -> None:
        """Fresh pipes, with nothing in them."""
        for name in (TO, FROM):
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name, 0o600)

    def close(self) -> None:
        """Let go of them, at the end of a request that is under way: nobody can answer it."""
        self._closed = True
        if not self._lock.locked():
            self._release()

    def _release(self) -> None:
        if self._closed and self._to >= 0:
            os.close(self._to)
            os.close(self._from)
            self._to = self._from = -1

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._closed:
                raise UnknownSandbox(_ENDED)
            try:
                yield
            finally:
                # Not before: the numbers would soon be another sandbox's.
                self._release()

    @asynccontextmanager
    async def quiet(self, *fields: str) -> AsyncIterator[None]:
        """Ask this, and nothing else until the block ends: no answer is on its way then.

        Raises:
            Silent, UnknownSandbox: as ``ask``.
        """
        async with self._alone():
            ends = time.monotonic() + ANSWER_SECONDS
            await whole(asyncio.to_thread(self._exchange, fields, b"", ends, 0))
            yield

    async def ask(
        self,
        *fields: str | int,
        then: bytes = b"",
        within: float = ANSWER_SECONDS,
        most: int = 1 << 16,
    ) -> tuple[str, bytes]:
        """One request; a cancelled one ends when it is answered.

        Args:
            fields: of its line, without the number.
            then: what comes behind the line.
            within: seconds, besides those that its bytes take.
            most: bytes of the answer.

        Raises:
            Silent: no answer in time.
            UnknownSandbox: there is nobody who could answer.
        """
        async with self._alone():
            ends = time.monotonic() + within + (len(then) + most) / BYTES_A_SECOND
            return await whole(asyncio.to_thread(self._exchange, fields, then, ends, most))

    async def put(self, path: bytes, mode: int, data: bytes) -> str:
        """Write a file at a path with its zero byte; returns the last answer's status."""
        within = ANSWER_SECONDS + len(data) / BYTES_A_SECOND

        def exchange() -> str:
            ends = time.monotonic() + within
            number = self._request(("put", f"{mode:o}", len(data)), path, ends)
            verb, _ = self._answer(number, ends, 0)
            if verb != "go":
                return verb
            self._torn = True  # until it is answered that all of it has come
            self._write(data, ends)
            return self._answer(number, ends, 0)[0]

        async with self._alone():
            return await whole(asyncio.to_thread(exchange))

    def _exchange(
        self, fields: tuple[str | int, ...], then: bytes, ends: float, most: int
    ) -> tuple[str, bytes]:
        return self._answer(self._request(fields, then, ends), ends, most)

    def _request(self, fields: tuple[str | int, ...], then: bytes, ends: float) -> bytes:
        before, self._torn = (b"\0\n" if self._torn else b""), True
        self._left = b""
        number = secrets.token_hex(8).encode()
        line = " ".join(map(str, fields)).encode()
        self._write(before + number + b" " + line + b"\n" + then, ends)
        return number

    def _answer(self, number: bytes, ends: float, most: int) -> tuple[str, bytes]:
        mark = number + b" "
        data = self._left
        while (at := data.find(mark)) < 0 or (end := data.find(b"\n", at)) < 0:
            data = data[max(at, 0) if at >= 0 else -len(mark) :] + self._read(ends)
            if at >= 0 and len(data) > _HEAD_BYTES and b"\n" not in data[:_HEAD_BYTES]:
                raise RuntimeFailed("the sandbox's first process says what it never should")
        verb, _, length = data[at + len(mark) : end].decode(errors="replace").partition(" ")
        if not length.isdecimal() or int(length) > most:
            raise RuntimeFailed("the sandbox's first process says what it never should")
        size, data = int(length), data[end + 1 :]
        parts, has = [data], len(data)
        while has < size:
            parts.append(more := self._read(ends))
            has += len(more)
        data = b"".join(parts)
        self._left, self._torn = data[size:], False
        return verb, data[:size]

    def _read(self, ends: float) -> bytes:
        self._wait(self._from, select.POLLIN, ends)
        return os.read(self._from, _CHUNK)

    def _write(self, data: bytes, ends: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._to, select.POLLOUT, ends)
            view = view[os.write(self._to, view[:_CHUNK]) :]

    def _wait(self, descriptor: int, what: int, ends: float) -> None:
        poll = select.poll()
        poll.register(descriptor, what)
        while True:
            ready = poll.poll(1000 * max(0.0, min(_LOOK_SECONDS, ends - time.monotonic())))
            # Also where there is something: who floods the pipe must not hold the host for ever.
            if time.monotonic() > ends:
                raise Silent(
                    "the sandbox's first process does not answer; what ran in it broke or filled "
                    "it: go back to an earlier turn, or end it"
                )
            if ready:
                return
            if self._closed or not self._alive():
                raise UnknownSandbox(_ENDED)
