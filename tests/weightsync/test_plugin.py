"""Patience with an engine that stands still: only open time counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_agent.weightsync.plugin import Gate
from rose_engines.errors import EngineUnavailable
from rose_engines.node.pace import rest_of
from rose_engines.node.permit import Permit

# The permit is compared with the machine's own clock, so these tests run in real time.
_AHEAD_NS = 5_000_000_000


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "permit")
    yield made
    made.close()


def test_a_missing_damaged_or_lapsed_permit_is_closed(gate: Gate, tmp_path: Path) -> None:
    assert not gate.is_open()
    (tmp_path / "permit").write_bytes(b"x" * 64)
    assert not gate.is_open()
    permit = Permit.create(tmp_path / "permit")
    assert not gate.is_open()
    permit.extend(time.monotonic_ns() + _AHEAD_NS)
    assert gate.is_open()
    permit.close_now()
    assert not gate.is_open()


def test_a_permit_that_was_replaced_is_noticed(gate: Gate, tmp_path: Path) -> None:
    Permit.create(tmp_path / "permit")
    assert not gate.is_open()
    Permit.create(tmp_path / "permit").extend(time.monotonic_ns() + _AHEAD_NS)
    assert gate.is_open()


async def test_an_answer_that_comes_is_returned_and_its_error_raised(gate: Gate) -> None:
    async def answer() -> int:
        return 7

    async def refusal() -> int:
        raise EngineUnavailable("gone")

    assert await gate.patiently(answer(), 1.0) == 7
    with pytest.raises(EngineUnavailable, match="gone"):
        await gate.patiently(refusal(), 1.0)


async def test_closed_time_does_not_count(gate: Gate, tmp_path: Path) -> None:
    permit = Permit.create(tmp_path / "permit")
    silent = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(gate.patiently(silent, 0.1))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    permit.extend(time.monotonic_ns() + _AHEAD_NS)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await asyncio.wait_for(waiting, 60)
    assert silent.cancelled()


@pytest.mark.looptime
async def test_fetching_rests_after_its_work_until_the_permit_opens(
    gate: Gate, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await gate.pause_after(0.05)
    assert loop.time() - began == pytest.approx(rest_of(0.05), abs=0.05)
    Permit.create(tmp_path / "permit").extend(time.monotonic_ns() + _AHEAD_NS)
    began = loop.time()
    await gate.pause_after(0.05)
    assert loop.time() == began
