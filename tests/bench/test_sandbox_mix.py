"""Turns of the bench with recorded waits: in the shares of the logs, and the same for every way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bench.sandboxes.mix import SHARES, draw
from bench.sandboxes.waits import LONGEST_WAIT, scripts


def test_turns_come_in_the_shares_of_the_logs() -> None:
    dice = random.Random(1)
    turns = [draw(dice, number) for number in range(8000)]
    counts = Counter(turn.kind for turn in turns)
    for kind, share in SHARES.items():
        expected = share / sum(SHARES.values())
        assert counts[kind] / len(turns) == pytest.approx(expected, abs=0.02)
    changing = {turn.kind for turn in turns if turn.changes}
    assert changing == {"write a file", "install", "background", "run a script"}
    assert not any("NUMBER" in turn.command for turn in turns)


def test_every_way_plays_the_same_turns_with_recorded_waits() -> None:
    written = scripts(16, 8, 1)
    assert written == scripts(16, 8, 1) != scripts(16, 8, 2)
    waits = [wait for script in written for _, wait in script.turns]
    assert len(waits) == 16 * 8
    assert 0 <= min(waits) <= max(waits) <= LONGEST_WAIT
    assert all(0 < script.lost < 8 for script in written)
