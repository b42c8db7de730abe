"""Tokens counted in the kernel: the same signal as the reader's, packet for packet.

The *reader* is the tap as it is without a program: every segment goes to the tracker. The *pair* is
the program and whoever reads what it passes. Both are shown the same packets.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rose_agent.tap.kernel_counts import MOST, KernelCounts
from rose_agent.tap.metrics import COUNTED, NOT_ENTRUSTED
from rose_agent.tap.packets import decode
from rose_core.identity import PodUid
from rose_core.telemetry.events import (
    Arrived,
    Counted,
    Ended,
    FirstToken,
    Progress,
    TapEvent,
    progress,
)
from rose_core.telemetry.segments import FIN, RST, SYN, Segment
from rose_core.telemetry.tracker import Tracker
from tests.tap.kernel import Kernel, kernel, refusal
from tests.telemetry.wire import END, HEAD, chunk, event, post

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can count")
PORT = 30000
MS = 1_000_000
_SERVER = {4: b"\x0a\0\0\1", 6: bytes(15) + b"\1"}
DONE = chunk(b"data: [DONE]\n\n")
VLLM = chunk(b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" tok","logprobs":null}]}\n\n')
SGLANG = chunk(b'data: {"text":" a b","meta_info":{"id":"x","completion_tokens":3}}\n\n')
TWO_IN_ONE = chunk(b'data: {"n":1}\n\ndata: {"n":2}\n\n')
QUOTES = chunk(b'data: {"text":"data: data: "}\n\n')
COMMENT = chunk(b": ping\n\n")
LONG = chunk(b'data: {"text":"' + b"x" * 3000 + b'"}\n\n')  # a page holds no longer packet
EXTENDED = b"9;name=value\r\ndata: {}\n\r\n"
PADDED = b'0000d\r\ndata: {"n":}\n\r\n'


@pytest.fixture(scope="module")
def program() -> Iterator[Kernel]:
    with kernel(PORT) as loaded:
        yield loaded


def packet(segment: Segment, version: int = 4) -> bytes:
    client = bytes.fromhex(segment.client[0])
    ports = (segment.client[1], PORT) if segment.to_server else (PORT, segment.client[1])
    tcp = struct.pack("!HHIIBBHHH", *ports, segment.sequence, 0, 0x50, segment.flags, 0, 0, 0)
    tcp += segment.payload
    ends = (client, _SERVER[version]) if segment.to_server else (_SERVER[version], client)
    if version == 6:
        return struct.pack("!IHBB16s16s", 6 << 28, len(tcp), socket.IPPROTO_TCP, 64, *ends) + tcp
    size = len(tcp) + 20
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, size, 0, 0, 64, 6, 0, *ends) + tcp


def numbered() -> Tracker:
    numbers = itertools.count(1)
    return Tracker(PodUid("replica"), lambda: next(numbers))


class Pair:
    """The program and its reader, who reads when it is told to."""

    def __init__(self, program: Kernel, version: int = 4) -> None:
        for key, _ in list(program.streams.all()):
            program.streams.take(key)
        self.program = program
        self.tracker = numbered()
        self.counts = KernelCounts(program.streams, self.tracker)
        self.waiting: list[Segment] = []
        self.events: list[TapEvent] = []
        self.passed = 0
        self._version = version

    def show(self, segment: Segment) -> None:
        raw = packet(segment, self._version)
        if self.program.passes(raw):
            self.passed += 1
            read = decode(raw, PORT, segment.time_ns)
            assert read is not None
            self.waiting.append(read)

    def read(self, most: int = 1 << 30) -> None:
        for segment in self.waiting[:most]:
            self.events += self.counts.feed(segment)
        del self.waiting[:most]

    def rest(self) -> None:
        self.read()
        self.counts.settle()

    def beat(self) -> None:
        self.rest()
        self.events += self.counts.take_all()


@dataclass
class Side:
    """One connection: makes its segments in order."""

    client: tuple[str, int] = ("0a000001", 40000)
    time_ns: int = 0
    next: dict[bool, int] = field(default_factory=lambda: {True: 1000, False: 5000})

    def segment(self, *, to_server: bool, data: bytes = b"", flags: int = 0x10) -> Segment:
        self.time_ns += MS
        begin = self.next[to_server]
        self.next[to_server] = (begin + len(data) + bool(flags & SYN)) % 2**32
        return Segment(self.time_ns, self.client, to_server, begin, flags, data, len(data))

    def opened(self) -> list[Segment]:
        return [self.segment(to_server=side, flags=SYN) for side in (True, False)]

    def asks(self, data: bytes = b"") -> Segment:
        return self.segment(to_server=True, data=data or post())

    def answers(self, *pieces: bytes) -> list[Segment]:
        return [self.segment(to_server=False, data=piece) for piece in pieces]


def same_signal(pair: Pair, segments: list[Segment]) -> Ended | None:
    """What the pair told is what the reader tells; the last end is returned."""
    oracle = numbered()
    listed = [event for one in segments for event in oracle.feed(one)]
    pair.rest()
    told = told_unread(pair)
    pair.beat()
    assert not pair.counts.doubtful
    news = [[e for e in found if not isinstance(e, Progress)] for found in (listed, pair.events)]
    assert news[0] == news[1]
    assert pair.tracker.counts == oracle.counts
    assert pair.tracker.in_flight == oracle.in_flight
    assert _under_way(pair.tracker) == _under_way(oracle)
    expected = told_of(pair, oracle)
    assert {one: tokens for one, (tokens, _) in told.items()} == {
        one: tokens for one, (tokens, _) in expected.items()
    }
    # The tap's own events are at least so far apart.
    assert all(0 <= told[one][1] - at < 5 * MS for one, (_, at) in expected.items())
    ends = [e for e in listed if isinstance(e, Ended)]
    return ends[-1] if ends else None


def told_unread(pair: Pair) -> dict[int, tuple[int, int]]:
    """Tokens of each request that the guard reads off the kernel's own records, and their time."""
    records = (one for one in pair.counts.counted() if isinstance(one, Counted))
    return {request: (tokens, at) for one in records for request, tokens, at in progress(one)}


def told_of(pair: Pair, oracle: Tracker) -> dict[int, tuple[int, int]]:
    """What the records have to say: all that the oracle counts of streams with counted tokens."""
    times = {e.request: e.time_ns for e in pair.events if isinstance(e, Progress)}
    tokens, found = dict(_under_way(oracle)), {}
    for stream in pair.counts._streams.values():
        request = pair.tracker.countable(stream.client)
        if request is not None and stream.tokens:
            found[request.number] = tokens[request.number], times[request.number]
    return found


def _under_way(tracker: Tracker) -> list[tuple[int, int]]:
    return [(request.number, request.tokens()) for request in tracker._under_way()]


# --- one stream


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("token", [event(7), VLLM, SGLANG, TWO_IN_ONE, QUOTES, LONG])
def test_tokens_of_a_stream_are_counted_and_kept_back(
    program: Kernel, token: bytes, version: int
) -> None:
    pair = Pair(program, version)
    side = Side(("0a000001" if version == 4 else "20010db8" + "0" * 24, 40000))
    segments = [*side.opened(), side.asks(), *side.answers(HEAD, token)]
    for one in segments:
        pair.show(one)
    pair.rest()
    before = pair.passed
    stream = side.answers(*[token] * 50)
    for one in stream:
        pair.show(one)
    pair.show(stream[-1])
    assert pair.passed == before, "nobody is woken for them, nor for one that is sent again"
    pair.rest()
    ((number, (tokens, _)),) = told_unread(pair).items()
    assert (number, tokens) == (1, token.count(b"data: ") * 51), "the heartbeat tells them"
    pair.beat()
    taken = [e for e in pair.events if isinstance(e, Progress)]
    assert taken[-1].tokens == token.count(b"data: ") * 51
    rest = [*side.answers(DONE + END), side.segment(to_server=True, flags=FIN)]
    for one in rest:
        pair.show(one)
    ended = same_signal(pair, [*segments, *stream, *rest])
    assert ended is not None
    assert ended.tokens == token.count(b"data: ") * 51


def test_an_event_is_counted_wherever_it_lies_and_what_a_longer_segment_left_is_not(
    program: Kernel,
) -> None:
    """A segment is looked at eight bytes at a time, in memory in which the one before lay."""
    pair, side, other = Pair(program), Side(), Side(("0a000001", 40001))
    left = [chunk(b"data: " + b"x" * place + b"data: [D" * 40 + b"\n\n") for place in range(8)]
    for one in (side, other):
        for segment in [*one.opened(), one.asks(), *one.answers(HEAD, event(0))]:
            pair.show(segment)
    pair.rest()
    before, tokens = pair.passed, 1
    for length in range(70):
        (end,) = other.answers(left[length % 8])
        pair.show(end)
        handed_over = pair.passed
        (segment,) = side.answers(chunk(b": " + b"y" * length + b"\ndata: z\n\n"))
        pair.show(segment)
        tokens += 1
        assert pair.passed == handed_over, "counted, and kept back"
        pair.rest()
        told = told_unread(pair)
        assert told[1][0] == tokens
    assert pair.passed == before + 70, "what may be the last event is the reader's"


def test_an_arrival_a_first_token_and_an_end_are_passed_at_once(program: Kernel) -> None:
    pair, side = Pair(program), Side()
    received: list[type] = []
    for one in [
        *side.opened(),
        side.asks(),
        *side.answers(HEAD, SGLANG, SGLANG, SGLANG, END),
    ]:
        pair.show(one)
        pair.rest()
        received += [type(e) for e in pair.events if not isinstance(e, Progress)]
        pair.events.clear()
    assert [kind for kind in received if kind in {Arrived, FirstToken, Ended}] == [
        *(Arrived, FirstToken, Ended)
    ]
    assert pair.passed == len([*side.opened(), "request", "head", "first", "end"])


@pytest.mark.parametrize(
    "odd",
    [
        DONE,
        EXTENDED,
        PADDED,
        SGLANG[:-1],
        SGLANG[:20],
        SGLANG + SGLANG[:9],
        SGLANG * 17,
        b"xyz",
        b"ffff\r\ndata: ",
        b"\r\n" + SGLANG,
        HEAD,
    ],
)
def test_what_cannot_be_followed_for_sure_is_the_readers(program: Kernel, odd: bytes) -> None:
    pair, side = Pair(program), Side()
    for one in [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]:
        pair.show(one)
    pair.rest()
    pair.waiting.clear()
    before = pair.passed
    shown = side.answers(SGLANG, odd, SGLANG)
    for one in shown:
        pair.show(one)
    assert pair.passed == before + 2, "the odd one, and all that follows"
    pair.show(shown[1]._replace(payload=SGLANG, size=len(SGLANG)))
    assert pair.passed == before + 3, "also what would have fitted in its place"


@pytest.mark.parametrize(
    ("at", "value"), [(6, b"\x20\0"), (2, b"\0\0"), (2, b"\xff\xff")], ids=["more", "none", "long"]
)
def test_a_segment_that_is_not_all_there_is_the_readers(
    program: Kernel, at: int, value: bytes
) -> None:
    """More fragments follow; the length is not told (BIG TCP); it is longer than what is here."""
    pair, side = Pair(program), Side()
    for one in [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]:
        pair.show(one)
    pair.rest()
    (segment,) = side.answers(SGLANG)
    raw = packet(segment)
    assert program.passes(raw[:at] + value + raw[at + 2 :])
    assert program.passes(raw), "from there on all of them"


@pytest.mark.parametrize("flags", [FIN | 0x10, RST, SYN | 0x10])
def test_a_connections_end_is_passed_with_what_it_carries(program: Kernel, flags: int) -> None:
    pair, side = Pair(program), Side()
    segments = [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]
    for one in segments:
        pair.show(one)
    pair.rest()
    rest = [*side.answers(SGLANG), side.segment(to_server=False, data=SGLANG, flags=flags)]
    for one in rest:
        pair.show(one)
    assert len(pair.waiting) == 1
    same_signal(pair, [*segments, *rest])


def test_a_stream_that_never_fits_is_given_up_until_the_next_response(program: Kernel) -> None:
    pair, side = Pair(program), Side()
    halves = [SGLANG[:30], SGLANG[30:]] * 20
    segments = [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG, *halves)]
    for one in segments:
        pair.show(one)
        pair.rest()
    assert not list(program.streams.all()), "the reader has it"
    again = [*side.answers(END), side.asks(), *side.answers(HEAD, SGLANG)]
    for one in again:
        pair.show(one)
        pair.rest()
    assert len(list(program.streams.all())) == 1
    same_signal(pair, [*segments, *again])


def test_a_full_map_leaves_streams_with_the_reader_and_a_closed_one_makes_room(
    program: Kernel,
) -> None:
    pair, sides, shown = Pair(program), [], []
    refused = NOT_ENTRUSTED._value.get()
    for number in range(MOST + 1):
        side = Side((f"0a0000{number >> 8:02x}", 1000 + number % 256))
        sides.append(side)
        shown += [*side.opened(), side.asks(), *side.answers(HEAD, event(1), event(2))]
        for one in shown[-6:]:
            pair.show(one)
            pair.rest()
    assert len(list(program.streams.all())) == MOST
    assert len(pair.waiting) == 0
    assert NOT_ENTRUSTED._value.get() == refused + 2, "after its first token, and its second"
    end = sides[0].segment(to_server=False, flags=RST)
    for one in [end, *sides[-1].answers(event(3))]:
        pair.show(one)
        pair.rest()
        shown.append(one)
    assert len(list(program.streams.all())) == MOST, "the last one took the first one's place"
    same_signal(pair, shown)


def test_what_was_passed_just_before_and_is_sent_again_is_counted_once(program: Kernel) -> None:
    pair, side = Pair(program), Side()
    first = [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]
    for one in first:
        pair.show(one)
    pair.read()
    (late,) = side.answers(SGLANG)
    pair.show(late)  # passed, and waits unread while its stream is entrusted
    pair.counts.settle()
    more = side.answers(SGLANG)
    for one in (late, *more):
        pair.show(one)
    assert len(pair.waiting) == 1
    same_signal(pair, [*first, late, *more])


def test_a_range_that_two_claim_is_doubt_and_not_a_guess(program: Kernel) -> None:
    pair, side = Pair(program), Side()
    for one in [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]:
        pair.show(one)
    pair.rest()
    for one in side.answers(SGLANG):
        pair.show(one)
        pair.tracker.feed(one)
    pair.beat()
    assert pair.counts.doubtful


def test_a_stream_that_was_given_up_and_goes_on_is_the_readers_again(program: Kernel) -> None:
    pair, side = Pair(program), Side()
    for one in [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]:
        pair.show(one)
    pair.rest()
    pair.tracker.expire(side.time_ns + MS, 0)
    assert pair.tracker.in_flight == 0
    for one in side.answers(SGLANG, SGLANG):
        pair.show(one)
    pair.beat()
    assert pair.counts.doubtful
    for one in side.answers(SGLANG):
        pair.show(one)
    pair.rest()
    assert pair.tracker.in_flight == 1


def test_what_was_counted_until_a_stop_is_told_and_everything_is_passed_then(
    program: Kernel,
) -> None:
    pair, side = Pair(program), Side()
    segments = [*side.opened(), side.asks(), *side.answers(HEAD, SGLANG)]
    for one in segments:
        pair.show(one)
    pair.rest()
    counted = COUNTED._value.get()
    kept = side.answers(SGLANG, SGLANG)
    for one in kept:
        pair.show(one)
    pair.events += pair.counts.stop()
    assert COUNTED._value.get() == counted + 2
    read = side.answers(SGLANG, SGLANG)
    for one in read:
        pair.show(one)
        pair.rest()
    assert pair.passed == len([*segments, *read])
    pair.counts.resume()
    more = side.answers(SGLANG, SGLANG)
    for one in more:
        pair.show(one)
        pair.rest()
    assert pair.passed == len([*segments, *read, "the first of them"])
    same_signal(pair, [*segments, *kept, *read, *more])


def test_without_streams_it_passes_what_the_plain_filter_passes(program: Kernel) -> None:
    Pair(program)
    dice = random.Random(5)
    for _ in range(3000):
        raw = bytearray(packet(_any_segment(dice)))
        for _ in range(dice.choice([0, 0, 1, 2])):
            raw[dice.randrange(min(len(raw), 40))] = dice.randrange(256)
        whole = bytes(raw)
        head = (whole[0] & 15) * 4 if whole[0] >> 4 == 4 else 40
        segment = decode(whole, PORT, 0)
        if segment is None:
            continue  # the reader ignores it, whether it is passed or not
        data = head + (whole[head + 12] >> 4) * 4
        wanted = bool(segment.flags & (FIN | SYN | RST)) or data < len(whole)
        fragment = whole[0] >> 4 == 4 and struct.unpack_from("!H", whole, 6)[0] & 0x1FFF
        assert bool(program.passes(whole)) == (wanted and not fragment)


def _any_segment(dice: random.Random) -> Segment:
    payload = dice.choice([b"", b"x", SGLANG, HEAD])
    flags = dice.choice([0x10, 0x18, SYN, FIN | 0x10, RST])
    client = ("0a000001", dice.randrange(1, 65536))
    return Segment(0, client, dice.random() < 0.5, dice.randrange(2**32), flags, payload, 0)


# --- anything


TOKENS = [event(1), VLLM, SGLANG, TWO_IN_ONE, QUOTES, COMMENT, DONE, EXTENDED, LONG]
CUTS = st.lists(st.integers(1, 300), max_size=8)
FATES = st.sampled_from(["plain"] * 12 + ["again", "swap", "lose", "overlap", "older"])
MOMENTS = st.sampled_from(["nothing"] * 6 + ["read one", "settle", "rest", "beat"])
ONE = st.tuples(
    st.lists(st.sampled_from(TOKENS), min_size=1, max_size=30),
    CUTS,
    st.sampled_from(["end", "done", "fin", "reset", "open"]),
)


def _streams(requests: list[tuple[list[bytes], list[int], str]], begin: int) -> list[Segment]:
    """Connections with these responses, each cut into segments at its events and at some bytes."""
    side, segments = Side(), []
    side.next[False] = begin
    segments += side.opened()
    for tokens, cuts, how in requests:
        segments.append(side.asks())
        pieces = [HEAD, *tokens]
        if how in {"end", "done"}:
            pieces.append(DONE + END if how == "done" else END)
        for number, cut in enumerate(cuts):
            at = 1 + (number * 7 + cut) % len(pieces)
            piece = pieces[at - 1]
            pieces[at - 1 : at] = [one for one in (piece[:cut], piece[cut:]) if one]
        segments += side.answers(*pieces)
        if how in {"fin", "reset"}:
            flags = FIN | 0x10 if how == "fin" else RST
            segments.append(side.segment(to_server=False, flags=flags))
            side.next = {to: (number + 9000) % 2**32 for to, number in side.next.items()}
            segments += side.opened()
    return segments


def _disturbed(segments: list[Segment], fates: list[str]) -> list[Segment]:
    """The network's part: some are sent again, late, never, or in other pieces."""
    out: list[Segment] = []
    for number, one in enumerate(segments):
        fate = fates[number % len(fates)] if one.size and not one.to_server else "plain"
        if fate == "lose":
            continue
        if fate == "swap" and out and not out[-1].to_server:
            out.insert(-1, one)
            continue
        out.append(one)
        if fate == "again":
            out.append(one)
        elif fate == "overlap" and one.size > 4:
            longer = one._replace(
                sequence=(one.sequence + 3) % 2**32, payload=one.payload[3:], size=one.size - 3
            )
            out.append(longer)
        elif fate == "older":
            out.append(segments[max(0, number - 3)])
    return out


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(ONE, min_size=1, max_size=4),
    fates=st.lists(FATES, min_size=1, max_size=40),
    moments=st.lists(MOMENTS, min_size=1, max_size=60),
    begin=st.sampled_from([5000, 2**32 - 400]),
)
@example(requests=[([SGLANG] * 20, [], "done")], fates=["plain"], moments=["rest"], begin=5000)
@example(requests=[([SGLANG] * 20, [], "end")], fates=["again"], moments=["settle"], begin=5000)
def test_any_traffic_tells_the_same_signal(
    program: Kernel,
    requests: list[tuple[list[bytes], list[int], str]],
    fates: list[str],
    moments: list[str],
    begin: int,
) -> None:
    segments = _disturbed(_streams(requests, begin), fates)
    pair = Pair(program)
    for one, moment in zip(segments, itertools.cycle(moments)):
        pair.show(one)
        if moment == "read one":
            pair.read(1)
        elif moment == "settle":
            pair.counts.settle()
        elif moment == "rest":
            pair.rest()
        elif moment == "beat":
            pair.beat()
    same_signal(pair, segments)
