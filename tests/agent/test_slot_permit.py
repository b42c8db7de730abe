"""The slot's permit in the guard's hand: whom a change is told to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rose_agent.guard.permit import SlotPermit
from rose_engines.permit import FIRST_LANE, Permit

S = 1_000_000_000


@pytest.fixture
def held(tmp_path: Path) -> tuple[SlotPermit, list[bool]]:
    Permit.create(tmp_path / "permit").detach()
    rings: list[bool] = []
    permit = SlotPermit(tmp_path / "permit", lambda: rings.append(True))
    assert permit.look(0)
    return permit, rings


def test_the_enforcer_hears_of_a_permit_that_opens_or_ends_sooner_and_of_no_other(
    held: tuple[SlotPermit, list[bool]],
) -> None:
    permit, rings = held
    now = time.monotonic_ns()
    heard = []
    for until_ns in (now + 9 * S, now + 9 * S + 1, now + 8 * S):
        permit.extend(until_ns, FIRST_LANE)
        heard.append(len(rings))
    assert heard == [1, 1, 2]


def test_a_permit_that_has_lapsed_is_closed_without_a_ring(
    held: tuple[SlotPermit, list[bool]],
) -> None:
    permit, rings = held
    permit.extend(time.monotonic_ns() + 9 * S, FIRST_LANE)
    assert permit.close()
    assert len(rings) == 2
    permit.extend(1, FIRST_LANE)
    before = len(rings)
    assert not permit.close(), "it ended by itself, and the enforcer knew when"
    assert len(rings) == before
    assert permit.mapped is not None
    assert permit.mapped.until_ns == 0
