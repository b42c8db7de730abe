"""What every test shares: fixtures of the development tools, and a clean event loop policy."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from rose_dev.cluster.control_plane import ControlPlane

if TYPE_CHECKING:
    from rose_dev.api_client import ApiClient

pytest_plugins = [
    "rose_dev.lanes",
    "rose_dev.testing",
    "rose_dev.engine_testing",
    "rose_dev.vllm_testing",
    "rose_dev.gpu.testing",
    "rose_dev.kernel_cache",
]

# PyTorch's threads spin while they wait for each other. Beside other tests that took four times as
# much of the cores, on tensors that one thread has done at once. Engines have one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Docker gives a container 64 MiB of it, which is too little for several tests at once.
_ROOM_BYTES = 2 << 30

# Without this, pytest-asyncio asks Python 3.11 for "the current loop", which makes one that nobody
# closes; its ResourceWarning would fail a random test.
asyncio.set_event_loop(None)

# How long an example takes says what else the machine does. CI's own profile asks as little.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect once of all workers what has to be compiled, and without a search for garbage.

    What is imported and collected stays until the end. It is some millions of objects, and each
    process of a lane searched them over and over while they became more: a quarter of what
    collecting the unit tests costs.

    In a fresh checkout nothing is compiled yet, and no assertion rewritten. Workers that begin at
    once would all do that for all files, side by side; the second finds what the first has done.
    """
    gc.disable()
    try:
        with one_worker_at_a_time(session.config):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def one_worker_at_a_time(config: object, file: Path = Path(__file__)) -> Iterator[None]:
    """Of all lanes' workers, which lock a file that they share; who is no worker waits for none."""
    if not hasattr(config, "workerinput"):
        yield
        return
    with file.open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", autouse=True)
def room_for_routers() -> Iterator[None]:
    """A router in a test's process shares it with PyTorch and all tests before; alone it has 2 GiB.

    Beyond a part of that it takes no turn, which is tested on routers in processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rose_router.http.admission.memory.DEFAULT_BYTES", 64 << 30)
        yield


@pytest.fixture(scope="session")
def api_client(control_plane: ControlPlane) -> Iterator[ApiClient]:
    """A client of the shared API server, where ROSE's kinds are installed."""
    from tests.api.installed import connected  # noqa: PLC0415  # the client is slow to import

    with connected(control_plane) as client:
        yield client


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A folder in memory, where a machine has it: for tests that write thousands of small files.

    A file system of a disk takes as much of a core for them as all that the tests do.
    """
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= _ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix="rose", dir=memory if roomy else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
