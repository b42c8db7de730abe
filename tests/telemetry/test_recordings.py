"""What real servers said before, during and after two streams, as recorded by ``record``."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_core.telemetry.dialects import LOADS, METRICS, Figures, sglang_snapshot
from rose_core.telemetry.signal import advance, level
from rose_core.wire.sync import SignalSource
from tests.telemetry.record import FOLDER, STATES, STREAMS

SERVERS = sorted(folder for folder in FOLDER.iterdir() if folder.is_dir())
MEMORIES = [folder for folder in SERVERS if (folder / "busy" / "snapshot.bin").exists()]
SECOND = 1_000_000_000
SILENT = {"sglang-0.5.23"}
"""Servers whose gauges are not on the page before the first request."""


def engine(server: Path) -> str:
    return "SGLang" if server.name.startswith("sglang") else "VLLM"


def pages(server: Path) -> list[Figures]:
    return [METRICS[engine(server)]((server / s / "metrics.txt").read_text()) for s in STATES]


def loads(server: Path) -> list[Figures]:
    return [LOADS[engine(server)][1]((server / s / "loads.json").read_bytes()) for s in STATES]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_a_real_servers_page_counts_its_requests_and_tokens(server: Path) -> None:
    idle, busy, after = pages(server)
    counted = [sum((figures.requests or {}).values()) for figures in (idle, busy, after)]
    assert counted[2] - counted[0] == STREAMS
    assert counted[1] - counted[0] == (STREAMS if busy.at_arrival else 0)
    assert sum(after.activity) > sum(idle.activity), "tokens were made"
    fresh = (None, None) if server.name in SILENT else (0, 0)
    assert (idle.running, idle.waiting) == fresh, "what is not there yet is unknown, not zero"
    assert (after.running, after.waiting) == (0, 0)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_a_real_servers_load_page_is_read(server: Path) -> None:
    idle, busy, after = loads(server)
    assert (idle.running, idle.waiting, after.running, after.waiting) == (0, 0, 0, 0)
    if busy.level_only:  # vLLM says 0 for ever unless it was told to count
        reading = None
        for at, figures in enumerate((idle, busy, after)):
            reading = advance(reading, SignalSource.LOADS, figures, (at + 1) * SECOND)
        assert reading is not None
        assert reading.plausible is (level(busy) > 0)
    else:
        assert level(busy) > 0 or busy.activity != idle.activity


@pytest.mark.parametrize("server", MEMORIES, ids=lambda server: server.name)
def test_a_real_schedulers_snapshot_shows_work_and_its_end(server: Path) -> None:
    idle, busy, after = (
        sglang_snapshot((server / state / "snapshot.bin").read_bytes()) for state in STATES
    )
    assert (idle.running, idle.waiting, after.running, after.waiting) == (0, 0, 0, 0)
    assert level(busy) > 0 or busy.activity != idle.activity
    memory = (server / "busy" / "snapshot.bin").read_bytes()
    for cut in range(len(memory)):
        assert sglang_snapshot(memory[:cut]) == Figures(), "torn is unknown"
