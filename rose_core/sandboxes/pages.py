"""A saved part as differences against the record before: pieces of packs.

A part is cut in pages. A page that a pack of the record before holds is pointed to, the others
make one new pack. Of an archive the cut begins anew at each member, so that a member that grew
does not shift the pages of those behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PAGE = 4096
"""Of the machines that agents run on; a process's memory changes by whole pages."""
_TAR_BLOCK = 512
_SIZE = slice(124, 136)
_MAGIC = slice(257, 262)
_BASE_256 = 0x80


class TornPart(Exception):
    """Pieces do not make the part that the record says."""


@dataclass(frozen=True)
class Piece:
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
class Pack:
    """A part, as pieces.

    Attributes:
        pieces: that make the part, in order.
        fresh: the new pack's content; empty: all was there.
        known: where each page now lies, by its digest; for the next record.
    """

    pieces: tuple[Piece, ...]
    fresh: bytes
    known: Mapping[bytes, Piece]


def pack(data: bytes, known: Mapping[bytes, Piece]) -> Pack:
    """Cut a part against the pages that are known.

    Args:
        data: the part.
        known: pages of earlier records of the trajectory.
    """
    fresh, order, added = bytearray(), [], dict[bytes, tuple[int, int]]()
    for start, end in cuts(data):
        page = data[start:end]
        name = hashlib.sha256(page).digest()
        if name not in known and name not in added:
            added[name] = (len(fresh), len(page))
            fresh += page
        order.append(name)
    own = hashlib.sha256(fresh).hexdigest()
    places = {name: Piece(own, start, size) for name, (start, size) in added.items()}
    now = {name: known[name] if name in known else places[name] for name in order}
    return Pack(tuple(_joined(now[name] for name in order)), bytes(fresh), now)


def pages(pieces: Iterable[Piece], data: bytes) -> dict[bytes, Piece]:
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
            found[name] = Piece(piece.pack, piece.start + start - begin, end - start)
    return found


def unpack(pieces: Iterable[Piece], packs: Mapping[str, bytes], digest: str) -> bytes:
    """The part.

    Args:
        pieces: of the record.
        packs: their content by name.
        digest: SHA-256 of the part, 64 digits.

    Raises:
        TornPart: a pack is missing, or what comes out is another part.
    """
    made = bytearray()
    for piece in pieces:
        held = packs.get(piece.pack)
        if held is None or len(held) < piece.start + piece.size:
            raise TornPart(f"pack {piece.pack[:16]} of the record is missing or short")
        made += held[piece.start : piece.start + piece.size]
    if hashlib.sha256(made).hexdigest() != digest:
        raise TornPart(f"the pieces make another part than {digest[:16]}")
    return bytes(made)


def cuts(data: bytes) -> Iterator[tuple[int, int]]:
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


def _member(data: bytes, at: int) -> int | None:
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


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    last: Piece | None = None
    for piece in pieces:
        if last is not None and (last.pack, last.start + last.size) == (piece.pack, piece.start):
            last = Piece(last.pack, last.start, last.size + piece.size)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
