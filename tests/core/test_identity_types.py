"""The uids that travel have types of their own, so that a swapped pair is found before it runs."""

import os
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

SWAPPED = """
from rose_core.guard.grants import GrantBook
from rose_core.identity import LeaseUid, PodUid, SlotKey, SlotUid

SlotKey(SlotUid("s"), 1)
SlotKey(PodUid("p"), 1)
GrantBook().is_alive(SlotUid("s"), 0.0)
GrantBook().is_alive(PodUid("p"), 0.0)
GrantBook().is_alive(LeaseUid("l"), 0.0)
"""


@pytest.mark.slow
def test_mypy_finds_every_swapped_uid_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said, trouble, _ = api.run(
        ["--config-file=", f"--cache-dir={os.devnull}", "--no-error-summary", "-c", SWAPPED]
    )
    assert trouble == ""
    found = {line.split(":")[1] for line in said.splitlines() if ": error:" in line}
    wrong = {
        str(number)
        for number, line in enumerate(SWAPPED.splitlines(), 1)
        if line.startswith(("SlotKey(P", "GrantBook().is_alive(P", "GrantBook().is_alive(L"))
    }
    assert found == wrong
