"""How many tunnels there may be, and when one ends that nobody has ended."""

from __future__ import annotations

import pytest

from rose_core.sandboxes.tunnels import End, TunnelLimits, end_of, may_open

LIMITS = TunnelLimits(most=2, idle_seconds=10.0)


def test_a_sandbox_has_so_many_and_no_more() -> None:
    assert [may_open(LIMITS, n) for n in range(4)] == [True, True, False, False]
    assert not may_open(TunnelLimits(most=0), 0), "0 lets nobody in"


@pytest.mark.parametrize(
    ("now", "closed", "gone", "end"),
    [
        (109.9, False, False, None),
        (110.0, False, False, End.IDLE),
        (200.0, True, False, End.CLOSED),
        (100.0, True, True, End.SANDBOX),
    ],
)
def test_it_ends_by_a_side_with_its_sandbox_or_when_nothing_passes(
    now: float, *, closed: bool, gone: bool, end: End | None
) -> None:
    assert end_of(LIMITS, moved=100.0, now=now, closed=closed, gone=gone) is end
