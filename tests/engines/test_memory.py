"""Pages that were let go of are really gone, and nothing beside them is touched."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose_engines.sglang.memory import SchedulerMemory
from rose_engines.weights.memory import PAGE, drop_pages, storages


@pytest.fixture
def buffer() -> Iterator[mmap.mmap]:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    yield memory
    memory.close()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_dropped_pages_read_as_zero_and_the_edges_stay(buffer: mmap.mmap) -> None:
    dropped = drop_pages(_address(buffer) + 10, 4 * PAGE)
    assert dropped == 3 * PAGE
    assert buffer[PAGE : 4 * PAGE] == b"\0" * (3 * PAGE)
    assert buffer[:PAGE] + buffer[4 * PAGE :] == b"x" * (5 * PAGE)


def test_less_than_a_page_is_kept(buffer: mmap.mmap) -> None:
    assert drop_pages(_address(buffer) + 1, PAGE) == 0
    assert buffer[:] == b"x" * len(buffer)


def test_the_memory_of_a_tensor_is_given_back_to_the_machine() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    before = _resident()
    ((address, size),) = storages([tensor]).items()
    dropped = drop_pages(address, size)
    assert dropped >= size - 2 * PAGE
    assert before - _resident() > size // 2
    assert int(tensor[1 << 20]) == 0
    tensor.fill_(3)
    assert int(tensor[1 << 20]) == 3


def test_memory_that_tensors_share_counts_once() -> None:
    whole = torch.zeros(1000, dtype=torch.int32)
    assert list(storages([whole, whole[:10], whole.view(10, 100)]).values()) == [4000]


@pytest.mark.parametrize(
    ("device", "enabled", "possible"),
    [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)],
)
def test_an_engine_whose_saver_is_off_cannot_be_dormant(
    device: str, enabled: bool, possible: bool
) -> None:
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(device=device),
        weight_updater=SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=enabled)),
    )
    assert (SchedulerMemory.of(scheduler) is not None) is possible
