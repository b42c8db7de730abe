"""Versions from files: Hugging Face checkpoints and delta directories, in the order given.

``rose weights import`` turns them into a run at a store or into one bundle; ``rose weights export``
writes a bundle as a delta directory. Checkpoints are mapped, not loaded; what delta directories
change is held in memory, up to one copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rose_core.delta import Builder, Manifest, TensorEntry, TensorSpec, name_of, table
from rose_core.delta.bits import Bits, number_format
from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle
from rose_weights.checkpoint import Checkpoint
from rose_weights.errors import BadManifest, Damaged
from rose_weights.messages import VersionInfo
from rose_weights.send.deltadirs import INDEX, Bytes, DeltaDir, DeltaDirWriter, Encoding
from rose_weights.send.publishing import WeightsWriter

State = Mapping[str, Bits]


class Chain:
    """States of one model, one after the other.

    Args:
        paths: a checkpoint first, then checkpoints or delta directories.

    Raises:
        Damaged: the first is no checkpoint.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        first = Checkpoint(paths[0])
        self.specs = [TensorSpec(n, first.dtype(n), first.shape(n)) for n in first.names()]
        self.tensors: tuple[TensorEntry, ...] = table(self.specs)
        self._first = first

    def states(self) -> Iterator[State]:
        """Bits of every tensor, path by path.

        Raises:
            Damaged: a path cannot be read or is another model.
        """
        state: dict[str, Bits] = {name: self._first.bits(name) for name in self._first.names()}
        yield state
        for path in self._paths[1:]:
            state = dict(self._delta(path, state) if is_delta(path) else self._whole(path))
            yield state

    def _whole(self, path: Path) -> State:
        found = Checkpoint(path)
        specs = [TensorSpec(n, found.dtype(n), found.shape(n)) for n in found.names()]
        different = [old.name for old in self.specs if old not in specs]
        different += [new.name for new in specs if new not in self.specs]
        if different:
            message = f"{path} is another model than {self._paths[0]}: {different[0]} differs"
            raise Damaged(message)
        return {name: found.bits(name) for name in found.names()}

    def _delta(self, path: Path, before: State) -> State:
        kinds = {spec.name: number_format(spec.dtype).unsigned for spec in self.specs}

        def old(name: str) -> Bytes:
            if name not in before:
                message = f"{path} changes {name}, which {self._paths[0]} does not have"
                raise Damaged(message)
            return before[name].view(np.uint8)

        after = dict(before)
        for name, new in DeltaDir.open(path).apply(old):
            after[name] = new.view(kinds[name])
        return after


def is_delta(path: Path) -> bool:
    """Whether a folder is a delta directory rather than a checkpoint with an index."""
    return path.name.startswith("weight_v") and (path / INDEX).is_file()


async def publish(
    paths: Sequence[Path], address: str, run: str, *, token: str = "", name: str = "import"
) -> list[VersionInfo]:
    """Publish every path as a version of a run; the first in full.

    Raises:
        WeightsError: a path cannot be read, or the store refuses it.
        Unavailable: the store does not answer.
    """
    chain = Chain(paths)
    done: list[VersionInfo] = []
    async with WeightsWriter(address, token=token) as writer:
        opened = await writer.open(run, name)
        head = opened.head.version if opened.head else None
        base: Manifest | None = None
        before: State = {}
        for number, state in enumerate(chain.states()):
            target = WeightVersion(run, opened.fence, number)
            manifest, blocks = build(chain.tensors, base, before, state, target)
            done.append(await writer.publish(manifest, blocks, head))
            head, base, before = manifest.target, manifest, state
    return done


def bundle(paths: Sequence[Path], folder: Path, run: str) -> Manifest:
    """Write the difference of the first and the last path as a bundle.

    Raises:
        WeightsError: a path cannot be read.
        OSError: the folder's disk is full or broken.
    """
    chain = Chain(paths)
    states = iter(chain.states())
    first = last = next(states)
    for last in states:  # noqa: B007  # the last one counts
        pass
    base, _ = build(chain.tensors, None, {}, first, WeightVersion(run, 0, 0), bare=True)
    target = WeightVersion(run, 0, len(paths) - 1)
    manifest, blocks = build(chain.tensors, base, first, last, target)
    made = Bundle(folder)
    for block, data in blocks.items():
        made.put(block, data)
    made.finish(manifest)
    return manifest


def export(
    source: Path, base: Path, root: Path, number: int, *, encoding: Encoding, checksum: str
) -> Path:
    """Write a bundle as a delta directory under ``root``.

    Raises:
        BadManifest: the bundle does not start from the checkpoint.
        Damaged: a block or tensor is missing or damaged.
        OSError: the disk is full or broken.
    """
    found = Bundle(source)
    manifest = found.manifest()
    checkpoint = Checkpoint(base)
    names = set(checkpoint.names())
    writer = DeltaDirWriter(root, number, encoding=encoding, checksum=checksum)
    for tensor, blocks in manifest.blocks_by_tensor():
        if tensor.name not in names or checkpoint.dtype(tensor.name) != tensor.dtype:
            message = f"{base} has no tensor {tensor.name} of {tensor.dtype}"
            raise BadManifest(message)
        old = checkpoint.bits(tensor.name)
        new = old.copy()
        for block in blocks:
            before = tensor.tiling.cut(old, block.tile)
            changes = manifest.read(block, found.read(block), before)
            where = manifest.positions(block, changes)
            new[where] = changes.resolve(old[where], tensor.kind)
        writer.add(tensor.name, old.view(np.uint8), new.view(np.uint8))
    return writer.finish()


def build(
    tensors: tuple[TensorEntry, ...],
    base: Manifest | None,
    before: State,
    after: State,
    target: WeightVersion,
    *,
    bare: bool = False,
) -> tuple[Manifest, dict[bytes, bytes]]:
    """A manifest and its blocks."""
    blocks: dict[bytes, bytes] = {}
    builder = Builder(tensors, base, lambda data: blocks.update({name_of(data): data}))
    for tensor in tensors:
        old = None if base is None else before[tensor.name]
        builder.add(old, after[tensor.name], blocks=not bare)
    return builder.finish(target, step=target.sequence), blocks
