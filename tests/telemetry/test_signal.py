"""The book, the comparison of counters, and the merging of sources."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rose_core.identity import PodUid
from rose_core.telemetry.book import Book
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import (
    RECORD,
    Arrived,
    Counted,
    Dismissed,
    Ended,
    EndKind,
    FirstToken,
    Health,
    Progress,
    Sized,
    TapEvent,
)
from rose_core.telemetry.signal import (
    LEAK_NS,
    SPAN_NS,
    Doubt,
    Reading,
    ServingSignal,
    SignalLimits,
    advance,
    merge,
)
from rose_core.wire.sync import SignalSource

POD = PodUid("r")

S = 1_000_000_000
NOW = 100 * S
TAP_ONLY = (SignalSource.WIRE_TAP,)
EVERY = tuple(SignalSource)


def health(
    in_flight: int = 0, *, problem: str = "", lost_ns: int = 0, opaque: bool = False
) -> Health:
    return Health(POD, NOW, problem, lost_ns, opaque, in_flight, {}, 0)


def book(now: int = NOW) -> Book:
    """A tap that has been heard for a minute and was heard just now."""
    made = Book(now - 60 * S)
    made.apply(health(), now - 59 * S)
    made.apply(health(), now)
    return made


def judged(
    source: Book | None,
    readings: tuple[Reading, ...] = (),
    *,
    verified: bool | None = True,
    allowed: tuple[SignalSource, ...] = EVERY,
    now: int = NOW,
) -> ServingSignal:
    return merge(source, verified, readings, allowed=allowed, limits=SignalLimits(), now_ns=now)


def loads(running: int | None, read_ns: int = NOW, *, since: int = NOW - 10 * S) -> Reading:
    return Reading(
        SignalSource.LOADS,
        read_ns,
        Figures(running=running, waiting=0),
        busy_since_ns=since if running else None,
        idle_since_ns=None if running else since,
    )


def test_a_request_through_the_book() -> None:
    made = book()
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    made.apply(Sized(POD, 1, 300), NOW)
    made.apply(FirstToken(POD, 1, NOW + S), NOW + S)
    made.apply(Progress(POD, 1, NOW + 2 * S, 11), NOW + 2 * S)
    (live,) = made.live.values()
    assert (live.size, live.tokens, live.last_ns) == (300, 11, NOW + 2 * S)
    assert made.empty_since_ns() is None
    done = made.apply(Ended(POD, 1, NOW + 3 * S, 21, 200, EndKind.COMPLETE), NOW + 3 * S)
    assert done is not None
    assert (done.ttft_s, done.tpot_s) == (1.0, 0.1)
    assert made.empty_since_ns() == NOW + 3 * S
    assert made.busy_ns(NOW + 9 * S) == 3 * S
    assert made.requests_total == 1


def test_what_the_kernel_has_counted_is_read_off_its_records() -> None:
    made = book()
    for number in (1, 2, 3):
        made.apply(Arrived(POD, number, NOW, ""), NOW)
        made.apply(FirstToken(POD, number, NOW), NOW)
    handed_over = 1 << 31
    records = (
        (7 << 32 | 40, NOW + S, 100, 1, 1, 5),
        (8 << 32 | handed_over | 2, NOW + 2 * S, 100, 1, 2, 1),
        (9 << 32, 0, 0, 0, 3, 1),  # no token since it was entrusted
        (7 << 32 | 9, NOW + S, 100, 1, 4, 0),  # over by now
    )
    made.apply(Counted(POD, b"".join(RECORD.pack(*one) for one in records)), NOW + 3 * S)
    assert [(one.tokens, one.last_ns) for one in made.live.values()] == [
        *((45, NOW + S), (3, NOW + 2 * S), (1, NOW)),
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_was_told_with_a_heartbeat_happened_when_it_says(at_once: bool) -> None:
    """Else a request that came and went between two heartbeats would have taken no time."""
    made = book()
    made.apply(msgspec.structs.replace(health(), at_once=at_once), NOW)
    assert made.busy_ns(NOW + S // 2) == 0
    told: list[TapEvent] = [
        Arrived(POD, 1, NOW + S, ""),
        Sized(POD, 1, 300),
        FirstToken(POD, 1, NOW + 2 * S),
        Ended(POD, 1, NOW + 4 * S, 21, 200, EndKind.COMPLETE),
    ]
    heard = NOW + 9 * S
    moments = []
    for event in told:
        moments.append(made.moment(event, heard))
        made.apply(event, moments[-1])
    expected = [NOW + S, NOW + S, NOW + 2 * S, NOW + 4 * S]
    assert moments == ([heard] * 4 if at_once else expected)
    assert made.busy_ns(heard + S) == (0 if at_once else 3 * S)
    assert made.empty_since_ns() == (heard if at_once else NOW + 4 * S)


def test_a_dismissed_request_never_was() -> None:
    made = book()
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    made.apply(Dismissed(POD, 1), NOW)
    assert (made.live, made.requests_total) == ({}, 0)


@pytest.mark.parametrize("how", [EndKind.RESET, EndKind.CLOSED, EndKind.EXPIRED])
def test_broken_requests_are_no_measure(how: EndKind) -> None:
    made = book()
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    made.apply(FirstToken(POD, 1, NOW + S), NOW + S)
    done = made.apply(Ended(POD, 1, NOW + 3 * S, 21, 200, how), NOW + 3 * S)
    assert done is not None
    assert (done.ttft_s, done.tpot_s) == (None, None)


def test_the_idle_share_follows() -> None:
    made = book()
    assert made.idle_share(NOW) == 1.0, "bursty until the contrary has been seen"
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    assert made.idle_share(NOW + 30 * S) > 0.2, "a long burst is no steady load"
    assert made.idle_share(NOW + 70 * S) < 0.05
    made.apply(Ended(POD, 1, NOW, 1, 200, EndKind.COMPLETE), NOW + 70 * S)
    assert made.idle_share(NOW + 75 * S) > 0.2


# --- merging


def test_a_living_verified_tap_is_believed() -> None:
    made = book()
    signal = judged(made)
    assert (signal.source, signal.running) == (SignalSource.WIRE_TAP, 0)
    assert signal.empty_since_ns is not None
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    made.apply(health(1), NOW)
    assert judged(made).running == 1


def test_silence_of_traffic_is_not_staleness_but_silence_of_the_tap_is() -> None:
    made = book()
    assert judged(made, now=NOW + S // 10).doubt is None
    assert judged(made, now=NOW + S).doubt is Doubt.STALE


@pytest.mark.parametrize(
    ("beat", "verified", "doubt"),
    [
        (health(problem="interface gone"), True, Doubt.LOST),
        (health(lost_ns=NOW), True, Doubt.LOST),
        (health(in_flight=3), True, Doubt.LOST),
        (health(opaque=True), None, Doubt.OPAQUE),
        (health(opaque=True), True, None),
    ],
)
def test_reasons_not_to_believe_the_tap(
    beat: Health, verified: bool | None, doubt: Doubt | None
) -> None:
    made = book()
    made.apply(beat, NOW)
    assert judged(made, verified=verified, allowed=TAP_ONLY).doubt is doubt


@pytest.mark.parametrize("verified", [None, False])
def test_an_unverified_tap_opens_nothing_and_is_not_outvoted(verified: bool | None) -> None:
    signal = judged(book(), (loads(0),), verified=verified)
    assert signal.doubt is Doubt.UNVERIFIED


def test_a_tap_that_has_just_begun_cannot_know_what_is_under_way() -> None:
    made = Book(NOW)
    made.apply(health(), NOW)
    assert judged(made).doubt is Doubt.LOST
    made.apply(health(), NOW + 3 * S)
    assert judged(made, now=NOW + 3 * S).doubt is None


def test_after_blindness_nothing_is_under_way_and_nothing_is_known() -> None:
    made = book()
    made.apply(Arrived(POD, 1, NOW, ""), NOW)
    made.apply(health(problem="gone"), NOW)
    assert made.live == {}
    made.apply(health(), NOW + S)
    assert judged(made, now=NOW + S).doubt is Doubt.LOST


def test_figures_that_show_work_for_long_contradict_an_empty_tap() -> None:
    made = book()
    recent = judged(made, (loads(2, since=NOW - S),))
    assert recent.doubt is None
    assert judged(made, (loads(2),)).doubt is Doubt.CONTRADICTED
    old_news = judged(made, (loads(2, read_ns=NOW - S),))
    assert old_news.doubt is None


def test_figures_stand_alone_where_no_tap_is_allowed() -> None:
    polled = (SignalSource.LOADS,)
    assert judged(book(), (loads(0),), allowed=polled).running == 0
    assert judged(None, (loads(2),), allowed=polled).running == 2
    assert judged(None, (loads(0, read_ns=NOW - S),), allowed=polled).doubt is Doubt.NO_SIGNAL
    assert judged(None, (loads(None),), allowed=polled).doubt is Doubt.NO_SIGNAL


def test_figures_replace_a_tap_only_when_it_is_long_absent_or_opaque() -> None:
    made = book()
    assert judged(made, (loads(0, NOW + S),), now=NOW + S).doubt is Doubt.STALE
    later = NOW + 20 * S
    assert judged(made, (loads(0, later),), now=later).source is SignalSource.LOADS
    made.apply(health(opaque=True), NOW)
    assert judged(made, (loads(0),), verified=None).source is SignalSource.LOADS


def test_the_metrics_page_never_says_empty() -> None:
    page = Reading(SignalSource.METRICS, NOW, Figures(running=0, waiting=0), idle_since_ns=0)
    assert judged(None, (page,)).doubt is Doubt.NO_SIGNAL


def test_a_moving_token_counter_is_work() -> None:
    quiet = Figures(running=0, waiting=0, activity=(5,))
    first = advance(None, SignalSource.LOADS, quiet, NOW)
    assert first.idle_since_ns == NOW
    moved = Figures(running=0, waiting=0, activity=(6,))
    second = advance(first, SignalSource.LOADS, moved, NOW + 1)
    assert (second.busy_since_ns, second.idle_since_ns) == (NOW + 1, None)
    assert judged(None, (second,), allowed=(SignalSource.LOADS,)).running == 1


def test_time_with_work_adds_up_as_the_figures_show_it() -> None:
    def look(before: Reading | None, running: int | None, at: int) -> Reading:
        return advance(before, SignalSource.LOADS, Figures(running=running, activity=(at,)), at)

    busy = look(look(None, 1, NOW), 2, NOW + S)
    assert busy.worked_ns == S
    idle = advance(busy, SignalSource.LOADS, replace(busy.figures, running=0), NOW + 2 * S)
    assert idle.worked_ns == S, "nothing moved and nothing runs"
    assert look(idle, None, NOW + 3 * S).worked_ns == S, "no answer is no work"
    late = look(idle, 1, NOW + 60 * S)
    assert late.worked_ns == S + SPAN_NS, "a minute without an answer is not a minute of work"


def test_a_leak_is_no_work() -> None:
    figures = Figures(running=1, activity=(5,))
    leaking = advance(None, SignalSource.LOADS, figures, NOW)
    for second in range(1, 40):
        leaking = advance(leaking, SignalSource.LOADS, figures, NOW + second * S)
    assert leaking.worked_ns <= LEAK_NS
