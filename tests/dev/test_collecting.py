"""Workers of lanes collect one after the other: the second finds what the first has compiled."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import one_worker_at_a_time


def is_free(file: Path) -> bool:
    with file.open() as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize(
    ("config", "free"), [(SimpleNamespace(workerinput={}), False), (SimpleNamespace(), True)]
)
def test_a_worker_keeps_others_out_until_it_has_collected(
    tmp_path: Path, config: object, free: bool
) -> None:
    file = tmp_path / "file"
    file.touch()
    with one_worker_at_a_time(config, file):
        assert is_free(file) is free
    assert is_free(file)
