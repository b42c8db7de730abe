"""The pytest fixture ``nvml``: eight H100 behind the real ``pynvml``, in this process.

Skipped by name where the library cannot be built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dev.errors import NotSupported
from rose_dev.gpu.library import library, preloaded
from rose_dev.gpu.state import State


def require() -> None:
    """Skip the test, with the reason, where the library cannot be built."""
    try:
        library()
    except NotSupported as error:
        pytest.skip(f"NVML library: {error}")


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[State]:
    """The state behind this process's NVML; changed at will, gone with the test."""
    require()
    with State.create(tmp_path / "nvml.state", seed="test") as state, preloaded(state.path):
        yield state
