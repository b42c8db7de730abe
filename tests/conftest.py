"""What every test shares: fixtures of the development tools, and a clean event loop policy."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["rose_dev.testing", "rose_dev.engine_testing"]

# Without this, pytest-asyncio asks Python 3.11 for "the current loop", which makes one that nobody
# closes; its ResourceWarning would fail a random test.
asyncio.set_event_loop(None)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
