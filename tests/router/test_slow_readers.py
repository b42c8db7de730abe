"""Callers that do not read their whole answer: waited for while they read, then taken for gone."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from rose_router.http.replies.json_reply import LEAST_RATE, JsonReply

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

WRITE_SECONDS = 60.0
BODY = b"[%b]" % (b" " * (10 * LEAST_RATE - 2))
LIMIT = WRITE_SECONDS + 10


class Protocol(BaseProtocol):
    """A connection with what a request of aiohttp's asks of it."""

    ssl_context = peername = sockname = writer = None


class Full(asyncio.Transport):
    """A transport whose caller reads nothing until it is told so."""

    def __init__(self, protocol: BaseProtocol) -> None:
        super().__init__()
        self.protocol, self.written, self.aborted = protocol, b"", False

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        self.protocol.pause_writing()

    def abort(self) -> None:
        self.aborted = True


def answered() -> tuple[Full, web.Request, JsonReply]:
    loop = asyncio.get_running_loop()
    protocol = Protocol(loop)
    transport = Full(protocol)
    protocol.connection_made(transport)
    writer = StreamWriter(protocol, loop)
    request = make_mocked_request(
        "POST", "/generate", protocol=protocol, transport=transport, writer=writer
    )
    return transport, request, JsonReply(BODY, WRITE_SECONDS)


async def test_a_caller_that_reads_nothing_of_its_answer_is_cut_off() -> None:
    transport, request, reply = answered()
    began = asyncio.get_running_loop().time()
    await reply.prepare(request)
    with pytest.raises(ConnectionResetError, match="did not read its answer"):
        await reply.write_eof()
    assert transport.aborted
    assert asyncio.get_running_loop().time() - began == pytest.approx(LIMIT)


async def test_a_caller_that_reads_slowly_has_all_of_its_answer() -> None:
    transport, request, reply = answered()
    await reply.prepare(request)
    asyncio.get_running_loop().call_later(LIMIT - 1, transport.protocol.resume_writing)
    await reply.write_eof()
    assert transport.written.endswith(b"\r\n\r\n" + BODY)
    assert not transport.aborted
