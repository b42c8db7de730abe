"""A saved part as differences against the record before: pieces of packs.

A part is cut in pages. A page that a pack of the record before holds is pointed to, the others
make one new pack. Of an archive the cut begins anew at each member, so that a member that grew
does not shift the pages of those behind it.

No part need be in memory: one is cut as it lies in a file (``mmap``), packs are handed over as they
fill up, and a part comes back piece by piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap

PAGE = 4096
"""Of the machines that agents run on; a process's memory changes by whole pages."""
PACK = 4 * 1024 * 1024
"""Of a pack's content at most: what a reader of any page of it has to hold."""
_TAR_BLOCK = 512
_SIZE = slice(124, 136)
_MAGIC = slice(257, 262)
_BASE_256 = 0x80


Data = bytes | mmap
"""A part, in memory or in a file."""
Put = Callable[[str, bytes], None]
"""Takes a new pack: digest of its content, 64 digits, and the content."""


class TornPart(Exception):
    """Pieces do not make the part that the record says."""


@dataclass(frozen=True)
class PackPiece:
    """Bytes of a pack.

    Attributes:
        pack: digest of the pack's content, 64 digits.
        start: first byte.
        size: bytes.
    """

    pack: str
    start: int
    size: int


@dataclass(frozen=True)
class Cut:
    """A part, as pieces.

    Attributes:
        pieces: that make the part, in order.
        known: where each page now lies, by its digest; for the next record.
    """

    pieces: tuple[PackPiece, ...]
    known: Mapping[bytes, PackPiece]


def pack(data: Data, known: Mapping[bytes, PackPiece], put: Put, most: int = PACK) -> Cut:
    """Cut a part against the pages that are known.

    Args:
        data: the part.
        known: pages of earlier records of the trajectory.
        put: takes packs of the pages that are not.
        most: bytes of a pack.
    """
    filling, names = bytearray(), list[str]()
    order, added = list[bytes](), dict[bytes, tuple[int, int, int]]()

    def hand_over() -> None:
        names.append(hashlib.sha256(filling).hexdigest())
        put(names[-1], bytes(filling))
        filling.clear()

    for start, end in cuts(data):
        page = data[start:end]
        name = hashlib.sha256(page).digest()
        if name not in known and name not in added:
            if len(filling) + len(page) > most:
                hand_over()
            added[name] = (len(names), len(filling), len(page))
            filling += page
        order.append(name)
    if filling:
        hand_over()
    places = {
        name: PackPiece(names[one], start, size) for name, (one, start, size) in added.items()
    }
    now = {name: known[name] if name in known else places[name] for name in order}
    return Cut(tuple(_joined(now[name] for name in order)), now)


def pages(pieces: Iterable[PackPiece], data: Data) -> dict[bytes, PackPiece]:
    """Where each page of a part lies, from the part and its pieces: what ``pack`` knew then."""
    found, at, ends = {}, 0, []
    for piece in pieces:
        ends.append((at, at + piece.size, piece))
        at += piece.size
    index = 0
    for start, end in cuts(data):
        while index < len(ends) and ends[index][1] <= start:
            index += 1
        if index == len(ends):
            break
        begin, stop, piece = ends[index]
        if end <= stop:
            name = hashlib.sha256(data[start:end]).digest()
            found[name] = PackPiece(piece.pack, piece.start + start - begin, end - start)
    return found


def unpack(
    pieces: Iterable[PackPiece], fetch: Callable[[str], bytes], digest: str
) -> Iterator[bytes]:
    """The part, piece by piece; all of it has to be taken before any of it is believed.

    Args:
        pieces: of the record.
        fetch: a pack's content by its name.
        digest: SHA-256 of the part, 64 digits.

    Raises:
        TornPart: a pack is short, or what came out is another part.
    """
    seen = hashlib.sha256()
    for piece in pieces:
        held = fetch(piece.pack)
        if len(held) < piece.start + piece.size:
            raise TornPart(f"pack {piece.pack[:16]} of the record is short")
        made = held[piece.start : piece.start + piece.size]
        seen.update(made)
        yield made
    if seen.hexdigest() != digest:
        raise TornPart(f"the pieces make another part than {digest[:16]}")


def cuts(data: Data) -> Iterator[tuple[int, int]]:
    """Where a part is cut: each page's start and end."""
    at = 0
    while (size := _member(data, at)) is not None:
        yield at, at + _TAR_BLOCK
        at += _TAR_BLOCK
        yield from _paged(at, min(len(data), at + size))
        at = min(len(data), at + size)
    yield from _paged(at, len(data))


def _paged(start: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, PAGE):
        yield at, min(end, at + PAGE)


def _member(data: Data, at: int) -> int | None:
    """Bytes of the archive's member whose header is there, filled up; None: there is none."""
    header = data[at : at + _TAR_BLOCK]
    if len(header) < _TAR_BLOCK or header[_MAGIC] != b"ustar":
        return None
    field = header[_SIZE]
    try:
        if field[0] & _BASE_256:
            size = int.from_bytes(field[1:], "big")
        else:
            size = int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        return None
    return -(-size // _TAR_BLOCK) * _TAR_BLOCK


def _joined(pieces: Iterable[PackPiece]) -> Iterator[PackPiece]:
    last: PackPiece | None = None
    for piece in pieces:
        if last is not None and (last.pack, last.start + last.size) == (piece.pack, piece.start):
            last = PackPiece(last.pack, last.start, last.size + piece.size)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
