"""The uids that travel have types of their own, so that a swapped pair is found before it runs."""

import os
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

SWAPPED = """
from rose_core.guard.grants import GrantBook
from rose_core.devices.ownership import OnGpu
from rose_core.identity import GpuUuid, LeaseUid, PodUid, SlotKey, SlotUid

SlotKey(SlotUid("s"), 1)
SlotKey(PodUid("p"), 1)  # swapped
GrantBook().is_alive(SlotUid("s"), 0.0)
GrantBook().is_alive(PodUid("p"), 0.0)  # swapped
GrantBook().is_alive(LeaseUid("l"), 0.0)  # swapped
OnGpu(7, SlotUid("s"), PodUid("p"))
OnGpu(7, SlotUid("s"), GpuUuid("g"))  # swapped
"""


@pytest.mark.slow
def test_mypy_finds_every_swapped_uid_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said, trouble, _ = api.run(
        ["--config-file=", f"--cache-dir={os.devnull}", "--no-error-summary", "-c", SWAPPED]
    )
    assert trouble == ""
    found = {line.split(":")[1] for line in said.splitlines() if ": error:" in line}
    lines = list(enumerate(SWAPPED.splitlines(), 1))
    wrong = {str(number) for number, line in lines if line.endswith("# swapped")}
    assert found == wrong
