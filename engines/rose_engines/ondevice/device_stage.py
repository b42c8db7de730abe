"""A delta decoded, checked and put in on the device that holds the weights.

What goes there are the streams of blocks, about two bytes per change, each while the device still
works on the one before (``ahead``). There they become positions and absolute new bits; the old ones
are gathered from the live weights as the undo log. Putting them in is one scatter per tensor, and
doing it twice does no harm. Beside the weights this takes a position of 8 bytes and two elements
per change, and ``WORKING_BYTES`` per change of the largest tile while it is decoded.

Engines stage on the host (``rose_engines.weights.live``): memory of a lent GPU belongs to another
else, see docs/decisions/0014-staged-on-the-host.md. ``bench.gpu`` measures what that costs their
pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from rose_core.delta.bits import Bits, NumberFormat
from rose_core.delta.digest import Digest, tensor_key
from rose_core.delta.errors import BlockError
from rose_core.delta.tiles import Tiling
from rose_engines.ondevice import device_digest, device_loops
from rose_engines.ondevice.device_loops import there

WORKING_BYTES = 96
"""Of temporary words, per change of the tile that is being decoded."""

_EVERY = (1 << 64) - 1


def ahead(
    parts: Iterable[tuple[torch.Tensor, torch.device]],
) -> Iterator[torch.Tensor]:
    """Host tensors on their devices; the next is copied while the caller works on this one.

    Copies run on a stream of their own and only overlap from pinned memory. What is on its device
    already is handed on as it is. At most two copies are held at once.
    """
    waiting: Callable[[], torch.Tensor] | None = None
    for part, device in parts:
        following = _start(part, device)
        if waiting is not None:
            yield waiting()
        waiting = following
    if waiting is not None:
        yield waiting()


def _start(part: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    if device.type != "cuda" or part.device == device:
        return lambda: part.to(device)
    stream = _side(device)
    with torch.cuda.stream(stream):
        copied = part.to(device, non_blocking=True)
        done = stream.record_event()

    def hand() -> torch.Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        copied.record_stream(current)  # its memory is not given away before we have read it
        return copied

    return hand


_sides: dict[torch.device, torch.cuda.Stream] = {}


def _side(device: torch.device) -> torch.cuda.Stream:
    if device not in _sides:
        _sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _sides[device]


@dataclass(frozen=True)
class StagedTile:
    """Staged elements of one tile, all on the device.

    Attributes:
        where: flat positions in the tensor.
        old, new: bits before and after.
        moved: what the change adds to the digest.
    """

    where: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    moved: Digest


class DeviceStage:
    """Changes of one tensor, staged beside it.

    Args:
        name: Hugging Face name.
        kind: its format.
        flat: its live bits as signed integers of their width, one-dimensional.
        cut: its tiles.
    """

    def __init__(self, name: str, kind: NumberFormat, flat: torch.Tensor, cut: Tiling) -> None:
        self._key = tensor_key(name)
        self._name = name
        self._kind = kind
        self._flat = flat
        self._cut = cut
        self._tiles: list[StagedTile] = []

    def add(self, tile: int, streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Digest:
        """Stage a tile's changes; touches no weight.

        Args:
            tile: its number.
            streams: gap bytes, code bytes and escaped steps, on the device.

        Returns:
            What this adds to the tile's digest; the caller compares with the manifest.

        Raises:
            BlockError: the streams do not describe changes of this tile.
        """
        found = device_loops.unpack(*streams)
        elements = self._cut.box(tile).elements
        if found is None or (len(found[0]) and int(found[0][-1]) >= elements):
            message = f"{self._name}: the streams do not describe changes of {elements} elements"
            raise BlockError(message)
        local, steps = found
        where = _flat(self._cut, tile, local)
        old = self._flat[where]
        new = device_loops.move(old, steps) if self._kind.sign_magnitude else old + steps
        staged = StagedTile(where, old, new, _moved(where, old, new, self._key))
        self._tiles.append(staged)
        return staged.moved

    def seal(self) -> StagedTile:
        """All tiles as one, so that putting them in is one scatter."""
        if len(self._tiles) != 1:
            where, old, new = (
                torch.cat([getattr(one, part) for one in self._tiles])
                if self._tiles
                else self._flat[:0].to(torch.int64 if part == "where" else self._flat.dtype)
                for part in ("where", "old", "new")
            )
            added = Digest(0, 0)
            for one in self._tiles:
                added = added.plus(one.moved)
            self._tiles = [StagedTile(where, old, new, added)]
        return self._tiles[0]

    def put(self) -> torch.Tensor:
        """Overwrite and read back; a boolean on the device that says whether all bits were kept."""
        staged = self.seal()
        self._flat[staged.where] = staged.new
        return (self._flat[staged.where] == staged.new).all()

    def put_back(self) -> None:
        """Undo ``put``."""
        staged = self.seal()
        self._flat[staged.where] = staged.old


def packed(streams: tuple[Bits, Bits, Bits]) -> torch.Tensor:
    """A block's streams as one pinned piece of host memory, so that they are one copy."""
    gaps, codes, escapes = streams
    whole = torch.empty(
        len(gaps) + len(codes) + escapes.nbytes,
        dtype=torch.uint8,
        pin_memory=torch.cuda.is_available(),
    )
    end = 0
    for part in streams:
        start, end = end, end + part.nbytes
        whole[start:end] = there(part.view("u1"), "cpu").view(torch.uint8)
    return whole


def unpacked(
    whole: torch.Tensor, lengths: tuple[int, int], kind: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams in ``packed``; lengths of the first two."""
    gaps, codes, rest = whole.tensor_split((lengths[0], sum(lengths)))
    # Escapes begin wherever codes end; wider words must begin where they may.
    return gaps, codes, rest.clone().view(device_loops.SIGNED[kind.width])


def _flat(cut: Tiling, tile: int, local: torch.Tensor) -> torch.Tensor:
    box = cut.box(tile)
    width = box.column1 - box.column0
    if width == cut.columns:
        return local + box.row0 * cut.columns
    down = torch.div(local, width, rounding_mode="floor")
    return (down + box.row0) * cut.columns + (local - down * width) + box.column0


def _moved(where: torch.Tensor, old: torch.Tensor, new: torch.Tensor, key: int) -> Digest:
    by = device_digest.values_of(new) - device_digest.values_of(old)
    low, high = (int(lane.sum()) for lane in device_digest.products(where.clone(), by, key))
    return Digest(low & _EVERY, high & _EVERY)
