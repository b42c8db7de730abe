"""HTTP/2 frames as bytes, with real HPACK."""

from __future__ import annotations

from hpack import Encoder

from rose_core.telemetry.h2frames import END_HEADERS, END_STREAM, PREFACE, FrameType

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


class Side:
    """One end of a connection; its HPACK table is as stateful as a real one's."""

    def __init__(self) -> None:
        self._encoder = Encoder()

    def request(self, stream: int, path: str = "/generate", *, method: str = "POST") -> bytes:
        flags = END_HEADERS | (END_STREAM if method == "GET" else 0)
        return self.headers(
            stream, {":method": method, ":scheme": "http", ":authority": "x", ":path": path}, flags
        )

    def response(self, stream: int, status: int = 200, kind: str = "text/event-stream") -> bytes:
        return self.headers(stream, {":status": str(status), "content-type": kind}, END_HEADERS)

    def headers(self, stream: int, fields: dict[str, str], flags: int) -> bytes:
        return frame(FrameType.HEADERS, stream, self._encoder.encode(list(fields.items())), flags)


def data(stream: int, payload: bytes, *, last: bool = False) -> bytes:
    return frame(FrameType.DATA, stream, payload, END_STREAM if last else 0)


def token(stream: int, number: int = 0) -> bytes:
    return data(stream, b'data: {"n": %d}\n\n' % number)


HELLO = PREFACE + SETTINGS
