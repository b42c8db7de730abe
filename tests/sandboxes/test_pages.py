"""Parts as differences: what comes out is what went in, and only new pages are stored."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.sandboxes.pages import PAGE, Cut, PackPiece, TornPart, pack, pages, unpack


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


@dataclass
class Packs:
    """What was put."""

    held: dict[str, bytes] = field(default_factory=dict)
    fresh: int = 0
    most: int = 5 * PAGE

    def cut(self, data: bytes | mmap, known: Mapping[bytes, PackPiece] | None = None) -> Cut:
        self.fresh = 0

        def put(name: str, content: bytes) -> None:
            assert name == digest(content)
            assert len(content) <= self.most
            self.held[name] = content
            self.fresh += len(content)

        return pack(data, known or {}, put, self.most)

    def whole(self, made: Cut, name: str) -> bytes:
        return b"".join(unpack(made.pieces, self.held.__getitem__, name))


@given(st.lists(st.binary(max_size=3 * PAGE), min_size=1, max_size=4))
def test_every_part_of_a_chain_comes_back(parts: list[bytes]) -> None:
    packs, known = Packs(), dict[bytes, PackPiece]()
    for data in parts:
        made = packs.cut(data, known)
        assert packs.whole(made, digest(data)) == data
        known = dict(made.known)


def test_one_changed_page_of_a_large_part_is_one_page_to_store() -> None:
    memory, packs = os.urandom(256 * PAGE), Packs()
    before = packs.cut(archive(core=b"x" * 100, pages=memory))
    changed = memory[: 40 * PAGE] + os.urandom(PAGE) + memory[41 * PAGE :]
    # A member before it that grew moves all pages in the archive.
    after = packs.cut(archive(core=b"x" * 900, pages=changed), before.known)
    assert packs.fresh <= 3 * PAGE
    assert len(after.pieces) < 10 + 256 // 5


def test_a_host_that_starts_anew_finds_the_pages_of_the_record_before() -> None:
    data = archive(a=os.urandom(3 * PAGE + 7), b=os.urandom(PAGE))
    packs = Packs()
    first = packs.cut(data)
    packs.cut(data, pages(first.pieces, packs.whole(first, digest(data))))
    assert packs.fresh <= PAGE


def test_a_part_in_a_file_is_cut_as_one_in_memory(tmp_path: Path) -> None:
    data = archive(a=os.urandom(30 * PAGE + 7), b=b"")
    (tmp_path / "part").write_bytes(data)
    with (
        (tmp_path / "part").open("rb") as opened,
        mmap(opened.fileno(), 0, access=ACCESS_READ) as there,
    ):
        assert Packs().cut(there).pieces == Packs().cut(data).pieces


def test_pieces_that_make_another_part_are_torn() -> None:
    packs = Packs()
    made = packs.cut(os.urandom(2 * PAGE))
    (name,) = packs.held
    packs.held[name] = b"short"
    with pytest.raises(TornPart, match="short"):
        packs.whole(made, name)
    packs.held[name] = bytes(2 * PAGE)
    with pytest.raises(TornPart, match="another part"):
        packs.whole(made, digest(b"what was saved"))
