"""Just enough ZMTP 3 (RFC 23) to subscribe to a publisher over TCP, without a ZeroMQ library.

Mechanism NULL, socket type SUB. What is not understood ends the connection: an error of the
publisher must not be taken for silence.
Next step: ``feed`` keeps the newest message.
"""

from __future__ import annotations

import asyncio

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_READY = b"\x05READY" + b"\x0bSocket-Type" + (3).to_bytes(4) + b"SUB"
_LARGEST = 1 << 20


class Subscription:
    """An open subscription; use ``connect``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, topic: bytes) -> Subscription:
        """Shake hands and subscribe to messages that begin with ``topic``.

        Raises:
            OSError: nobody listens.
            ValueError: the peer speaks something else.
            asyncio.IncompleteReadError: the peer hung up.
        """
        reader, writer = await asyncio.open_connection(host, port)
        made = cls(reader, writer)
        try:
            await made._handshake(topic)
        except BaseException:  # whatever it was, the connection must not stay open
            writer.close()
            raise
        return made

    async def _handshake(self, topic: bytes) -> None:
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(len(_GREETING))
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
            raise ValueError("the peer does not speak ZMTP 3")
        if greeting[12:32].rstrip(b"\0") != b"NULL":
            raise ValueError("the publisher wants credentials; only the mechanism NULL is known")
        self._send(_COMMAND, _READY)
        flags, body = await self._frame()
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise ValueError("the publisher refused the handshake")
        self._send(0, b"\x01" + topic)

    async def receive(self) -> list[bytes]:
        """The frames of the next message.

        Raises:
            ValueError: bytes that are no message.
            asyncio.IncompleteReadError: the publisher is gone.
        """
        frames: list[bytes] = []
        while True:
            flags, body = await self._frame()
            if flags & _COMMAND:
                continue
            frames.append(body)
            if not flags & _MORE:
                return frames

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    def _send(self, flags: int, body: bytes) -> None:
        self._writer.write(bytes([flags, len(body)]) + body)

    async def _frame(self) -> tuple[int, bytes]:
        flags = (await self._reader.readexactly(1))[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ValueError(f"a frame with the unknown flags {flags:#x}")
        width = 8 if flags & _LONG else 1
        size = int.from_bytes(await self._reader.readexactly(width))
        if size > _LARGEST:
            raise ValueError(f"a frame of {size} bytes; at most {_LARGEST}")
        return flags, await self._reader.readexactly(size)
