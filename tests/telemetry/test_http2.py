"""HTTP/2 in clear text, stream by stream, and what is left when it cannot be read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rose_core.identity import PodUid
from rose_core.telemetry.events import Arrived, Dismissed, Ended, EndKind, FirstToken, Sized
from rose_core.telemetry.h2frames import END_HEADERS, END_STREAM, PADDED, PRIORITY, FrameType
from tests.telemetry.h2wire import HELLO, SETTINGS, Side, data, frame, token
from tests.telemetry.wire import Conversation, conversation, post, tracker

POD = PodUid("replica")


class Talk:
    """A connection that has said its preface."""

    def __init__(self) -> None:
        self.wire: Conversation = conversation()
        self.client, self.server = Side(), Side()
        self.wire.client_sends(HELLO)
        self.wire.server_sends(SETTINGS)

    @property
    def in_flight(self) -> int:
        return self.wire.tracker.in_flight


def ends(events: Sequence[object]) -> list[Ended]:
    return [e for e in events if isinstance(e, Ended)]


def test_a_streamed_request_from_arrival_to_its_true_end() -> None:
    talk = Talk()
    assert talk.wire.events == [], "preface and settings are no request"
    arrived = talk.wire.client_sends(talk.client.request(1) + data(1, b"{}", last=True))
    assert arrived == [
        Arrived(POD, 1, talk.wire.time_ns, "/generate"),
        Sized(POD, 1, -1, "/generate"),
    ]
    assert talk.wire.server_sends(talk.server.response(1)) == []
    assert talk.wire.server_sends(token(1)) == [FirstToken(POD, 1, talk.wire.time_ns)]
    talk.wire.server_sends(token(1) + token(1))
    (end,) = ends(talk.wire.server_sends(data(1, b"data: [DONE]\n\n", last=True)))
    assert (end.tokens, end.status, end.how) == (3, 200, EndKind.COMPLETE)
    assert (talk.in_flight, talk.wire.tracker.opaque) == (0, False)


def test_streams_share_a_connection_and_end_each_for_itself() -> None:
    talk = Talk()
    for number in (1, 3, 5):
        talk.wire.client_sends(talk.client.request(number) + data(number, b"{}", last=True))
    assert talk.in_flight == 3
    for number in (5, 1, 3):
        talk.wire.server_sends(talk.server.response(number) + token(number))
        talk.wire.server_sends(data(number, b"", last=True))
    assert [e.request for e in ends(talk.wire.events)] == [3, 1, 2]
    assert talk.wire.tracker.counts == {"/generate": 3}


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models?x=1"])
def test_probes_and_scrapes_are_told_apart_by_path(path: str) -> None:
    talk = Talk()
    assert talk.wire.client_sends(talk.client.request(1, path, method="GET")) == []
    talk.wire.server_sends(talk.server.response(1, kind="text/plain") + data(1, b"ok", last=True))
    assert talk.wire.events == []
    assert talk.wire.tracker.counts == {path.split("?", maxsplit=1)[0]: 1}


def test_a_header_block_in_pieces_arrives_with_its_first_one() -> None:
    talk = Talk()
    whole = talk.client.request(1, "/health")
    assert [type(e) for e in talk.wire.client_sends(whole[:12])] == [Arrived]
    assert talk.wire.client_sends(whole[12:]) == [Dismissed(POD, 1)]


def test_a_header_block_may_be_padded_and_continued() -> None:
    talk = Talk()
    block = talk.client.request(1)[9:]
    padded = bytes([3]) + bytes(5) + block[:4] + bytes(3)
    talk.wire.client_sends(frame(FrameType.HEADERS, 1, padded, PADDED | PRIORITY))
    talk.wire.client_sends(frame(FrameType.CONTINUATION, 1, block[4:], END_HEADERS))
    assert talk.wire.tracker.counts == {"/generate": 1}


def test_trailers_end_a_grpc_stream_and_its_messages_are_tokens() -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1, "/sglang.Scheduler/Generate"))
    talk.wire.server_sends(talk.server.response(1, kind="application/grpc"))
    message = b"\0\0\0\0\x02ok"
    first = talk.wire.time_ns + 1_000_000
    assert talk.wire.server_sends(data(1, message)) == [], "one message may be the whole answer"
    assert FirstToken(POD, 1, first) in talk.wire.server_sends(data(1, message))
    talk.wire.server_sends(data(1, message))
    trailers = talk.server.headers(1, {"grpc-status": "0"}, END_HEADERS | END_STREAM)
    (end,) = ends(talk.wire.server_sends(trailers))
    assert (end.tokens, end.status, end.how) == (3, 200, EndKind.COMPLETE)


@pytest.mark.parametrize("by_server", [True, False])
def test_a_reset_of_a_stream_ends_its_request_only(by_server: bool) -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1) + talk.client.request(3))
    reset = frame(FrameType.RST_STREAM, 1, bytes(4))
    (end,) = ends(talk.wire.server_sends(reset) if by_server else talk.wire.client_sends(reset))
    assert (end.request, end.how) == (1, EndKind.RESET)
    assert talk.in_flight == 1


def test_goaway_ends_what_the_server_has_not_begun() -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1) + talk.client.request(3))
    talk.wire.server_sends(frame(FrameType.GOAWAY, 0, (1).to_bytes(4) + bytes(4)))
    assert [e.request for e in ends(talk.wire.events)] == [2]


def test_a_closed_connection_ends_every_stream() -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1) + talk.client.request(3))
    assert len(ends(talk.wire.finish(by_server=True))) == 2
    assert talk.in_flight == 0


def test_frames_cut_anywhere_are_put_together() -> None:
    whole, talk = HELLO, Talk()
    client, server = Side(), Side()
    asked = whole + client.request(1) + data(1, b"x" * 300, last=True) + client.request(3)
    reported = SETTINGS + server.response(1) + token(1) + token(1, 2) + data(1, b"", last=True)
    for size in (3, 5, 8, 9, 10, 17):
        talk.wire = conversation()
        for at in range(0, len(asked), size):
            talk.wire.client_sends(asked[at : at + size])
        for at in range(0, len(reported), size):
            talk.wire.server_sends(reported[at : at + size])
        assert talk.in_flight == 1, size
        assert talk.wire.tracker.counts == {"/generate": 2}, size


def test_every_segment_is_needed_while_a_stream_is_open() -> None:
    talk = Talk()
    assert not talk.wire.tracker.needs_every_segment
    talk.wire.client_sends(talk.client.request(1))
    talk.wire.server_sends(talk.server.response(1) + token(1))
    assert talk.wire.tracker.needs_every_segment


def test_a_hole_inside_data_does_no_harm() -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1))
    long = data(1, b"data: " + b"x" * 3000)
    talk.wire.server_sends(talk.server.response(1) + long[:100])
    talk.wire.unseen(long[100:2000])
    talk.wire.server_sends(long[2000:] + data(1, b"", last=True))
    assert (talk.in_flight, talk.wire.tracker.opaque) == (0, False)


def test_lost_framing_leaves_one_outstanding_request_until_the_connection_closes() -> None:
    talk = Talk()
    talk.wire.client_sends(talk.client.request(1) + talk.client.request(3))
    talk.wire.unseen(talk.server.response(1))
    talk.wire.server_sends(token(1))
    assert talk.wire.tracker.opaque
    assert talk.in_flight == 1, "never empty in between"
    assert [e for e in talk.wire.events if isinstance(e, Arrived)][-1].opaque
    talk.wire.finish(by_server=True)
    assert (talk.in_flight, talk.wire.tracker.opaque) == (0, False)


def test_hpack_that_contradicts_itself_is_read_no_further() -> None:
    talk = Talk()
    talk.wire.client_sends(frame(FrameType.HEADERS, 1, b"\xff\xff\xff", END_HEADERS))
    assert talk.wire.tracker.opaque
    assert talk.in_flight == 1


def test_a_tap_that_joins_late_counts_what_has_a_body() -> None:
    talk = Talk()
    talk.client.request(1)  # the dynamic table was filled before the tap began
    watching = talk.wire.tracker = tracker()
    probe, work = talk.client.request(3, "/health", method="GET"), talk.client.request(5)
    talk.wire.client_sends(probe)
    assert watching.in_flight == 0
    talk.wire.client_sends(work + data(5, b"{}", last=True))
    assert watching.in_flight == 1
    talk.wire.server_sends(talk.server.response(5) + token(5))
    assert ends(talk.wire.server_sends(data(5, b"", last=True)))[0].tokens == 1
    assert watching.in_flight == 0


def test_a_tap_that_joins_in_the_middle_of_a_response_waits_for_its_end() -> None:
    talk = Talk()
    watching = talk.wire.tracker = tracker()
    talk.wire.server_sends(token(7))
    assert watching.in_flight == 1
    talk.wire.server_sends(data(7, b"", last=True))
    assert watching.in_flight == 0


def test_http1_is_not_taken_for_frames() -> None:
    late = conversation(tracker())
    watching = late.tracker = tracker()
    late.server_sends(b'data: {"n": 1}\n\n')
    late.server_sends(b"0\r\n\r\n")
    late.client_sends(post())
    assert watching.counts == {"/generate": 1}


def test_any_bytes_in_any_pieces_never_raise_and_resets_clear_up() -> None:
    draw = random.Random(7)
    for _ in range(300):
        client, server = Side(), Side()
        words = [client.request(1), client.request(3, "/health", method="GET")]
        words += [server.response(1), token(1), data(1, b"", last=True), draw.randbytes(12)]
        words += [
            frame(FrameType.GOAWAY, 0, bytes(8)),
            frame(FrameType.RST_STREAM, 3, bytes(4)),
            SETTINGS,
        ]
        talk = conversation()
        talk.client_sends(HELLO[: draw.choice([3, 24, 33])])
        for _ in range(draw.randrange(1, 30)):
            piece = b"".join(draw.choices(words, k=2))[: draw.randrange(1, 60)]
            if draw.random() < 0.1:
                talk.unseen(piece)
            elif draw.random() < 0.5:
                talk.client_sends(piece)
            else:
                talk.server_sends(piece, keep=draw.randrange(0, len(piece) + 1))
        talk.finish(by_server=True, reset=True)
        assert (talk.tracker.in_flight, talk.tracker.opaque) == (0, False)
