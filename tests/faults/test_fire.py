"""The command ``make fire``, short: router, engines and callers as processes of their own."""

from __future__ import annotations

import asyncio

import pytest

from bench.fire.__main__ import burn, flags

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_nothing_is_wrong_and_nothing_is_left_after_a_short_fire() -> None:
    given = flags().parse_args(["--turns=120", "--engines=2", "--at-once=8"])
    left, right = asyncio.run(burn(given))
    assert not left.wrong
    assert not right.wrong
    assert left.turns + right.turns >= 120
    assert left.ended["whole"] > 0 < right.ended["whole"]
    # How many fit in depends on how busy the machine is.
    assert min(sum(one.deeds.values()) for one in (left, right)) >= 2
