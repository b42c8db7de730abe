"""Records of sandboxes in a store that is far: what a sandbox host has of it.

Blocking, as all of ``Records``: hosts call it in threads, and one loop in a thread of its own
speaks gRPC for all of them. The credential is read again at every call, since a kubelet renews it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from rose_weights.call_policy import understanding
from rose_weights.errors import StoreFailed
from rose_weights.messages import (
    ForgetRequest,
    OwnRequest,
    RecordBlockRequest,
    RecordCommitRequest,
    RecordPutRequest,
    RecordRequest,
    SessionRequest,
    SessionState,
)
from rose_weights.methods import (
    COMMIT_RECORD,
    FORGET,
    LOOK,
    OWN,
    PUT_BLOCK,
    READ_BLOCK,
    READ_RECORD,
)
from rose_weights.store.record import TurnRecord, record_of
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.method import Method

_RequestT = TypeVar("_RequestT")
_ReplyT = TypeVar("_ReplyT")

ANSWER_SECONDS = 30.0
"""Of a block of 4 MiB over a slow link, and of a commit that syncs a full record."""


class RemoteRecords:
    """A ``RecordStore`` over gRPC.

    Args:
        address: ``host:port``, or ``tls://host:port`` (``rose_wire.tls``).
        token: gives the credential, of ``rose tenant grant --record`` or a service account's.
    """

    def __init__(self, address: str, token: Callable[[], str] = lambda: "") -> None:
        self._address, self._token = address, token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="records")
        self._thread.start()
        self._channel: grpc.aio.Channel | None = None

    def claim(
        self, run: str, session: str, owner: str, expected_fence: int | None = None
    ) -> SessionState:
        """See ``RecordStore``; so for all of these."""
        return self._ask(OWN, OwnRequest(run, session, owner, expected_fence))

    def session_state(self, run: str, session: str) -> SessionState:
        """See ``RecordStore``."""
        return self._ask(LOOK, SessionRequest(run, session))

    def read(self, run: str, session: str, name: str) -> TurnRecord:
        """See ``RecordStore``."""
        return record_of(self._ask(READ_RECORD, RecordRequest(run, session, name)), name, session)

    def block(self, run: str, name: bytes) -> bytes:
        """See ``RecordStore``."""
        return self._ask(READ_BLOCK, RecordBlockRequest(run, name))

    def put(self, run: str, session: str, fence: int, data: bytes) -> bytes:
        """See ``RecordStore``."""
        return self._ask(PUT_BLOCK, RecordPutRequest(run, session, fence, data))

    def commit(self, run: str, session: str, fence: int, data: bytes) -> SessionState:
        """See ``RecordStore``."""
        return self._ask(COMMIT_RECORD, RecordCommitRequest(run, session, fence, data))

    def forget(self, run: str, session: str, fence: int) -> SessionState:
        """See ``RecordStore``."""
        return self._ask(FORGET, ForgetRequest(run, session, fence))

    def close(self) -> None:
        """See ``RecordStore``."""
        if self._channel is not None:
            asyncio.run_coroutine_threadsafe(self._channel.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _ask(self, method: Method[_RequestT, _ReplyT], request: _RequestT) -> _ReplyT:
        try:
            with understanding():
                asked = self._call(method, request, self._token())
                return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        except (WireError, OSError) as error:
            raise StoreFailed(f"records at {self._address} cannot be had: {error}") from error

    async def _call(
        self, method: Method[_RequestT, _ReplyT], request: _RequestT, token: str
    ) -> _ReplyT:
        if self._channel is None:
            self._channel = rpc.connect(self._address)
        return await rpc.call(self._channel, method, request, timeout=ANSWER_SECONDS, token=token)
