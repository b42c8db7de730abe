"""The daily shape: learned, kept, asked; lent before the trough, back before the peak."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rose_core.api import Reason
from rose_core.lending import LoadOutlook, plan
from rose_core.lending.forecast import (
    BIN_SECONDS,
    BINS,
    UsualLoad,
    observe,
    outlook,
    restored,
    written,
)
from tests.lending.world import NOW, lease, lent, pool, released, replica, slot, world

DAY = BINS * BIN_SECONDS
MIDNIGHT = 20_000 * DAY
HALF_HOUR = 1800.0


def busy(at: float) -> float:
    """Permille: 100 at 04:00, 900 at 16:00."""
    return 500 - 400 * math.cos((at - MIDNIGHT - 4 * 3600) / DAY * 2 * math.pi)


def learned(days: int = 4, until: float = 0.0) -> UsualLoad:
    shape = UsualLoad()
    at = MIDNIGHT
    while at < MIDNIGHT + days * DAY + until:
        shape = observe(shape, busy(at), at)
        at += 300
    return shape


def test_a_shape_is_learned_bin_by_bin_and_survives_being_written() -> None:
    shape = learned()
    assert shape.learned
    again = restored(written(shape))
    assert len(written(shape)) == BINS
    for one, other in zip(shape.permille, again.permille, strict=True):
        assert one is not None
        assert other is not None
        assert abs(one - other) <= 1


def test_nothing_learned_is_written_as_nothing_and_odd_lengths_are_no_shape() -> None:
    assert written(UsualLoad()) == ()
    assert restored(()) == UsualLoad()
    assert restored([5, 5]) == UsualLoad()


def test_before_a_day_is_known_the_present_decides() -> None:
    shape = observe(UsualLoad(), 300, MIDNIGHT)
    assert outlook(shape, MIDNIGHT, 3600, 500).peak_permille == 300
    assert outlook(UsualLoad(), MIDNIGHT, 3600, 500).peak_permille == 1000


def test_the_peak_is_seen_a_lead_ahead_and_the_trough_before_it_comes() -> None:
    morning = learned(until=10 * 3600.0)  # 10:00, load rises
    now = MIDNIGHT + 4 * DAY + 10 * 3600
    ahead = outlook(morning, now, 3 * 3600, 500).peak_permille
    assert abs(ahead - busy(now + 3 * 3600)) < 60
    evening = learned(until=20 * 3600.0)  # 20:00, load falls
    now = MIDNIGHT + 4 * DAY + 20 * 3600
    coming = outlook(evening, now, HALF_HOUR, 500).peak_permille
    assert coming <= busy(now) + 30


def test_a_busier_day_than_usual_scales_the_outlook() -> None:
    shape = learned(until=10 * 3600.0)
    now = MIDNIGHT + 4 * DAY + 10 * 3600
    usual = outlook(shape, now, 3600, 500).peak_permille
    for step in range(6):
        shape = observe(shape, busy(now) * 1.4, now + 300 * step)
    assert outlook(shape, now + 1500, 3600, 500).peak_permille > usual * 1.2


@given(
    st.lists(st.one_of(st.just(-1), st.integers(0, 1000)), min_size=BINS, max_size=BINS),
    st.integers(0, 1000),
    st.floats(0, DAY),
    st.floats(300, 2 * DAY),
)
def test_every_outlook_is_a_share_of_time(
    bins: list[int], present: int, offset: float, lead: float
) -> None:
    now = MIDNIGHT + offset
    found = outlook(observe(restored(bins), present, now), now, lead, 500)
    assert 0 <= found.peak_permille <= 1000


def test_replicas_that_the_peak_needs_are_not_lent_and_come_back_before_it() -> None:
    ten = [replica(f"r{number}") for number in range(10)]
    wants = lease("x", max_slots=10)
    # 300 permille over 10 replicas at most 500 each: 6 must stay, 7 with the margin for growth.
    quiet = pool(outlook=LoadOutlook(300, 1800.0, 500))
    assert len(lent(world(ten, [wants], pools=[quiet]))) == 3
    held = [slot(wants, one) for one in ten[:4]]
    assert released(world(ten, [wants], held, [quiet])) == {}
    peak = pool(outlook=LoadOutlook(450, 1800.0, 500))
    done = plan(world(ten, [wants], held, [peak]), NOW)
    assert [one.reason for one in done.releases] == [Reason.PEAK_EXPECTED] * 3
    assert "9 of 10 replicas must carry a peak of 450 permille busy within 30 min" in (
        done.releases[0].message
    )
