"""The slot's permit in the guard's hand: whom a change is told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rose_agent.guard.slots.slot import SlotPermit
from rose_engines.node.permit import FIRST_LANE, Permit

S = 1_000_000_000


@pytest.fixture
def held(tmp_path: Path) -> tuple[SlotPermit, list[str]]:
    Permit.create(tmp_path / "permit").detach()
    rings: list[str] = []
    permit = SlotPermit(
        tmp_path / "permit", partial(rings.append, "now"), partial(rings.append, "soon")
    )
    assert permit.remap(0)
    return permit, rings


def test_the_enforcer_hears_of_a_permit_that_opens_or_ends_sooner_and_of_no_other(
    held: tuple[SlotPermit, list[str]],
) -> None:
    permit, rings = held
    now = time.monotonic_ns()
    received = []
    for until_ns in (now + 9 * S, now + 9 * S + 1, now + 8 * S):
        permit.extend(until_ns, FIRST_LANE)
        received.append(list(rings))
    assert received == [["soon"], ["soon"], ["soon", "now"]]


def test_an_engine_reads_shorter_chunks_before_its_permit_opens(
    held: tuple[SlotPermit, list[str]],
) -> None:
    permit, _ = held
    assert permit.mapped is not None
    seen: list[tuple[bool, int]] = []
    reader = permit.mapped
    divide, extend = reader.divide_chunks, reader.extend

    def note(write: Callable[[int], None], value: int) -> None:
        write(value)
        seen.append((reader.is_open_for_any(time.monotonic_ns()), reader.chunk_divisor))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "divide_chunks", partial(note, divide))
        patch.setattr(reader, "extend", partial(note, extend))
        permit.extend(time.monotonic_ns() + 9 * S, FIRST_LANE, 4)
    assert seen == [(False, 4), (True, 4)]
    permit.extend(time.monotonic_ns() + 9 * S, FIRST_LANE)
    assert reader.chunk_divisor == 1, "whole chunks again"


def test_a_permit_that_has_lapsed_is_closed_without_a_ring(
    held: tuple[SlotPermit, list[str]],
) -> None:
    permit, rings = held
    permit.extend(time.monotonic_ns() + 9 * S, FIRST_LANE)
    assert permit.close()
    assert rings == ["soon", "now"], "a stop does not wait for the other slots"
    permit.extend(1, FIRST_LANE)
    before = len(rings)
    assert not permit.close(), "it ended by itself, and the enforcer knew when"
    assert len(rings) == before
    assert permit.mapped is not None
    assert permit.mapped.until_ns == 0
