"""Real sandboxes keep the contract, keep their tenants in, and survive what agents do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Handle, Runtime
from tests.sandbox.contract import Contract, said

pytestmark = pytest.mark.sandbox

Serve = Callable[[Runtime, Handle, int, bytes], Awaitable[None]]
SERVER = """
import socket
door = socket.create_server(('127.0.0.1', {port}))
while True:
    connection, _ = door.accept()
    connection.sendall({answer!r})
    connection.close()
"""


class TestRunc(Contract):
    @pytest.fixture
    def runtime(self, runc: RuncRuntime) -> Runtime:
        return runc

    @pytest.fixture
    def serve(self) -> Serve:
        async def start(runtime: Runtime, box: Handle, port: int, answer: bytes) -> None:
            program = SERVER.format(port=port, answer=answer).encode()
            await runtime.write_file(box, "/root/server.py", program)
            await said(runtime, box, "python3 server.py & sleep 0.5")

        return start
