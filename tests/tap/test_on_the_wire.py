"""Real packets of real sockets in a namespace of their own, whatever a client may do."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose_agent.os import bpf
from rose_agent.tap import sockets
from rose_core.telemetry.events import Arrived, EndKind
from tests.tap import kernel
from tests.tap.net import (
    PORT,
    READERS,
    Namespace,
    Wire,
    link,
    link_refusal,
    namespace,
    refusal,
    tapped,
)
from tests.telemetry.h2wire import HELLO, SETTINGS, Side, data, token
from tests.telemetry.wire import END, HEAD, chunk, event, post

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
LINKED = pytest.mark.skipif(bool(link_refusal()), reason=link_refusal() or "can link")
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(scope="module", params=READERS)
def inside(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    with namespace(counting=request.param) as made:
        yield made


@pytest.fixture
def wire(inside: Namespace, request: pytest.FixtureRequest) -> Iterator[Wire]:
    with tapped(inside) as tap:
        made = Wire(inside, tap, getattr(request, "param", "127.0.0.1"))
        yield made
        made.close()


def streamed(wire: Wire) -> None:
    wire.send(post())
    wire.answer(HEAD, event(0), event(1), END)


def in_pieces(wire: Wire) -> None:
    whole = post(b"x" * 3000)
    wire.send(whole[:5], whole[5:60], whole[60:2000], whole[2000:])
    wire.answer(HEAD + event(0), event(1) + END)


def chunked_both_ways(wire: Wire) -> None:
    wire.send(b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"{}"), END)
    wire.answer(HEAD, event(0), event(1), END)


def large(wire: Wire) -> None:
    body = b"x" * 400_000
    whole = post(body)
    for at in range(0, len(whole), 50_000):
        wire.send(whole[at : at + 50_000])
    wire.answer(HEAD, event(0), event(1), END)


def over_http2(wire: Wire) -> None:
    client, server = Side(), Side()
    wire.send(HELLO, client.request(1) + data(1, b"{}", last=True))
    wire.answer(SETTINGS + server.response(1), token(1), token(1), data(1, b"", last=True))


@pytest.mark.parametrize("wire", ["127.0.0.1", "::1"], indirect=True)
@pytest.mark.parametrize("talk", [streamed, in_pieces, chunked_both_ways, large, over_http2])
def test_a_streamed_request_however_it_is_sent(wire: Wire, talk: Callable[[Wire], None]) -> None:
    talk(wire)
    health = wire.tap.look()
    assert (health.in_flight, health.problem, health.lost_ns) == (0, "", 0)
    (done,) = wire.tap.done
    assert (done.tokens, done.status, done.how, done.path) == (
        2,
        200,
        EndKind.COMPLETE,
        "/generate",
    )
    assert done.arrived_ns < done.first_ns <= done.ended_ns
    assert (health.seen, health.finished, health.unsure) == (1, 1, 0)


def test_pipelined_requests_on_a_kept_connection(wire: Wire) -> None:
    wire.send(post() + post(), post())
    assert wire.tap.look().in_flight == 3
    wire.answer(HEAD + event(0) + END + HEAD + event(0))
    assert wire.tap.look().in_flight == 2
    wire.answer(event(1) + END + PLAIN)
    assert wire.tap.look().in_flight == 0
    assert [d.tokens for d in wire.tap.done] == [1, 2, 0]


def test_probes_scrapes_and_unknown_paths(wire: Wire) -> None:
    for path, arrives in (("/health", False), ("/metrics", False), ("/brand/new", True)):
        before = wire.tap.book.requests_total
        wire.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert wire.tap.look().in_flight == arrives
        wire.answer(PLAIN)
        assert wire.tap.look().in_flight == 0
        assert wire.tap.book.requests_total - before == arrives


def test_a_client_that_goes_away_is_under_way_until_the_server_stops(wire: Wire) -> None:
    wire.send(post())
    wire.answer(HEAD, event(0))
    wire.client.close()
    assert wire.tap.look().in_flight == 1
    wire.server.close()
    assert wire.tap.look().in_flight == 0
    assert wire.tap.done[0].how in {EndKind.CLOSED, EndKind.RESET}


def test_a_reset_before_the_first_token(wire: Wire) -> None:
    wire.send(post())
    linger = struct.pack("ii", 1, 0)
    wire.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wire.client.close()
    health = wire.tap.look()
    assert (health.in_flight, health.unsure) == (0, 1)
    assert wire.tap.done[0].how is EndKind.RESET


def test_a_slow_reader_holds_its_request_until_the_last_byte_is_on_the_wire(wire: Wire) -> None:
    wire.send(post())
    wire.answer(HEAD)
    wire.server.setblocking(False)
    many = chunk(b"data: " + b"x" * 60_000 + b"\n\n") * 100 + END
    sent = taken = 0
    while taken < len(many):
        try:
            sent += wire.server.send(many[sent : sent + 65536])
        except BlockingIOError:
            assert wire.tap.look().in_flight == 1, "the reader has not taken it all"
            taken += len(wire.client.recv(1 << 20))
            continue
        if sent == len(many):
            taken += len(wire.client.recv(1 << 20))
    assert wire.tap.look().in_flight == 0
    assert wire.tap.done[0].tokens == 100


def test_encrypted_bytes_are_outstanding_until_the_connection_closes(wire: Wire) -> None:
    wire.send(b"\x16\x03\x01\x00\x05hello")
    wire.answer(b"\x16\x03\x03\x00\x05hello")
    wire.send(b"\x17\x03\x03\x00\x05abcde")
    health = wire.tap.look()
    assert (health.opaque, health.in_flight) == (True, 1)
    assert all(e.opaque for e in wire.tap.events if isinstance(e, Arrived))
    wire.close()
    health = wire.tap.look()
    assert (health.opaque, health.in_flight) == (False, 0)


def test_a_tap_that_begins_in_the_middle_of_a_response(inside: Namespace) -> None:
    with tapped(inside) as early:
        wire = Wire(inside, early, "127.0.0.1")
        wire.send(post())
        wire.answer(HEAD, event(0))
        with tapped(inside) as late:
            wire.answer(event(1))
            assert late.look().in_flight == 1
            wire.answer(END)
            assert late.look().in_flight == 0
        wire.close()


@pytest.mark.skipif(bool(kernel.refusal()), reason=kernel.refusal() or "can count")
def test_a_map_that_cannot_be_read_is_a_problem() -> None:
    with namespace(counting=True) as inside, tapped(inside) as tap:
        wire = Wire(inside, tap)
        wire.send(post())
        wire.answer(HEAD, event(0))
        assert tap.look().problem == ""
        wire.answer(event(1))
        counts = tap.replica._counts
        assert counts is not None
        with Path(os.devnull).open("rb") as other:
            os.dup2(other.fileno(), counts._map._descriptor)
        assert "the kernel's counts failed" in tap.look().problem
        wire.close()


def test_events_of_thousands_of_bytes_are_counted_too(wire: Wire) -> None:
    wire.send(post())
    wire.answer(HEAD, event(0))
    wire.tap.look()
    long = [chunk(b'data: {"text":"' + b"x" * size + b'"}\n\n') for size in (4000, 5000, 60_000)]
    wire.answer(*long, *[event(1)] * 20, END)
    wire.tap.look()
    assert wire.tap.done[0].tokens == 24


# --- the sockets themselves


def test_filters_are_locked(inside: Namespace) -> None:
    (taps,), _ = sockets.open_all(inside.path, PORT, ("lo",))
    for tap in taps.all:
        with pytest.raises(PermissionError):
            bpf.attach(tap, bpf.program(22, rate=1))
    taps.close()


def test_other_ports_pass_unseen(inside: Namespace) -> None:
    with tapped(inside) as tap, inside.listen(port=PORT + 1) as server:
        client = inside.connect(port=PORT + 1)
        other, _ = server.accept()
        client.sendall(post())
        other.recv(4096)
        assert tap.look().packets == 0
        client.close()
        other.close()


def test_segments_that_the_kernel_drops_make_the_state_unknown(wire: Wire) -> None:
    tap = wire.tap.replica._taps[0].unsampled
    wire.tap.look()
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    began = time.monotonic_ns()
    wire.send(*[b"x" * 10] * 200)
    assert wire.tap.look().lost_ns >= began


@pytest.mark.parametrize("wanted", ["bell", "unsampled", "sampled"])
def test_what_each_filter_lets_pass(inside: Namespace, wanted: str) -> None:
    (taps,), _ = sockets.open_all(inside.path, PORT, ("lo",))
    received: socket.socket = getattr(taps, wanted)
    sockets.mute(received, muted=False)
    with tapped(inside) as tap:
        wire = Wire(inside, tap, "127.0.0.1")
        wire.send(post())
        wire.answer(HEAD)
        sockets.discard(received)
        tokens = 800
        wire.answer(*[event(0)] * tokens)
        passed = sockets.discard(received)
        low, high = {"bell": (0, 0), "unsampled": (tokens, tokens), "sampled": (40, 200)}[wanted]
        assert low <= passed <= high
        wire.answer(END)
        wire.send(post())
        wire.answer(PLAIN)
        assert sockets.discard(received) == 3, "the end, a request and a head"
        wire.close()
    taps.close()


def test_connections_that_come_and_go_ring_once_when_the_server_ends_its_side(
    inside: Namespace,
) -> None:
    (taps,), _ = sockets.open_all(inside.path, PORT, ("lo",))
    sockets.mute(taps.bell, muted=False)
    with tapped(inside) as tap:
        wire = Wire(inside, tap, "127.0.0.1")
        assert sockets.discard(taps.bell) == 0, "no request yet"
        wire.client.shutdown(socket.SHUT_WR)
        assert sockets.discard(taps.bell) == 0, "the server may still write"
        wire.server.close()
        assert sockets.discard(taps.bell) == 1
        wire.close()
    taps.close()


def test_on_a_mute_socket_hardly_anything_waits(inside: Namespace) -> None:
    (taps,), _ = sockets.open_all(inside.path, PORT, ("lo",))
    with tapped(inside) as tap:
        wire = Wire(inside, tap, "127.0.0.1")
        sockets.mute(taps.unsampled, muted=True)
        sockets.discard(taps.unsampled)
        wire.send(*[b"x"] * 50)
        assert 1 <= sockets.discard(taps.unsampled) < 10
        sockets.mute(taps.unsampled, muted=False)
        wire.send(*[b"x"] * 50)
        assert sockets.discard(taps.unsampled) == 50
        wire.close()
    taps.close()


# --- interfaces


@LINKED
def test_both_directions_of_an_ordinary_interface_and_its_end(inside: Namespace) -> None:
    with namespace() as pod:
        far, near = link(inside, pod, 1)
        with tapped(pod) as tap, pod.listen(near) as server:
            client = inside.connect(near)
            engine, _ = server.accept()
            client.sendall(post())
            engine.recv(4096)
            engine.sendall(HEAD + event(0) + END)
            client.recv(4096)
            health = tap.look()
            assert (health.in_flight, health.finished, health.problem) == (0, 1, "")
            # The engine as a client of the same port elsewhere is none of its own traffic.
            with inside.listen(far) as elsewhere:
                calling = pod.connect(far)
                called, _ = elsewhere.accept()
                calling.sendall(post())
                called.recv(4096)
                assert tap.look().in_flight == 0
                calling.close()
                called.close()
            pod.ip("link", "delete", "eth0")
            assert " down" in tap.look().problem
            client.close()
            engine.close()


@LINKED
@pytest.mark.parametrize("counting", READERS)
def test_on_a_namespace_of_many_interfaces_only_the_servers_own_addresses_count(
    counting: bool,
) -> None:
    """A pod on the host's network: other pods' traffic to the same port passes by."""
    with namespace(counting=counting) as host, namespace() as client_pod:
        _, _ = link(host, client_pod, 2)
        for number in range(8):
            host.ip("link", "add", f"cali{number}", "type", "veth", "peer", "name", f"p{number}")
        with sockets.namespace(host.path):
            assert sockets.interfaces(()) == [sockets.ANY]
        with tapped(host) as tap, host.listen("0.0.0.0") as server:
            for address, where in (("10.77.2.1", client_pod), ("127.0.0.1", host)):
                client = where.connect(address)
                engine, _ = server.accept()
                client.sendall(post())
                engine.recv(4096)
                assert tap.look().in_flight == 1, address
                engine.sendall(HEAD + event(0))
                read = tap.look().packets
                for number in range(9):
                    engine.sendall(event(number))
                assert (tap.look().packets == read) == counting
                engine.sendall(END)
                health = tap.look()
                assert (health.in_flight, health.lost_ns) == (0, 0), address
                assert tap.done[-1].tokens == 10
                client.close()
                engine.close()
            with client_pod.listen("10.77.2.2") as other:
                client = host.connect("10.77.2.2")
                engine, _ = other.accept()
                client.sendall(post())
                engine.recv(4096)
                assert tap.look().in_flight == 0, "served by another pod"
                client.close()
                engine.close()
