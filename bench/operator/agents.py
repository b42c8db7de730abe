"""A process full of node agents: real gRPC, a connection each, engines that start at once.

Each agent syncs at the period it is told, follows notices, and reports every slot it holds a grant
for as running. It writes one line of JSON per event to standard output; times are CLOCK_MONOTONIC
seconds, which all processes of a machine share. Standard input tells which serving pods were
replaced, one line of JSON each; the process ends when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import msgspec

from bench.operator.fleet import NAMESPACE, Fleet
from rose_core.identity import GpuUuid, PodUid, SlotKey
from rose_core.wire.sync import (
    Grant,
    NoticeRequest,
    ReplicaReport,
    SignalSource,
    SlotReport,
    SlotState,
    SyncReply,
    SyncRequest,
)
from rose_wire.errors import WireError
from rose_wire.rpc import call, receive
from rose_wire.services import NOTICES, SYNC

TOKEN = "bench"  # noqa: S105  # between our own children
_LEAST_SECONDS = 0.25
_STREAM_OPTIONS = (
    # Agents are processes of their own in life: none shares its connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class Event(msgspec.Struct, frozen=True):
    """What an agent tells the benchmark.

    Attributes:
        what: ``granted``, ``ended`` (taken back), ``lapsed`` (deadline passed), ``term``.
        left_seconds: of a renewal that came late, how much time the grant had left.
    """

    at: float
    what: str
    node: str
    slot: str = ""
    lease: str = ""
    term: int = 0


class Replaced(msgspec.Struct, frozen=True):
    """What the benchmark tells an agent: a serving pod has a successor."""

    old: str
    new: str
    uid: str


@dataclass
class Agent:
    """One node."""

    node: str
    replicas: list[tuple[str, str, int]]
    addresses: list[str]
    emit: Callable[[Event], None]
    seed: int
    uids: dict[str, str] = field(default_factory=dict)
    held: dict[str, tuple[Grant, float]] = field(default_factory=dict)
    term: int = 0
    soon: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._generation = dict.fromkeys((pod for _, pod, _ in self.replicas), 0)

    def restart_a_pod(self) -> None:
        """A serving pod is replaced: same name, another uid."""
        pod = self._random.choice(self.replicas)[1]
        self._generation[pod] += 1
        self.soon.set()

    def replace(self, replaced: Replaced) -> None:
        """A serving pod has another in its place, on the same GPUs."""
        self.replicas = [
            (pool, replaced.new if pod == replaced.old else pod, gpus)
            for pool, pod, gpus in self.replicas
        ]
        self.uids[replaced.new] = replaced.uid
        self.soon.set()

    async def run(self) -> None:
        """Sync for ever; another address when one does not answer as a leader does."""
        await asyncio.sleep(self._random.random() * 5)
        number = 0
        while True:
            address = self.addresses[number % len(self.addresses)]
            options = _STREAM_OPTIONS
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                listening = asyncio.create_task(self._listen(channel))
                try:
                    await self._talk(channel)
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
            number += 1
            await asyncio.sleep(0.5)

    async def _listen(self, channel: grpc.aio.Channel) -> None:
        with contextlib.suppress(WireError):
            async for _ in receive(channel, NOTICES, NoticeRequest(self.node), token=TOKEN):
                self.soon.set()

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        """Until the other side is away or does not lead."""
        while True:
            self.soon.clear()
            sent = time.monotonic()
            try:
                reply = await call(channel, SYNC, self.request(), timeout=5, token=TOKEN)
            except WireError:
                return
            if not reply.complete:
                return
            self._take(reply, sent)
            await asyncio.sleep(_LEAST_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(reply.sync_period_seconds - _LEAST_SECONDS):
                    await self.soon.wait()

    def request(self) -> SyncRequest:
        """What it says now: figures that move, and every slot it holds a grant for."""
        return SyncRequest(
            node=self.node,
            agent_version="bench",
            highest_term=self.term,
            replicas=tuple(self._report(*one) for one in enumerate(self.replicas)),
            slots=tuple(
                SlotReport(
                    SlotKey(grant.key.slot.uid, grant.key.slot.generation),
                    SlotState.RUNNING,
                    gate_open=True,
                    endpoint="http://10.0.0.1:30800/slots/x",
                    version=f"{grant.weights.run}@1.0",
                    digest="d",
                )
                for grant, _ in self.held.values()
            ),
        )

    def _report(self, place: int, replica: tuple[str, str, int]) -> ReplicaReport:
        pool, pod, gpus = replica
        return ReplicaReport(
            pool=pool,
            pod_namespace=NAMESPACE,
            pod_name=pod,
            pod_uid=PodUid(self.uids.get(pod) or f"{pod}-{self._generation[pod]}"),
            gpu_uuids=tuple(GpuUuid(f"GPU-{self.node}-{place}-{number}") for number in range(gpus)),
            ready=True,
            signal=SignalSource.WIRE_TAP,
            verified=True,
            running_requests=self._random.randrange(8),
            kv_used_permille=self._random.randrange(100, 700),
            busy_permille=self._random.randrange(100, 700),
        )

    def _take(self, reply: SyncReply, sent: float) -> None:
        now = time.monotonic()
        if reply.term != self.term:
            self.term = reply.term
            self.emit(Event(now, "term", self.node, term=reply.term))
        grants = {grant.slot_name: grant for grant in reply.grants}
        for name, (grant, deadline) in self.held.items():
            if deadline < now:
                self.emit(Event(deadline, "lapsed", self.node, name, grant.lease))
            if name not in grants:
                self.emit(Event(now, "ended", self.node, name, grant.lease))
                self.soon.set()
        for name, grant in grants.items():
            if name not in self.held:
                self.emit(Event(now, "granted", self.node, name, grant.lease, reply.term))
                self.soon.set()
        self.held = {name: (grant, sent + grant.ttl_seconds) for name, grant in grants.items()}


def emit(event: Event) -> None:
    """One line."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


async def _main(fleet: Fleet, addresses: list[str], uids: dict[str, str]) -> None:
    agents = [
        Agent(node, replicas, addresses, emit, seed, {pod: uids[pod] for _, pod, _ in replicas})
        for seed, (node, replicas) in enumerate(fleet.nodes_by_name().items())
    ]
    hosts = {pod: agent for agent in agents for _, pod, _ in agent.replicas}
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        replaced = msgspec.json.decode(line, type=Replaced)
        hosts[replaced.new] = hosts.pop(replaced.old)
        hosts[replaced.new].replace(replaced)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(
        _main(
            msgspec.json.decode(sys.argv[1], type=Fleet),
            sys.argv[2].split(","),
            msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=dict[str, str]),
        )
    )
