"""A runtime on real parts, for tests marked ``sandbox``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rose_sandbox.errors import Unavailable
from rose_sandbox.runtimes.parts import Parts, find_parts
from rose_sandbox.runtimes.runc import RuncRuntime


@pytest.fixture(scope="session")
def parts() -> Parts:
    """Programs and images of this machine; without them the test is skipped by name."""
    try:
        return find_parts()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
async def runc(parts: Parts, tmp_path: Path) -> AsyncIterator[RuncRuntime]:
    """A host's runtime, which ends with all its sandboxes."""
    runtime = RuncRuntime(tmp_path / "host", parts)
    yield runtime
    for handle in await runtime.sandboxes():
        await runtime.end(handle)
    await runtime.close()
