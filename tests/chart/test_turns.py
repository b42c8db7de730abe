"""A trainer's turns beside a test: what was sent and cut off is a failure, not another try."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rose_dev.waiting import wait_until
from rose_wire.ports import free_port
from tests.chart.turns import TOKENS, Turns

Answer = Callable[[socket.socket], None]


def respond(one: socket.socket, status: str, body: str) -> None:
    one.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def whole(one: socket.socket) -> None:
    respond(one, "200 OK", json.dumps({"output_ids": [0] * TOKENS}))


def short(one: socket.socket) -> None:
    respond(one, "200 OK", json.dumps({"output_ids": [0]}))


def refuse(one: socket.socket) -> None:
    respond(one, "503 Service Unavailable", "no engine")


def hang_up(_: socket.socket) -> None:
    """Accept the turn and end without a word."""


def reset(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def cut(one: socket.socket) -> None:
    one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


@contextmanager
def router(port: int, answer: Answer) -> Iterator[None]:
    """Listens there and does one thing to every turn."""
    with socket.create_server(("127.0.0.1", port)) as listening:

        def serve() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:  # the test is over
                    return
                with one:
                    one.recv(65536)
                    answer(one)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (hang_up, "cut off"),
        (reset, "cut off"),
        (cut, "cut off"),
        (refuse, "503"),
        (short, "another length"),
    ],
)
def test_a_turn_that_was_sent_and_not_answered_whole_has_failed(answer: Answer, text: str) -> None:
    port = free_port()
    with router(port, answer), Turns(f"http://127.0.0.1:{port}/generate", "t") as turns:
        wait_until(lambda: bool(turns.failed), "a failure", seconds=30)
    assert text in turns.failed[0]
    assert not turns.answered


def test_a_turn_that_nobody_took_in_time_has_failed() -> None:
    port, over = free_port(), threading.Event()

    def wait(_: socket.socket) -> None:
        over.wait(30)

    url = f"http://127.0.0.1:{port}/generate"
    with router(port, wait), Turns(url, "t", seconds=0.5) as turns:
        wait_until(lambda: bool(turns.failed), "a failure", seconds=30)
        over.set()
    assert "timed out" in turns.failed[0]


def test_a_call_that_reached_nobody_is_made_again() -> None:
    port = free_port()
    with Turns(f"http://127.0.0.1:{port}/generate", "t") as turns:
        threading.Event().wait(0.5)  # nobody listens
        with router(port, whole):
            wait_until(lambda: turns.answered > 1, "turns", seconds=30)
    assert turns.failed == []
