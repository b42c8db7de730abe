"""What is no head of HTTP/1 is taken for none."""

from __future__ import annotations

import pytest

from rose_core.telemetry.http1 import parse_head


@pytest.mark.parametrize(
    "line", [b"", b"GET", b"HTTP/1.1", b"GET / FTP/1.1", b"SSH-2.0-server a b", b"data: {} x"]
)
def test_a_line_that_is_no_start_line_is_no_head(line: bytes) -> None:
    assert parse_head(line) is None


def test_both_start_lines_are_heads() -> None:
    asked, answered = parse_head(b"GET /a HTTP/1.1"), parse_head(b"HTTP/1.1 200 OK")
    assert asked is not None
    assert answered is not None
    assert (asked.first, asked.second) == ("GET", "/a")
    assert (answered.first, answered.second) == ("HTTP/1.1", "200")
