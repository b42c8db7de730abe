"""Store, relay and receivers as processes: what a stream carries, what crosses, what it takes.

A store and a relay run as ``rose weights serve`` and ``relay``; receivers are ``WeightsClient`` in
this process, so on a machine of two cores the two sides share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.weights.generator import COLUMNS, ROWS, reference
from bench.weights.ours import KIND, wire_bytes
from rose_core.delta import Builder, Manifest, TensorSpec, name_of, table
from rose_core.delta.bits import Bits
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.cluster.pki import Authority
from rose_engines.tensors.canonical import host_tensors
from rose_engines.weights.live import commit, digest_live
from rose_engines.weights.staging import stage
from rose_weights.bundle import Bundle
from rose_weights.messages import FetchRequest
from rose_weights.methods import FETCH
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_wire import rpc, tls

RUN = "bench"
STREAM_BLOCKS, STREAM_BLOCK_BYTES = 256, 1 << 20
RECEIVERS = 8
VERSIONS = 4


@dataclass
class Served:
    """A process that serves weights.

    Attributes:
        pages: base URL of its metrics.
    """

    address: str
    pages: str
    process: subprocess.Popen[str]

    def metric(self, name: str) -> float:
        """A metric's value now."""
        with urllib.request.urlopen(f"{self.pages}/metrics", timeout=10) as reply:  # noqa: S310
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        return 0.0


@contextlib.contextmanager
def served(*arguments: str, inside: str = "", host: str = "127.0.0.1") -> Iterator[Served]:
    """A ``rose weights`` process on free ports; ended afterwards.

    Args:
        arguments: of the verb.
        inside: network namespace it runs in; empty = this one.
        host: address it listens on.
    """
    command = ["ip", "netns", "exec", inside] if inside else []
    command += [sys.executable, "-m", "rose_cli.main", "weights", *arguments]
    command += ["--address", f"{host}:0", "--http-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if "gRPC port" in line:
                fields = line.replace(",", "").split()
                port, http = (
                    fields[fields.index("port", at) + 1] for at in (0, fields.index("HTTP"))
                )
                yield Served(f"{host}:{port}", f"http://{host}:{http}", process)
                return
        message = "the store ended before it served"
        raise RuntimeError(message)
    finally:
        process.terminate()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def stream_rates(folder: Path) -> tuple[float, float]:
    """Bytes/s of one fetch stream into memory, plain and over TLS with certificates both ways."""
    authority = Authority(folder / "pki")
    authority.issue("both", "bench", hosts=["localhost", "127.0.0.1"])
    secret = folder / "secret"
    secret.mkdir()
    for name, source in ((tls.CERTIFICATE, "both.crt"), (tls.KEY, "both.key")):
        (secret / name).write_bytes((authority.folder / source).read_bytes())
    with served("serve", "--root", str(folder / "plain")) as store:
        plain = asyncio.run(_stream(store.address))
    trust = str(authority.folder / "ca.crt")
    arguments = ("--tls-dir", str(secret), "--tls-client-ca", trust)
    with served("serve", "--root", str(folder / "tls"), *arguments) as store:
        credentials = tls.client_credentials(Path(trust), secret)
        mutual = asyncio.run(_stream(store.address, credentials))
    return plain, mutual


async def _stream(address: str, credentials: object = None) -> float:
    random = np.random.default_rng(0)
    blocks = [random.bytes(STREAM_BLOCK_BYTES) for _ in range(STREAM_BLOCKS)]
    async with WeightsWriter(address, credentials=credentials) as writer:
        await writer.open(RUN, "bench")
        await writer._put(blocks, [name_of(block) for block in blocks])  # noqa: SLF001
    channel = rpc.connect(address, credentials=credentials)
    request = FetchRequest(tuple(name_of(block) for block in blocks))
    best = 0.0
    for _ in range(4):
        size, began = 0, time.perf_counter()
        async for piece in rpc.receive(channel, FETCH, request):
            size += len(piece)
        best = max(best, size / (time.perf_counter() - began))
    await channel.close()
    return best


@dataclass(frozen=True)
class Fleet:
    """Publish to live, behind a relay.

    Attributes:
        one, all_: seconds from the start of a publish until one, and until all receivers of a
            fleet, hold the version with its digest recomputed on the live weights.
        copies: bytes that crossed from the store, of one receiver's manifest-listed bytes.
        merged: wire bytes of the relay's merged catch-up, of the directly computed difference.
        commits: commits that the catch-up took.
    """

    one: float
    all_: float
    copies: float
    merged: float
    commits: int


def fleet(folder: Path) -> Fleet:
    """Publish versions to receivers behind a relay."""
    states = list(reference(1e-6, VERSIONS))
    with (
        served("serve", "--root", str(folder / "store")) as store,
        served("relay", "--root", str(folder / "relay"), "--upstream", store.address) as relay,
    ):
        return asyncio.run(_fleet(folder, states, store, relay))


class _Receiver:
    def __init__(self, address: str, folder: Path, bits: Bits) -> None:
        self.client = WeightsClient(address, holder=folder.name)
        self._folder = folder
        shape = (ROWS, COLUMNS)
        self._live = host_tensors({"w.gate_proj.weight": StoredTensor("BF16", shape, bits.copy())})
        self.digest = digest_live(self._live)
        self.commits = 0

    async def follow(self, have: WeightVersion) -> Manifest:
        manifest = await self.client.pull(RUN, self._folder, have=have, digest=str(self.digest))
        self.digest = await asyncio.to_thread(self._commit)
        self.commits += 1
        return manifest

    def _commit(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return commit(stage(self._folder, self._live, self.digest), self._live)


async def _fleet(folder: Path, states: list[Bits], store: Served, relay: Served) -> Fleet:
    tensors = table([TensorSpec("w.gate_proj.weight", "BF16", (ROWS, COLUMNS))])
    base: Manifest | None = None
    blocks: dict[bytes, bytes] = {}

    def delta(number: int, before: Manifest | None, old: int) -> Manifest:
        builder = Builder(tensors, before, lambda data: blocks.update({name_of(data): data}))
        builder.add(states[old] if before else None, states[number], blocks=before is not None)
        return builder.finish(WeightVersion(RUN, 1, number))

    async with WeightsWriter(store.address) as writer:
        await writer.open(RUN, "bench")
        first = base = delta(0, None, 0)
        await writer.publish(base, blocks, None)
        receivers = [
            _Receiver(relay.address, folder / f"r{number}", states[0])
            for number in range(RECEIVERS)
        ]
        times = []
        for number, count in ((1, 1), (2, 1), (3, RECEIVERS)):
            if count > 1:  # the others catch up first: each then takes one version, as the one did
                await asyncio.gather(*(one.follow(first.target) for one in receivers[1:]))
            crossed = relay.metric("rose_weights_received_bytes_total")
            manifest = delta(number, base, number - 1)
            began = time.perf_counter()
            await writer.publish(manifest, blocks, base.target)
            at = base.target
            await asyncio.gather(*(one.follow(at) for one in receivers[:count]))
            times.append(time.perf_counter() - began)
            base = manifest
        copies = (relay.metric("rose_weights_received_bytes_total") - crossed) / base.block_bytes
        late = _Receiver(relay.address, folder / "late", states[0])
        merged = await late.follow(first.target)
        if any(str(one.digest) != base.digest for one in (*receivers, late)):
            message = "a receiver's live weights are not the head's; no figure counts"
            raise SystemExit(message)
        direct = delta(3, first, 0)
        for one in (*receivers, late):
            await one.client.close()
    return Fleet(
        min(times[:2]), times[2], copies, wire_bytes(merged) / wire_bytes(direct), late.commits
    )


def sidecar_bytes(folder: Path) -> tuple[int, int]:
    """Peak memory of a process that pulls a delta as weight-sync does, and the delta's size."""
    state = next(reference(1e-6, 0))
    random = np.random.default_rng(5)
    tensors = table(
        [TensorSpec(f"l{n}.gate_proj.weight", "BF16", (ROWS, COLUMNS)) for n in range(4)]
    )
    blocks: dict[bytes, bytes] = {}
    builder = Builder(tensors, None, lambda data: blocks.update({name_of(data): data}))
    for _ in tensors:
        builder.add(None, random.permutation(state))
    manifest = builder.finish(WeightVersion(RUN, 1, 0))

    async def publish(address: str) -> None:
        async with WeightsWriter(address) as writer:
            await writer.open(RUN, "bench")
            await writer.publish(manifest, blocks, None)

    with served("serve", "--root", str(folder / "store")) as store:
        asyncio.run(publish(store.address))
        program = (
            f"import bench.weights.plane as p; print(p.pulling({store.address!r}, {str(folder)!r}))"
        )
        found = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
    return int(found.stdout), manifest.block_bytes


def pulling(address: str, folder: str) -> int:
    """Pull the head as a receiver does; peak memory of this process in bytes."""
    import rose_agent.weightsync.main  # noqa: F401, PLC0415  # what the sidecar has loaded

    async def pull() -> None:
        async with WeightsClient(address) as client:
            await client.pull(RUN, Path(folder) / "pulled")

    asyncio.run(pull())
    # Not getrusage: its maximum is inherited from whoever forked this process.
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes away again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


__all__ = ["KIND", "Bundle", "fleet", "scratch", "sidecar_bytes", "stream_rates"]
