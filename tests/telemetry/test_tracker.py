"""The tracker on built byte streams: every way a request can look, and every way it can end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rose_core.identity import PodUid
from rose_core.telemetry.events import (
    Arrived,
    Dismissed,
    Ended,
    EndKind,
    FirstToken,
    Progress,
    Sized,
)
from tests.telemetry.wire import END, HEAD, Conversation, chunk, conversation, event, post, tracker

POD = PodUid("replica")


def ends(events: Sequence[object]) -> list[Ended]:
    return [e for e in events if isinstance(e, Ended)]


def test_a_streamed_request_from_arrival_to_its_true_end() -> None:
    talk = conversation()
    assert talk.client_sends(post()) == [
        Arrived(POD, 1, talk.time_ns, "/generate"),
        Sized(POD, 1, 16, "/generate"),
    ]
    assert talk.server_sends(HEAD) == [], "headers are not the first token"
    first = talk.server_sends(event(0))
    assert first == [FirstToken(POD, 1, talk.time_ns)]
    for number in range(1, 100):
        talk.server_sends(event(number))
    talk.server_sends(chunk(b"data: [DONE]\n\n"))
    assert talk.tracker.in_flight == 1
    (end,) = ends(talk.server_sends(END))
    assert (end.tokens, end.status, end.how) == (100, 200, EndKind.COMPLETE)
    assert talk.tracker.in_flight == 0
    assert any(isinstance(e, Progress) for e in talk.events)


def test_keep_alive_reuses_the_connection() -> None:
    talk = conversation()
    for number in range(1, 4):
        talk.client_sends(post())
        talk.server_sends(HEAD + event(0) + event(1) + END)
        assert talk.tracker.in_flight == 0
        assert ends(talk.events)[-1].request == number
    assert talk.tracker.counts == {"/generate": 3}


def test_a_plain_response_ends_with_its_length() -> None:
    talk = conversation()
    talk.client_sends(post())
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
    assert ends(talk.server_sends(head + b"12345")) == []
    assert talk.tracker.needs_every_segment
    (end,) = ends(talk.server_sends(b"67890"))
    assert end.how is EndKind.COMPLETE
    assert end.tokens == 0


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/loads", "/ready?verbose=1"])
def test_probes_and_scrapes_are_no_arrivals(path: str) -> None:
    talk = conversation()
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    assert talk.client_sends(request) == []
    assert talk.tracker.in_flight == 0
    talk.server_sends(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert talk.events == []
    assert talk.tracker.counts == {path.split("?", maxsplit=1)[0]: 1}


def test_a_probe_in_two_segments_is_an_arrival_until_its_path_is_known() -> None:
    talk = conversation()
    assert talk.client_sends(b"GET /met") == [Arrived(POD, 1, talk.time_ns, "")]
    assert talk.client_sends(b"rics HTTP/1.1\r\nHost: x\r\n\r\n") == [Dismissed(POD, 1)]
    assert talk.tracker.in_flight == 0


def test_an_unknown_path_counts_as_generating() -> None:
    talk = conversation()
    events = talk.client_sends(b"GET /brand/new HTTP/1.1\r\nHost: x\r\n\r\n")
    assert [type(e) for e in events] == [Arrived, Sized]


def test_a_request_in_pieces_arrives_with_its_first_one() -> None:
    talk = conversation()
    whole = post(b"x" * 100)
    start = talk.client_sends(whole[:7])
    assert [type(e) for e in start] == [Arrived]
    assert talk.client_sends(whole[7:30]) == []
    assert talk.client_sends(whole[30:90]) == [Sized(POD, 1, 100, "/generate")]
    assert talk.client_sends(whole[90:]) == []
    assert talk.tracker.in_flight == 1


def test_a_chunked_request_body_is_followed_to_its_end() -> None:
    talk = conversation()
    talk.client_sends(b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert talk.events[-1] == Sized(POD, 1, -1, "/generate")
    for _ in range(3):
        talk.client_sends(chunk(b"{}" * 20))
    talk.client_sends(END)
    talk.server_sends(HEAD + event(0) + END)
    talk.client_sends(post())
    assert [e.request for e in talk.events if isinstance(e, Arrived)] == [1, 2]


def test_pipelined_requests_are_answered_in_order() -> None:
    talk = conversation()
    talk.client_sends(post() + post())
    assert talk.tracker.in_flight == 2
    talk.server_sends(HEAD + event(0) + END + HEAD + event(0))
    assert talk.tracker.in_flight == 1
    talk.server_sends(event(1) + END)
    assert [(e.request, e.tokens) for e in ends(talk.events)] == [(1, 1), (2, 2)]


def test_expect_continue_is_not_the_end() -> None:
    talk = conversation()
    talk.client_sends(post()[:60])
    talk.server_sends(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert talk.tracker.in_flight == 1
    talk.client_sends(post()[60:])
    talk.server_sends(HEAD + event(0) + END)
    assert ends(talk.events)[0].status == 200


@pytest.mark.parametrize("status", [400, 404, 503])
def test_refusals_end_too(status: int) -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)
    assert ends(talk.events)[0].status == status


def test_a_client_that_goes_away() -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0))
    assert talk.finish(by_server=False) == [], "the server has not stopped yet"
    assert talk.tracker.in_flight == 1
    (end,) = ends(talk.finish(by_server=True))
    assert end.how is EndKind.CLOSED
    assert talk.tracker.in_flight == 0


def test_a_reset_before_the_first_token() -> None:
    talk = conversation()
    talk.client_sends(post())
    (end,) = ends(talk.finish(by_server=False, reset=True))
    assert (end.how, end.tokens) == (EndKind.RESET, 0)


def test_a_body_without_length_ends_with_the_connection() -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc")
    talk.server_sends(b"def")
    assert talk.tracker.in_flight == 1
    assert ends(talk.finish(by_server=True))[0].how is EndKind.CLOSED


def test_retransmissions_change_nothing() -> None:
    talk = conversation()
    request = post()
    talk.client_sends(request)
    talk.client_sends(request, again=len(request))
    assert talk.tracker.in_flight == 1
    talk.server_sends(HEAD)
    talk.server_sends(event(0))
    talk.server_sends(event(0), again=len(event(0)))
    overlapping = event(0)[-4:] + event(1)
    talk.server_sends(overlapping, again=4)
    (end,) = ends(talk.server_sends(END))
    assert end.tokens == 2


def test_a_retransmitted_end_is_no_new_response() -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0) + END)
    assert talk.server_sends(END, again=len(END)) == []
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0) + END)
    (first, second) = ends(talk.events)
    assert (first.request, second.request) == (1, 2)
    assert talk.tracker.in_flight == 0


def test_a_new_head_ends_a_body_whose_boundaries_were_lost() -> None:
    talk = conversation()
    talk.server_sends(event(3))  # joined late: whose response this was is not known
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0))
    assert talk.tracker.in_flight == 1, "the response that was joined has been replaced"
    talk.server_sends(END)
    (replaced, complete) = ends(talk.events)
    assert (replaced.how, complete.how) == (EndKind.REPLACED, EndKind.COMPLETE)
    assert (complete.status, complete.tokens) == (200, 1)


def test_sequence_numbers_wrap() -> None:
    talk = conversation()
    talk.sequence = {True: 2**32 - 10, False: 2**32 - 60}
    fresh = tracker()
    talk.tracker = fresh
    talk.client_sends(post())
    talk.server_sends(HEAD)
    assert fresh.in_flight == 1
    talk.server_sends(event(0) + END)
    assert fresh.in_flight == 0
    assert [(one.how, one.tokens) for one in ends(talk.events)] == [(EndKind.COMPLETE, 1)]


def test_what_is_unseen_may_cross_the_wrap() -> None:
    talk = conversation()
    fresh = tracker()
    talk.tracker, talk.sequence = fresh, {True: 1, False: 2**32 - len(HEAD) - len(event(0)) - 5}
    talk.client_sends(post())
    talk.server_sends(HEAD)
    talk.server_sends(event(0))
    talk.unseen(event(1))
    talk.server_sends(event(2) + END)
    assert fresh.in_flight == 0


def test_sampled_streams_end_by_their_tail_and_count_by_bytes() -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(HEAD)
    talk.server_sends(event(0))
    draw = random.Random(5)
    total = 2000
    for number in range(1, total):
        piece = event(number % 10)
        if draw.random() < 1 / 8:
            talk.server_sends(piece)
        else:
            talk.unseen(piece)
    assert talk.tracker.in_flight == 1
    (end,) = ends(talk.server_sends(END))
    assert end.how is EndKind.COMPLETE
    assert end.tokens == pytest.approx(total, rel=0.02)
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0) + END)
    assert talk.tracker.in_flight == 0, "the next request is followed as usual"


def test_events_that_grow_are_counted_by_the_size_they_have_where_they_were_left_out() -> None:
    """SGLang repeats the text so far in every event; sampling begins in the middle of a stream."""
    dice = random.Random(1)
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(HEAD)
    for number in range(600):
        piece = chunk(b"data: " + b"x" * (4 * number) + b"\n\n")
        if number < 200 or not dice.randrange(8):
            talk.server_sends(piece)
        else:
            talk.unseen(piece)
    (end,) = ends(talk.server_sends(END))
    assert end.tokens == pytest.approx(600, rel=0.02)


def test_first_tokens_and_plain_bodies_forbid_sampling() -> None:
    talk = conversation()
    talk.client_sends(post())
    seen = [talk.tracker.needs_every_segment]
    talk.server_sends(HEAD + event(0))
    seen.append(talk.tracker.needs_every_segment)
    other = conversation(talk.tracker, port=40001)
    other.client_sends(post())
    seen.append(talk.tracker.needs_every_segment)
    assert seen == [True, False, True], "only while every request streams its tokens"


def test_a_body_cut_by_the_capture_is_counted_by_its_length() -> None:
    talk = conversation()
    talk.client_sends(post(b"x" * 9000), keep=4000)
    talk.server_sends(HEAD + event(0) + END)
    talk.client_sends(post())
    assert [e.request for e in talk.events if isinstance(e, Arrived)] == [1, 2]
    assert talk.tracker.in_flight == 1


def test_a_tap_that_joins_in_the_middle_of_a_response() -> None:
    watching = tracker()
    talk = conversation(tracker())
    talk.tracker = watching
    talk.server_sends(event(7))
    assert watching.in_flight == 1, "somebody is being served"
    talk.server_sends(event(8))
    talk.server_sends(END)
    assert watching.in_flight == 0


def test_a_tap_that_joins_in_the_middle_of_a_request_body() -> None:
    watching = tracker()
    talk = conversation(tracker())
    talk.tracker = watching
    talk.client_sends(b"rest of a body")
    assert watching.in_flight == 1
    talk.server_sends(HEAD + event(0) + END)
    assert watching.in_flight == 0


def test_a_reused_port_starts_anew() -> None:
    talk = conversation()
    talk.client_sends(post())
    talk.open()
    assert ends(talk.events)[0].how is EndKind.REPLACED
    assert talk.tracker.in_flight == 0


@pytest.mark.parametrize("how", ["fin", "reset", "keep-alive"])
def test_segments_that_show_twice_change_nothing(how: str) -> None:
    """A segment can pass on both sockets while the tap changes from one to the other."""
    talk = conversation()
    for _ in range(2):
        talk.client_sends(post())
        talk.server_sends(HEAD + event(0))
        talk.server_sends(event(1) + END)
    if how != "keep-alive":
        talk.finish(by_server=True, reset=how == "reset")
    reported, segments = talk.events, talk.segments
    for end in range(1, len(segments) + 1):
        for begin in range(end):
            again = tracker()
            shown = [*segments[:end], *segments[begin:end], *segments[end:]]
            assert [e for s in shown for e in again.feed(s)] == reported


def test_data_after_a_reset_is_no_new_request() -> None:
    """The server may still be writing when the client's reset reaches the tap."""
    talk = conversation()
    talk.client_sends(post())
    talk.server_sends(HEAD + event(0))
    talk.finish(by_server=False, reset=True)
    talk.server_sends(event(1))
    assert talk.tracker.in_flight == 0


def test_silent_connections_expire() -> None:
    talk = conversation()
    talk.client_sends(post())
    assert talk.tracker.expire(talk.time_ns + 10, age_ns=1000) == []
    (end,) = ends(talk.tracker.expire(talk.time_ns + 2000, age_ns=1000))
    assert end.how is EndKind.EXPIRED
    assert talk.tracker.in_flight == 0


def test_paths_are_counted_within_bounds() -> None:
    talk = conversation()
    for number in range(200):
        talk.client_sends(f"GET /p{number} HTTP/1.1\r\n\r\n".encode())
        talk.server_sends(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
    assert len(talk.tracker.counts) <= 64


def test_what_is_under_way_is_what_every_connection_says_if_all_are_asked() -> None:
    draw = random.Random(12)
    words = [post(), HEAD, event(1), END, b"GET /health HTTP/1.1\r\n\r\n"]
    words.append(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n12345")
    for _ in range(100):
        watching = tracker()
        talks = [Conversation(watching, ("0a000001", 40000 + n)) for n in range(3)]
        for _ in range(draw.randrange(1, 40)):
            talk, data = draw.choice(talks), draw.choice(words)
            if draw.random() < 0.05:
                talk.finish(by_server=True, reset=draw.random() < 0.5)
            elif data.startswith((b"POST", b"GET")):
                talk.client_sends(data)
            else:
                talk.server_sends(data)
            if draw.random() < 0.5:
                asked = [c.talk for c in watching._connections.values() if c.talk is not None]
                busy = [talk for talk in asked if next(talk.requests(), None) is not None]
                assert watching.in_flight == len(watching.open_requests())
                assert watching.needs_every_segment == any(t.needs_every_segment for t in busy)
                assert watching.ends_unmarked == any(t.ends_unmarked for t in busy)


def test_any_bytes_in_any_pieces_never_raise_and_resets_clear_up() -> None:
    draw = random.Random(11)
    words = [
        post(),
        HEAD,
        event(1),
        END,
        b"\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff",
        b"zz\r\n",
    ]
    for _ in range(300):
        watching = tracker()
        talk = conversation(watching)
        for _ in range(draw.randrange(1, 30)):
            data = b"".join(draw.choices(words, k=draw.randrange(1, 4)))
            cut = data[: draw.randrange(1, len(data) + 1)]
            if draw.random() < 0.2:
                talk.unseen(cut)
            elif draw.random() < 0.5:
                talk.client_sends(cut)
            else:
                talk.server_sends(cut, keep=draw.randrange(0, len(cut) + 1))
        talk.finish(by_server=True, reset=True)
        assert watching.in_flight == 0
