"""A node agent that speaks real gRPC and realises every grant at once."""

import asyncio
import threading
import time
from dataclasses import dataclass, field

from rose_core.identity import SlotKey
from rose_core.wire.sync import (
    Grant,
    ReplicaReport,
    SignalSource,
    SlotReport,
    SlotState,
    SyncReply,
    SyncRequest,
)
from rose_wire.errors import WireError
from rose_wire.rpc import call, connect
from rose_wire.services import SYNC


def replica(pool: str, name: str, *, kv: int = 100, **changes: object) -> ReplicaReport:
    values: dict[str, object] = {
        "pool": pool,
        "pod_namespace": pool.split("/", maxsplit=1)[0],
        "pod_name": name,
        "pod_uid": f"uid-{name}",
        "gpu_uuids": (f"GPU-{name}",),
        "ready": True,
        "signal": SignalSource.WIRE_TAP,
        "verified": True,
        "running_requests": 0,
        "kv_used_permille": kv,
    }
    return ReplicaReport(**values | changes)  # type: ignore[arg-type]


@dataclass
class StubAgent:
    """Runs in a thread of its own, so that a test may block."""

    port: int
    node: str
    replicas: tuple[ReplicaReport, ...]
    version: str = "grpo@1.0"
    token: str = "secret"
    pause: float = 0.3
    guard: str = ""
    grants: dict[str, Grant] = field(default_factory=dict)
    replies: list[tuple[float, SyncReply]] = field(default_factory=list)
    highest_term: int = 0

    def __enter__(self) -> "StubAgent":
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.run(self._stop)), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def request(self) -> SyncRequest:
        return SyncRequest(
            node=self.node,
            agent_version="test",
            highest_term=self.highest_term,
            replicas=self.replicas,
            slots=tuple(self._report(grant) for grant in self.grants.values()),
            guard=self.guard,
        )

    def _report(self, grant: Grant) -> SlotReport:
        return SlotReport(
            slot=SlotKey(grant.key.slot.uid, grant.key.slot.generation),
            state=SlotState.RUNNING,
            gate_open=True,
            endpoint="http://10.0.0.1:30800/slots/x",
            version=self.version,
            digest="d",
            lent_milliseconds=1000,
            harvested_tokens=500,
        )

    async def run(self, stop: threading.Event) -> None:
        """Speak to the operator until ``stop`` is set."""
        channel = connect(f"127.0.0.1:{self.port}")
        try:
            while not stop.is_set():
                try:
                    reply = await call(channel, SYNC, self.request(), timeout=5, token=self.token)
                except WireError:
                    await asyncio.sleep(0.2)
                    continue
                self._take(reply)
                await asyncio.sleep(self.pause)
        finally:
            await channel.close()

    def _take(self, reply: SyncReply) -> None:
        self.replies.append((time.monotonic(), reply))
        self.highest_term = max(self.highest_term, reply.term)
        if reply.complete:
            self.grants = {grant.slot_name: grant for grant in reply.grants}
