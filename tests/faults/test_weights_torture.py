"""A few cases of ``make torture`` on real processes; the command runs all of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.torture.__main__ import enumerated, torture

CHOSEN = {"kill relay.block", "kill engine.commit.scatter"}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp())  # short: a socket's path may have 107 characters
    yield made
    shutil.rmtree(made)


@pytest.mark.slow
def test_no_engine_serves_what_nobody_published_whoever_dies(folder: Path) -> None:
    outcomes = torture(folder, [case for case in enumerated() if case.name in CHOSEN])
    assert len(outcomes) == len(CHOSEN)
    assert [outcome.note for outcome in outcomes if not outcome.good] == []
