"""Parts as differences: what comes out is what went in, and only new pages are stored."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.sandboxes.pages import PAGE, Pack, TornPart, pack, pages, unpack


def archive(**members: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored(made: Pack, into: dict[str, bytes]) -> None:
    if made.fresh:
        into[digest(made.fresh)] = made.fresh


@given(st.lists(st.binary(max_size=3 * PAGE), min_size=1, max_size=4))
def test_every_part_of_a_chain_comes_back(parts: list[bytes]) -> None:
    packs: dict[str, bytes] = {}
    known: dict[bytes, object] = {}
    for data in parts:
        made = pack(data, known)  # type: ignore[arg-type]
        stored(made, packs)
        assert unpack(made.pieces, packs, digest(data)) == data
        known = dict(made.known)


def test_one_changed_page_of_a_large_part_is_one_page_to_store() -> None:
    memory = os.urandom(256 * PAGE)
    before = pack(archive(core=b"x" * 100, pages=memory), {})
    changed = memory[: 40 * PAGE] + os.urandom(PAGE) + memory[41 * PAGE :]
    # A member before it that grew moves all pages in the archive.
    after = pack(archive(core=b"x" * 900, pages=changed), before.known)
    assert len(after.fresh) <= 3 * PAGE
    assert len(after.pieces) < 10


def test_a_host_that_starts_anew_finds_the_pages_of_the_record_before() -> None:
    data = archive(a=os.urandom(3 * PAGE + 7), b=os.urandom(PAGE))
    first = pack(data, {})
    packs = {digest(first.fresh): first.fresh}
    again = pack(data, pages(first.pieces, unpack(first.pieces, packs, digest(data))))
    assert len(again.fresh) <= PAGE


def test_pieces_that_make_another_part_are_torn() -> None:
    made = pack(os.urandom(2 * PAGE), {})
    name = digest(made.fresh)
    with pytest.raises(TornPart, match="missing or short"):
        unpack(made.pieces, {}, name)
    with pytest.raises(TornPart, match="another part"):
        unpack(made.pieces, {name: bytes(2 * PAGE)}, digest(b"what was saved"))
