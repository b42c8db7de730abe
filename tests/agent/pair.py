"""Two nodes of one replica, each in a network namespace of its own, with a bad wire between them.

The leader's node has serving, tap and guard; the follower's has an engine host, an engine and a
guard. All are processes. Clocks: all of them read this machine's one CLOCK_MONOTONIC, so a permit's
end can be compared with when the test did something, though no guard ever does that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from safetensors.numpy import save_file

from rose_core.identity import GpuUuid, GrantKey, PodUid
from rose_core.wire.sync import (
    EngineSpec,
    FollowerPod,
    Grant,
    PoolPolicy,
    ReplicaGroup,
    SyncReply,
    SyncRequest,
    WeightSource,
)
from rose_dev.cluster.pki import Authority
from rose_engines.node.permit import BadPermit, Permit
from rose_wire import tls
from tests.agent.node import POOL, SLOT, FakeOperator, Node
from tests.host.helpers import FAKE
from tests.tap.net import namespace
from tests.tap.wire import BadWire, bad_wire

LEADER, FOLLOWER = PodUid("serving-0"), PodUid("serving-1")
GUARD_PORT = 7448
MS = 1_000_000


class GroupOperator(FakeOperator):
    """Tells both nodes of the group, and grants a slot beside the follower."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[str, SyncRequest] = {}
        self.follows = True

    async def start(self, address: str = "") -> None:
        await self._server.start(address)
        self.address = address

    async def _sync(self, request: SyncRequest) -> SyncReply:
        self.latest[request.node] = request
        self.requests.append(request)
        policy = PoolPolicy(pool=POOL, mode=self.mode, labels={"app": "chat"}, port=1)
        grants = (self._beside_follower(),) if request.node == "follower" else ()
        answer = self.latest.get("leader")
        followers = (FollowerPod(FOLLOWER, "follower"),) if self.follows else ()
        ready = answer is not None and answer.guard
        groups = (
            (ReplicaGroup(LEADER, "leader", answer.guard, followers),) if ready and answer else ()
        )
        return SyncReply(self.term, True, grants, (policy,), sync_period_seconds=0.3, groups=groups)

    def _beside_follower(self) -> Grant:
        return Grant(
            key=GrantKey(self.term, SLOT),
            ttl_seconds=60.0,
            slot_name="slot-one",
            lease="team/run",
            pool=POOL,
            pod_uid=FOLLOWER,
            pod_name=FOLLOWER,
            gpu_uuids=(GpuUuid("GPU-0"),),
            engine=EngineSpec("fake", "small", arguments=FAKE | self.arguments),
            weights=WeightSource("127.0.0.1:1", "run"),
            router="",
        )


class PermitWatch(threading.Thread):
    """Reads a permit all the time: until when an engine may compute, and when that was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.entries: list[tuple[int, int]] = []
        self._permit = Permit.attach(path, writable=False)
        self._ending = False

    def run(self) -> None:
        last = -1
        while not self._ending:
            until = self._permit.until_ns
            if until != last:
                last = until
                self.entries.append((time.monotonic_ns(), until))
            time.sleep(0.001)

    def latest_ns(self, since_ns: int = 0) -> int:
        """The furthest that it has reached, of what was read since then."""
        return max((until for seen, until in self.entries if seen >= since_ns), default=0)

    def close(self) -> None:
        self._ending = True
        self.join(10)


@dataclass
class Pair:
    """Both nodes."""

    leader: Node
    follower: Node
    wire: BadWire
    operator: GroupOperator
    watch: PermitWatch

    async def opens(self, what: str) -> None:
        """Wait until the follower's gate is open, and its engine computes."""
        since = time.monotonic_ns()
        await self.follower.until(lambda: self.watch.latest_ns(since) > since, what)

    async def serve(self, tokens: int) -> tuple[int, int]:
        """One request to the leader's engine; from when until when it was under way."""
        client = (
            "import asyncio, sys, tests.agent.pair as p;"
            "asyncio.run(p.post(sys.argv[1], int(sys.argv[2])))"
        )
        began = time.monotonic_ns()
        one = await self.leader.spawn(
            "client", "-c", client, f"{self.leader.serving_url}/generate", str(tokens)
        )
        assert await one.wait() == 0
        return began, time.monotonic_ns()


async def post(url: str, tokens: int) -> None:
    """Read one streamed answer to its end, and print when the request was sent."""
    body = {"input_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_new_tokens": tokens}}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        sys.stdout.write(f"sent {time.monotonic_ns()}\n")
        async with http.post(url, json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.content:
                pass
        sys.stdout.write(f"ended {time.monotonic_ns()}\n")


def identity(authority: Authority, root: Path, node: str) -> Path:
    """A node's certificate, as its guard gets it from the operator."""
    authority.issue(node, f"system:node:{node}", hosts=(node,))
    folder = root / f"{node}-identity"
    folder.mkdir()
    for ending in ("crt", "key"):
        (folder / f"tls.{ending}").write_bytes((authority.folder / f"{node}.{ending}").read_bytes())
    (folder / tls.BUNDLE).write_bytes(authority.certificate.read_bytes())
    return folder


@contextlib.asynccontextmanager
async def pair(root: Path, *, seed: int = 1) -> AsyncIterator[Pair]:
    """Start both nodes; the follower's slot is lent and its engine computes."""
    operator = GroupOperator()
    authority = Authority(root / "pki")
    with namespace() as near, namespace() as far, bad_wire(near, far, seed) as wire:
        nodes = []
        async with contextlib.AsyncExitStack() as stack:
            await operator.start(f"unix:{root}/operator.sock")
            stack.push_async_callback(operator.stop)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            for number, (name, inside) in enumerate((("leader", near), ("follower", far)), 1):
                folder = root / name
                (folder / "models" / "small").mkdir(parents=True)
                save_file(
                    {"w": np.zeros((8, 8), np.float32)},
                    folder / "models" / "small" / "model.safetensors",
                )
                one = Node(
                    folder,
                    operator,
                    http,
                    agent_flags=(f"--guard-address=10.78.0.{number}:{GUARD_PORT}",),
                    name=name,
                    inside=("nsenter", f"--net={inside.path}"),
                    identity=identity(authority, root, name),
                )
                stack.push_async_callback(one.stop)
                nodes.append(one)
            leader, follower = nodes
            await leader.start_serving()
            place = {"group": "llama/0", "size": 2}
            leader.write_replicas(uid=LEADER, index=0, **place)
            await follower.spawn("serving", "-c", "import time; time.sleep(3600)")
            follower.serving_url = "http://127.0.0.1:30000"
            follower.write_replicas(uid=FOLLOWER, index=1, **place)
            await leader.start_tap()
            for one in nodes:
                await one.start_host()
                await one.start_agent()
            path = follower.rundir.slot(SLOT.uid).permit
            await follower.until(lambda: _is_permit(path), "the follower has a permit")
            watch = PermitWatch(path)
            watch.start()
            stack.callback(watch.close)
            found = Pair(leader, follower, wire, operator, watch)
            await found.opens("the follower's gate opens under the leader's lease")
            await follower.until(
                lambda: (file := follower.engine()) is not None and bool(file.url), "engine listens"
            )
            file = follower.engine()
            assert file is not None
            feed = "import asyncio, sys, tests.agent.pair as p; asyncio.run(p.feed(sys.argv[1]))"
            await follower.spawn("feeder", "-c", feed, f"{file.url}/generate")
            yield found


async def feed(url: str) -> None:
    """Turns for the rollout engine, so that it computes whenever it may."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await post(url, 100_000)


def _is_permit(path: Path) -> bool:
    try:
        Permit.attach(path, writable=False)
    except (BadPermit, OSError):
        return False
    return True
