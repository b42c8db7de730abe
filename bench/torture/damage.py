"""Scripts about damage: bits that flip and files that are torn, from the store to the engine."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.torture.process import Violation, until
from bench.torture.rig import RUN, TortureRig
from rose_agent.weightsync import records
from rose_weights.bundle import BLOCKS
from rose_weights.receive.client import WeightsClient
from rose_weights.send import synthetic

_ROTTEN = "model.layers.0.self_attn.q_proj.weight"
_PATTERN_BYTES = 256
_PIECE_BYTES = 1 << 24


def blocks(world: TortureRig, root: str, change: Callable[[Path], None]) -> str:
    """Harm the newest version's blocks somewhere while nobody fetches them."""
    before = world.weights.version
    world["weight-sync"].kill()
    world.publish()
    world.durable()
    if root == "relay":
        _through(world)
    files = list(world.blocks(root))
    if not files:
        raise Violation(f"the {root} holds no block of the head")
    kept = {path: path.read_bytes() for path in files}
    for path in files:
        change(path)
    world.restart("relay")  # what it has checked once it would not read again
    world.restart("weight-sync")
    if root == "store":
        until(lambda: "block" in world.weights.error, "weight-sync says what is wrong")
        served = world.look()
        if served != before:
            raise Violation(f"{served} is served instead of {before}")
        for path, data in kept.items():  # what a publisher's next start or a backup brings back
            path.write_bytes(data)
        world.restart("store")
        return f"served {served}"
    return "fetched again"


def _through(world: TortureRig) -> None:
    async def pull() -> None:
        async with WeightsClient(world.relay_address) as client:
            versions = (await client.describe(RUN)).versions
            before = versions[-2]
            folder = world.folder / "other"
            await client.pull(RUN, folder, have=before.version, digest=before.digest)
            shutil.rmtree(folder)

    asyncio.run(pull())


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def torn_bundle(world: TortureRig) -> str:
    """Halves of blocks and half a manifest lie where the next bundle is brought."""
    world["weight-sync"].kill()
    folder = world.slot.bundles / "next"
    (folder / "blocks").mkdir(parents=True, exist_ok=True)
    world.publish()
    world.durable()
    for path in world.blocks("store"):  # every other block is there in half, the rest is missing
        (folder / "blocks" / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "manifest.msgpack").write_bytes(b"torn")
    world.restart("weight-sync")
    return "torn bundle was made whole"


def manifest(world: TortureRig) -> str:
    """The head's manifest is damaged at the store; the publisher still has it."""
    before = world.weights.version
    world["weight-sync"].kill()
    world.publish()
    world.durable()
    flip(world.head_manifest())
    world.restart("weight-sync")
    until(lambda: "manifest" in world.weights.error, "weight-sync says what is wrong")
    served = world.look()
    if served != before:
        raise Violation(f"{served} is served instead of {before}")
    world.publish()
    return f"served {served}, kept again by the publisher"


def state(world: TortureRig) -> str:
    """The run's list of versions is damaged at the store: nothing is believed of it."""
    path = world.run_folder() / "state.json"
    kept = path.read_bytes()
    before = world.weights.version
    flip(path)
    world.restart("weight-sync")
    until(lambda: "damaged" in world.weights.error, "weight-sync says what is wrong")
    served = world.look()
    path.write_bytes(kept)  # what a backup brings back
    if served != before:
        raise Violation(f"{served} is served instead of {before}")
    world.publish()
    return f"served {served} until it was restored"


def flipped_bundle(world: TortureRig) -> str:
    """A bundle is whole, and then its blocks are damaged before the engine reads them."""
    known = _failures(world, "Corrupt")
    world.restart("weight-sync", "sync.bundle#1=stop")
    world.publish()
    until(lambda: world["weight-sync"].stopped, "a bundle is complete")
    for path in (world.slot.bundles / "next" / BLOCKS).iterdir():
        flip(path)
    world["weight-sync"].send(signal.SIGCONT)
    until(lambda: _failures(world, "Corrupt") > known, "the engine refuses the bundle")
    world.restart("weight-sync")
    return "refused, then fetched again"


def rotten(world: TortureRig) -> str:
    """A bit of a live weight flips in the engine's memory while it serves."""
    known = _failures(world, "WrongDigest")
    bits = synthetic.state_at(world.step)[_ROTTEN].tobytes()
    start = len(bits) // 2
    if not _rot(world["engine"].pid, bits[start : start + _PATTERN_BYTES]):
        raise Violation("the weights were not found in the engine's memory")
    until(lambda: _failures(world, "WrongDigest") > known, "the next attestation finds it")
    return "quarantined, then filled again"


def _failures(world: TortureRig, reason: str) -> int:
    """How often a reason stands in the records of commits, which name what failed before them."""
    found = records.read(world.slot.folder / records.FILE)
    return sum(record.failures.count(reason) for record in found)


def _rot(pid: int, pattern: bytes) -> int:
    """Flip a bit in every writable place of a process's memory where a pattern stands."""
    places = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in list(_writable(pid)):
            for at in range(start, end, _PIECE_BYTES):
                # A pattern over the end of a piece is found in the next one's overlap.
                memory.seek(at)
                try:
                    data = memory.read(min(_PIECE_BYTES + len(pattern), end - at))
                except OSError:
                    break  # a mapping that cannot be read, such as a device's
                found = data.find(pattern)
                if 0 <= found < _PIECE_BYTES:
                    memory.seek(at + found)
                    memory.write(bytes([data[found] ^ 1]))
                    places += 1
    return places


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match and "[vvar" not in line:
            yield int(match[1], 16), int(match[2], 16)
