"""TLS, and other connections that cannot be read: arrivals and life, never an end."""

from __future__ import annotations

import pytest

from rose_core.identity import PodUid
from rose_core.telemetry.book import Book
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Arrived, Ended, Health, Progress
from rose_core.telemetry.signal import Doubt, Reading, ServingSignal, SignalLimits, advance, merge
from rose_core.wire.sync import SignalSource
from tests.telemetry.wire import HEAD, MS, Conversation, conversation, event, post, tracker

POD = PodUid("r")

HELLO, RECORD = b"\x16\x03\x01\x02\x00hello", b"\x17\x03\x03\x00\x10data"
S = 1_000_000_000


def arrivals(talk: Conversation) -> list[Arrived]:
    return [e for e in talk.events if isinstance(e, Arrived)]


def test_client_records_after_server_records_are_arrivals_without_an_end() -> None:
    talk = conversation()
    talk.client_sends(HELLO)
    talk.client_sends(RECORD)
    assert len(arrivals(talk)) == 1
    talk.server_sends(RECORD)
    talk.client_sends(RECORD)
    assert [a.opaque for a in arrivals(talk)] == [True, True]
    assert (talk.tracker.opaque, talk.tracker.in_flight) == (True, 1)
    talk.finish(by_server=True)
    assert (talk.tracker.opaque, talk.tracker.in_flight) == (False, 0)


def test_server_records_are_signs_of_life() -> None:
    talk = conversation()
    talk.client_sends(HELLO)
    talk.time_ns += 100 * MS
    assert [type(e) for e in talk.server_sends(RECORD)] == [Progress]
    assert talk.server_sends(RECORD) == [], "told now and then"


@pytest.mark.parametrize("by_server", [True, False])
def test_a_tap_that_joins_an_encrypted_connection(by_server: bool) -> None:
    talk = conversation()
    watching = talk.tracker = tracker()
    if by_server:
        talk.server_sends(RECORD)
    else:
        talk.client_sends(RECORD)
    assert (watching.opaque, watching.in_flight) == (True, 1)


def test_switched_protocols_are_followed_no_further_and_never_empty() -> None:
    talk = conversation()
    talk.client_sends(post(path="/realtime"))
    talk.server_sends(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
    assert (talk.tracker.opaque, talk.tracker.in_flight) == (True, 1)
    talk.server_sends(b"\x81\x05hello")
    assert talk.tracker.in_flight == 1


def test_bytes_that_are_no_http_are_an_outstanding_request() -> None:
    talk = conversation()
    talk.client_sends(b"SSH-2.0-what\r\n\r\n")
    assert (talk.tracker.opaque, talk.tracker.in_flight) == (True, 1)


# --- what the signal makes of it


def encrypted(now: int) -> Book:
    """A request on a TLS connection, last heard now."""
    made = Book(now - 60 * S)
    made.apply(Health(POD, now - 59 * S, "", 0, False, 0, {}, 0), now - 59 * S)
    made.apply(Arrived(POD, 1, now, "", opaque=True), now)
    return made


def judged(
    book: Book, readings: tuple[Reading, ...], now: int, verified: bool | None = None
) -> ServingSignal:
    book.apply(Health(POD, now, "", 0, True, len(book.live), {}, 0), now)
    return merge(
        book, verified, readings, allowed=tuple(SignalSource), limits=SignalLimits(), now_ns=now
    )


def polled(now: int, running: int = 0, *, since: int) -> Reading:
    idle, busy = (None, since) if running else (since, None)
    return Reading(SignalSource.LOADS, now, Figures(running, 0, activity=(1,)), busy, idle)


def test_without_figures_encrypted_traffic_is_unknown() -> None:
    assert judged(encrypted(100 * S), (), 160 * S).doubt is Doubt.OPAQUE


@pytest.mark.parametrize("verified", [None, True])
def test_an_outstanding_request_counts_until_figures_were_idle_long_enough(
    verified: bool | None,
) -> None:
    began = 100 * S
    made = encrypted(began)
    for seconds, running in ((0.1, 1), (1.9, 1), (2.1, 0)):
        now = began + int(seconds * S)
        signal = judged(made, (polled(now, since=began - S),), now, verified)
        assert (signal.doubt, signal.running) == (None, running), seconds
    still = judged(made, (polled(now, 1, since=began),), now, verified)
    assert still.running == 1


def test_a_request_that_was_open_while_packets_were_lost_counts_the_same_way() -> None:
    made = Book(0)
    made.apply(Health(POD, S, "", 0, False, 0, {}, 0), S)
    made.apply(Arrived(POD, 1, 100 * S, "/generate"), 100 * S)
    lost = Health(POD, 101 * S, "", 101 * S, False, 1, {}, 0)
    made.apply(lost, 101 * S)
    assert made.outstanding
    later = 110 * S
    made.apply(Health(POD, later, "", 101 * S, False, 1, {}, 0), later)
    alone = merge(made, True, (), allowed=tuple(SignalSource), limits=SignalLimits(), now_ns=later)
    assert alone.running == 1, "nothing says that it ended"
    helped = merge(
        made,
        True,
        (polled(later, since=100 * S),),
        allowed=tuple(SignalSource),
        limits=SignalLimits(),
        now_ns=later,
    )
    assert (helped.running, helped.empty_since_ns) == (0, 100 * S)


def test_a_reader_that_takes_nothing_does_not_keep_an_idle_engine_busy() -> None:
    talk = conversation()
    made = Book(0)
    made.apply(Health(POD, S, "", 0, False, 0, {}, 0), S)
    talk.time_ns = 100 * S
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0))
    for happened in talk.events:
        made.apply(happened, talk.time_ns)
    assert not any(isinstance(e, Ended) for e in talk.events)
    for seconds, running in ((105, 1), (111, 0)):
        now = seconds * S
        made.apply(Health(POD, now, "", 0, False, 1, {}, 0), now)
        signal = merge(
            made,
            True,
            (polled(now, since=100 * S),),
            allowed=tuple(SignalSource),
            limits=SignalLimits(),
            now_ns=now,
        )
        assert signal.running == running


@pytest.mark.parametrize("allowed", [(SignalSource.LOADS,), tuple(SignalSource)])
def test_a_response_that_was_joined_is_over_when_the_engine_is_idle(
    allowed: tuple[SignalSource, ...],
) -> None:
    """Its length stood in a head that nobody read, and its connection stays open."""
    talk = conversation()
    talk.tracker, talk.time_ns = tracker(), 100 * S
    talk.server_sends(b'tail of {"text": "x"}')
    (arrived,) = talk.tracker.open_requests()
    made = Book(0)
    made.apply(Health(POD, S, "", 0, False, 0, {}, 0), S)
    made.apply(arrived, arrived.time_ns)
    for seconds, running in ((1, 1), (4, 0)):
        now = arrived.time_ns + seconds * S
        made.apply(Health(POD, now, "", 0, False, 1, {}, 0), now)
        loads = (polled(now, since=arrived.time_ns),)
        signal = merge(made, True, loads, allowed=allowed, limits=SignalLimits(), now_ns=now)
        assert signal.running == running, seconds


# --- figures that lie


def test_a_level_above_zero_that_nothing_moves_is_a_leak_and_says_nothing() -> None:
    stuck = Figures(running=3, waiting=0, activity=(77,))
    reading = advance(None, SignalSource.LOADS, stuck, S)
    assert reading.busy_since_ns == S
    for second in range(2, 13):
        reading = advance(reading, SignalSource.LOADS, stuck, second * S)
    assert reading.leaking
    assert not reading.plausible
    alone = merge(
        None, None, (reading,), allowed=(SignalSource.LOADS,), limits=SignalLimits(), now_ns=12 * S
    )
    assert alone.running is None


def test_a_level_that_only_grows_is_a_leak_too() -> None:
    reading = None
    for second in range(1, 13):
        grown = Figures(running=second + 1, waiting=0, activity=(77,))
        reading = advance(reading, SignalSource.LOADS, grown, second * S)
    assert reading is not None
    assert not reading.plausible


def test_a_long_request_is_no_leak_while_tokens_move() -> None:
    reading = None
    for second in range(1, 60):
        working = Figures(running=1, waiting=0, activity=(second,))
        reading = advance(reading, SignalSource.LOADS, working, second * S)
    assert reading is not None
    assert reading.busy_since_ns == S


def test_a_bare_level_proves_zero_only_after_it_was_seen_above() -> None:
    def at(level: int, second: int, before: Reading | None) -> Reading:
        figures = Figures(running=level, waiting=0, level_only=True)
        return advance(before, SignalSource.LOADS, figures, second * S)

    never = at(0, 1, at(0, 0, None))
    assert not never.plausible, "a counter that is switched off says zero too"
    seen = at(0, 3, at(2, 2, never))
    assert seen.idle_since_ns == 3 * S
