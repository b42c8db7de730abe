"""Records of sandboxes over gRPC, for hosts that may keep those of a run.

| method | what |
|---|---|
| ``OWN`` | take a session over; fences the host before |
| ``LOOK`` | whose a session is, and which turns have a record |
| ``READ_RECORD``, ``READ_BLOCK`` | a record as it is stored, and a block of the run's |
| ``PUT_BLOCK``, ``COMMIT_RECORD`` | stage blocks; publish the record that needs them |
| ``FORGET`` | a session is over |

Each names a run, and asks for the right ``record`` of that run before it looks at anything. That
right opens no weights, and no right to weights opens a record: sessions are no runs to ``service``.
So a host that was taken over has its own run's sessions and nothing else. Files are touched in
threads.
"""

from __future__ import annotations

import asyncio

from rose_weights import metrics
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
from rose_weights.serve.access import OPEN, StoreAccess
from rose_weights.serve.responses import answering
from rose_weights.store.record_store import StoredRecords
from rose_weights.store.store import Store
from rose_wire.rpc import Server, peer


class RecordsService:
    """Handlers over one store.

    Args:
        store: where records are.
        access: who may do what; by default everybody everything, as nobody else gets in.
    """

    def __init__(self, store: Store, access: StoreAccess | None = None) -> None:
        self._records = StoredRecords(store)
        self._access = access or StoreAccess(OPEN)

    def bind(self, server: Server) -> None:
        """Offer every method on a server."""
        server.unary(OWN, answering(self.claim))
        server.unary(LOOK, answering(self.session_state))
        server.unary(READ_RECORD, answering(self.read))
        server.unary(READ_BLOCK, answering(self.block))
        server.unary(PUT_BLOCK, answering(self.put))
        server.unary(COMMIT_RECORD, answering(self.commit))
        server.unary(FORGET, answering(self.forget))

    async def claim(self, request: OwnRequest) -> SessionState:
        """Take a session over."""
        self._may(request.run)
        asked = (request.run, request.session, request.owner, request.over)
        return await asyncio.to_thread(self._records.claim, *asked)

    async def session_state(self, request: SessionRequest) -> SessionState:
        """How a session stands."""
        self._may(request.run)
        return await asyncio.to_thread(self._records.session_state, request.run, request.session)

    async def read(self, request: RecordRequest) -> bytes:
        """A record as it is stored: encoded again it might be another one than its name says."""
        self._may(request.run)
        asked = (request.run, request.session, request.name)
        data = await asyncio.to_thread(self._records.stored, *asked)
        metrics.SENT_BYTES.inc(len(data))
        return data

    async def block(self, request: RecordBlockRequest) -> bytes:
        """A block of the run's records."""
        self._may(request.run)
        data = await asyncio.to_thread(self._records.block, request.run, request.block)
        metrics.SENT_BYTES.inc(len(data))
        return data

    async def put(self, request: RecordPutRequest) -> bytes:
        """Stage a block."""
        self._may(request.run)
        asked = (request.run, request.session, request.fence, request.data)
        name = await asyncio.to_thread(self._records.put, *asked)
        metrics.RECEIVED_BYTES.inc(len(request.data))
        return name

    async def commit(self, request: RecordCommitRequest) -> SessionState:
        """Publish a record."""
        self._may(request.run)
        asked = (request.run, request.session, request.fence, request.record)
        return await asyncio.to_thread(self._records.commit, *asked)

    async def forget(self, request: ForgetRequest) -> SessionState:
        """A session is over."""
        self._may(request.run)
        asked = (request.run, request.session, request.fence)
        return await asyncio.to_thread(self._records.forget, *asked)

    def _may(self, run: str) -> None:
        self._access.check(peer(), "record", run)
