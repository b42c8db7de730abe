"""The permit's file: layout, doubts that close it, heartbeats."""

import multiprocessing
import time
from pathlib import Path

import pytest

from rose_engines.node.permit import LONGEST_NS, MAGIC, SIZE, BadPermit, Permit

NOW = 1_000_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "permit"


def test_new_permit_is_closed(path: Path) -> None:
    permit = Permit.create(path)
    assert not permit.is_open(0)
    assert not permit.is_open(NOW)
    assert permit.host_age_ns(NOW) is None
    assert path.stat().st_size == SIZE


def test_open_until_the_deadline(path: Path) -> None:
    permit = Permit.create(path)
    permit.extend(NOW)
    assert permit.is_open(NOW - 1)
    assert not permit.is_open(NOW)
    permit.close_now()
    assert permit.until_ns == 0
    assert not permit.is_open(NOW - 1)


def test_chunks_are_whole_until_somebody_divides_them(path: Path) -> None:
    writer = Permit.create(path)
    reader = Permit.attach(path, writable=False)
    assert reader.chunk_divisor == 1
    writer.divide_chunks(4)
    assert reader.chunk_divisor == 4
    for garbage in (-3, 0):
        writer.divide_chunks(garbage)
        assert reader.chunk_divisor == 1
    writer.divide_chunks(2**60)
    assert reader.chunk_divisor <= 1024, "a chunk of nothing would never end"


def test_deadline_of_another_boot_is_closed(path: Path) -> None:
    """CLOCK_MONOTONIC starts anew; a leftover far in the future must not hold for ever."""
    permit = Permit.create(path)
    permit.extend(NOW + LONGEST_NS + 1)
    assert not permit.is_open(NOW)
    assert permit.is_open(NOW + 1)


def test_the_hosts_heartbeat_opens_nothing_and_is_never_of_a_negative_age(path: Path) -> None:
    permit = Permit.create(path)
    permit.extend(NOW)
    assert permit.host_age_ns(NOW) is None
    permit.beat_host(NOW + 1)
    assert permit.host_age_ns(NOW + 3) == 2
    assert permit.host_age_ns(NOW) == 0
    assert permit.until_ns == NOW


def test_readers_see_the_writer_and_cannot_write(path: Path) -> None:
    writer = Permit.create(path)
    reader = Permit.attach(path, writable=False)
    writer.extend(NOW)
    assert reader.until_ns == NOW
    with pytest.raises(TypeError):
        reader.extend(NOW + 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 10, b"\0" * SIZE, (MAGIC[:-1] + b"\x02").ljust(SIZE, b"\0"), b"x" * 4096],
)
def test_anything_else_is_no_permit(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadPermit, match="permit"):
        Permit.attach(path)


def test_create_replaces_and_the_old_mapping_lives_on(path: Path) -> None:
    old = Permit.create(path)
    old.extend(NOW)
    new = Permit.create(path)
    assert new.until_ns == 0
    assert old.until_ns == NOW
    assert [entry.name for entry in path.parent.iterdir()] == ["permit"]


def test_detaching_again_does_no_harm(path: Path) -> None:
    permit = Permit.create(path)
    permit.detach()
    permit.detach()


def _store_forever(path: Path) -> None:
    permit = Permit.attach(path)
    while True:
        permit.extend(0x0101010101010101)
        permit.extend(0x7E7E7E7E7E7E7E7E)


def test_a_reader_never_sees_half_of_a_value_that_another_process_writes(path: Path) -> None:
    """A writer in another process never shows half a value."""
    permit = Permit.create(path)
    permit.extend(0x0101010101010101)
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_store_forever, args=(path,), daemon=True)
    writer.start()
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < deadline:
            seen |= {permit.until_ns for _ in range(20_000)}
        assert seen == {0x0101010101010101, 0x7E7E7E7E7E7E7E7E}
    finally:
        writer.kill()
        writer.join(30)
