"""Pages of keys in a folder: whole and right, or not there; bounded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rose_engines.kv.pages import CHECKSUM_BYTES, PageFolder

PAGE = bytes(range(256)) * 4


def checksum(name: bytes, content: memoryview) -> bytes:
    return hashlib.blake2b(name + bytes(content), digest_size=CHECKSUM_BYTES).digest()


def folder(path: Path, pages: int = 100) -> PageFolder:
    return PageFolder(path, pages * (len(PAGE) + CHECKSUM_BYTES), checksum)


def read(where: PageFolder, name: str) -> bytes | None:
    into = bytearray(len(PAGE))
    return bytes(into) if where.get(name, memoryview(into)) else None


def test_another_engine_reads_what_one_has_written(tmp_path: Path) -> None:
    assert folder(tmp_path).put("a", memoryview(PAGE))
    other = folder(tmp_path)
    assert other.has("a")
    assert read(other, "a") == PAGE
    assert read(other, "b") is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:500] + bytes([data[500] ^ 128]) + data[501:],
    ],
)
def test_a_damaged_page_is_never_used_and_goes(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    pages = folder(tmp_path)
    pages.put("a", memoryview(PAGE))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert read(pages, "a") is None
    assert not path.exists()


def test_a_page_under_anothers_name_is_never_used(tmp_path: Path) -> None:
    pages = folder(tmp_path)
    pages.put("a", memoryview(PAGE))
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(path.name.replace("a.", "b.")))
    assert read(pages, "b") is None


def test_the_folder_keeps_what_was_used_last(tmp_path: Path) -> None:
    pages = folder(tmp_path, 100)
    for number in range(300):
        pages.put(f"{number:03}", memoryview(PAGE))
        os.utime(tmp_path / f"{number:03}.page", ns=(number, number))
        if number == 50:
            first = tmp_path / "000.page"
            os.utime(first, ns=(10**6, 10**6))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size <= 100 * (len(PAGE) + CHECKSUM_BYTES)
    assert pages.has("000")
    assert pages.has("299")
    assert not pages.has("100")


def test_a_page_larger_than_the_folder_and_a_folder_that_is_gone_are_no_error(
    tmp_path: Path,
) -> None:
    assert not PageFolder(tmp_path, 100, checksum).put("a", memoryview(PAGE))
    assert not folder(tmp_path / "gone").put("a", memoryview(PAGE))
    assert read(folder(tmp_path / "gone"), "a") is None
