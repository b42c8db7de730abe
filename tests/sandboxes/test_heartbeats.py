"""When a host that somebody waits for counts as lost."""

from __future__ import annotations

from rose_core.sandboxes.heartbeats import Heartbeats


def test_a_host_is_lost_after_questions_in_a_row_and_not_after_one() -> None:
    beats = Heartbeats(every=2, within=1, most_missed=3)
    assert [beats.is_lost(missed) for missed in range(5)] == [False, False, False, True, True]
    assert beats.seconds == 9
