"""A runtime on real parts, for tests marked ``sandbox``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.sandboxes.own import own_gvisor, own_runtime
from rose_sandbox.errors import Unavailable
from rose_sandbox.runtimes.parts import GVISOR, Parts, find_parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runsc import RunscRuntime


@pytest.fixture(scope="session")
def parts() -> Parts:
    """Programs and images of this machine; without them the test is skipped by name."""
    try:
        return find_parts()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
async def runc(parts: Parts, tmp_path: Path) -> AsyncIterator[RuncRuntime]:
    """A host's runtime, of which nothing is left after the test."""
    async with own_runtime(tmp_path / "host", parts) as runtime:
        yield runtime


@pytest.fixture
async def runsc(tmp_path: Path) -> AsyncIterator[RunscRuntime]:
    """The same of gVisor."""
    try:
        parts = find_parts(GVISOR)
    except Unavailable as error:
        pytest.skip(str(error))
    async with own_gvisor(tmp_path / "gvisor", parts) as runtime:
        yield runtime
