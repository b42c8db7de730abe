"""Publish to live over links of limited rate: one receiver, eight behind a relay, eight in a star.

Store, relay and every receiver run in a network namespace of their own, joined by a bridge; ``tc``
limits what each sends and receives. The store's and the receivers' links are slow, the relay's is
``RELAY_TIMES`` as fast: it stands among its receivers. So slow that links and not this machine's
cores set the pace. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.weights.generator import COLUMNS, ROWS, reference
from bench.weights.plane import RECEIVERS, Served, served
from rose_core.delta import Builder, Manifest, TensorSpec, name_of, table
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_engines.tensors.canonical import host_tensors
from rose_engines.weights.live import commit, digest_live
from rose_engines.weights.staging import stage
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter

LINK_MEGABITS = 1
RELAY_TIMES = 10
TENSOR = "w.gate_proj.weight"
SECONDS = 120.0


@dataclass(frozen=True)
class Limited:
    """What it took over limited links.

    Attributes:
        one: seconds from the start of a publish until one receiver behind the relay is live.
        all_: the same until the last of eight is.
        star: the same for eight that fetch from the store.
        copies: bytes that left the store for the relay's eight, of one receiver's.
        star_copies: bytes that left the store for the star's, of one receiver's.
    """

    one: float
    all_: float
    star: float
    copies: float
    star_copies: float


def available() -> bool:
    """Whether this machine lets us make namespaces and limit links."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def limited(folder: Path) -> Limited:
    """Set the network up, measure inside it, take it down."""
    states = np.stack(list(reference(1e-6, 3)))
    np.save(folder / "states.npy", states)
    with network(f"rose{os.getpid()}") as names:
        command = [sys.executable, "-m", "bench.weights.links", str(folder), *names]
        found = subprocess.run(
            ["ip", "netns", "exec", names[0], *command], check=True, capture_output=True, text=True
        )
    return Limited(**json.loads(found.stdout.splitlines()[-1]))


@contextlib.contextmanager
def network(prefix: str) -> Iterator[list[str]]:
    """Namespaces of store, relay and receivers around a bridge; gone afterwards."""
    hub = f"{prefix}-hub"
    names = [f"{prefix}-{number}" for number in range(2 + RECEIVERS)]
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _join(hub, name, number, LINK_MEGABITS * (RELAY_TIMES if number == 1 else 1))
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _join(hub: str, name: str, number: int, megabits: int) -> None:
    _ip("netns", "add", name)
    outer = f"port{number}"
    _ip("-n", hub, "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", hub, "link", "set", outer, "master", "bridge", "up")
    _ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip("-n", name, "link", "set", link, "up")
    for space, link in ((hub, outer), (name, "eth0")):
        limit = ("tbf", "rate", f"{megabits}mbit", "burst", "32kb", "latency", "400ms")
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", link, "root", *limit], check=True)


def address(number: int) -> str:
    """Of a namespace: 0 is the store, 1 the relay, then receivers."""
    return f"10.77.0.{number + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


async def measure(folder: Path, names: Sequence[str]) -> Limited:
    """All three, one after the other; runs in the store's namespace."""
    states = np.load(folder / "states.npy")
    with served("serve", "--root", str(folder / "store"), host=address(0)) as store:
        upstream = ("--upstream", store.address)
        with served(
            "relay", "--root", str(folder / "relay"), *upstream, inside=names[1], host=address(1)
        ) as relay:
            one, _ = await _round(folder, names[2:3], store, relay.address, states[0:2], "one")
            all_, copies = await _round(folder, names[2:], store, relay.address, states[1:3], "all")
        star, star_copies = await _round(
            folder, names[2:], store, store.address, states[2:4], "star"
        )
    return Limited(one, all_, star, copies, star_copies)


async def _round(  # noqa: PLR0917
    folder: Path,
    names: Sequence[str],
    store: Served,
    source: str,
    states: np.ndarray,
    run: str,
) -> tuple[float, float]:
    """Seconds until the last receiver is live, and copies of the delta that left the store."""
    np.save(folder / f"{run}.npy", states[0])
    blocks: dict[bytes, bytes] = {}
    tensors = table([TensorSpec(TENSOR, "BF16", (ROWS, COLUMNS))])

    def version(number: int, base: Manifest | None) -> Manifest:
        builder = Builder(tensors, base, lambda data: blocks.update({name_of(data): data}))
        old = states[number - 1] if base is not None else None
        builder.add(old, states[number], blocks=base is not None)
        return builder.finish(WeightVersion(run, 1, number))

    async with WeightsWriter(store.address) as writer:
        await writer.open(run, "bench")
        first = version(0, None)
        await writer.publish(first, blocks, None)
        delta = version(1, first)
        with contextlib.ExitStack() as stack:
            receivers = [stack.enter_context(_receiver(folder, run, source, n)) for n in names]
            for one in receivers:
                _line(one, "ready")
            sent, began = store.metric("rose_weights_sent_bytes_total"), time.monotonic()
            await writer.publish(delta, blocks, first.target)
            live = max([float(_line(one, "live")) for one in receivers])
            sent = store.metric("rose_weights_sent_bytes_total") - sent
    return live - began, sent / delta.block_bytes


def _line(process: subprocess.Popen[str], state: str) -> str:
    for line in process.stdout or ():
        if line.startswith(state):
            return line.removeprefix(state).strip()
    message = f"a receiver ended before it was {state}"
    raise RuntimeError(message)


@contextlib.contextmanager
def _receiver(folder: Path, run: str, source: str, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.weights.links", str(folder), run, source]
    process = subprocess.Popen(
        ["ip", "netns", "exec", name, *command, name], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def receive(folder: Path, run: str, source: str, name: str) -> None:
    """Follow a run from its first version to the next, as an engine on the host does."""
    bits = np.load(folder / f"{run}.npy")
    live = host_tensors({TENSOR: StoredTensor("BF16", (ROWS, COLUMNS), bits)})
    digest = digest_live(live)
    pulled = folder / f"{run}-{name}"
    async with WeightsClient(source, holder=name) as client:
        async for head in client.watch(run):
            if head.version.sequence == 0:
                print("ready", flush=True)
                continue
            have = WeightVersion(run, 1, 0)
            await client.pull(run, pulled, have=have, digest=str(digest))
            commit(stage(pulled, live, digest), live)
            print("live", time.monotonic(), flush=True)
            return


def main(folder: str, *rest: str) -> None:
    """Inside a namespace: measure in the store's, or receive in a receiver's."""
    if len(rest) == 3:
        asyncio.run(asyncio.wait_for(receive(Path(folder), *rest), SECONDS))
    else:
        print(json.dumps(asdict(asyncio.run(measure(Path(folder), rest)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
