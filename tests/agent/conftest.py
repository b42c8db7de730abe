"""Fixtures of the agent's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
