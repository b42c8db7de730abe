"""A serving pod that attacks its reader: ``python hostile.py TRICK [PORT]``; ``/asked`` counts.

Runs by itself inside the pod, so it imports nothing of this repository.
"""

from __future__ import annotations

import ctypes
import http.server
import mmap
import os
import sys
import threading
import time
import zlib
from pathlib import Path

TRICK = sys.argv[1]
SNAPSHOT = Path(f"/dev/shm/sglang_loads_{TRICK}_{os.getpid()}")  # as SGLang names it
PAGE = b"sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n"
BOMB_MIB = 3000
_EXCHANGE = 2  # RENAME_EXCHANGE, renameat2(2)
_AT_CWD = -100
_SET_NAME = 15  # PR_SET_NAME, prctl(2)
asked = {"/metrics": 0}
kept: list[object] = []


def bomb() -> bytes:
    """A page that is a thousand times larger once it is unpacked (RFC 1951, 1952)."""
    pack = zlib.compressobj(1, wbits=-15)
    block = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    head = b"\x1f\x8b\x08" + bytes(7)
    return head + block * BOMB_MIB  # after a full flush a block needs nothing of those before


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers as an engine does, but for the trick."""

    def do_GET(self) -> None:
        """One page."""
        if self.path == "/asked":
            return self._send(str(asked["/metrics"]).encode())
        if self.path == "/metrics":
            asked["/metrics"] += 1
            if TRICK == "bomb":
                return self._send(BOMB, "gzip")
            if TRICK == "endless":
                self.send_response(200)
                self.end_headers()
                while True:
                    self.wfile.write(PAGE * 1000)
            if TRICK == "slow":
                self.send_response(200)
                self.end_headers()
                while True:
                    self.wfile.write(b"#")
                    time.sleep(1)
        return self._send(PAGE)

    def _send(self, body: bytes, encoding: str = "") -> None:
        self.send_response(200)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name
        """Nothing."""


def map_snapshot(path: Path, size: int = 4096) -> int:
    """What an engine has: a load snapshot that its process has mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, size)
    kept.append(mmap.mmap(descriptor, 4096))
    return descriptor


def shrink() -> None:
    """The snapshot is cut off while it is read, and grows again."""
    descriptor = map_snapshot(SNAPSHOT)
    while True:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, 4096)
        time.sleep(0.001)


def exchange() -> None:
    """The snapshot and a pipe change places, so that one is found and the other opened."""
    map_snapshot(SNAPSHOT)
    pipe = SNAPSHOT.with_name(f"pipe_{os.getpid()}")
    os.mkfifo(pipe)
    renameat2 = ctypes.CDLL(None).renameat2
    while True:
        renameat2(_AT_CWD, bytes(SNAPSHOT), _AT_CWD, bytes(pipe), _EXCHANGE)
        time.sleep(0.001)


def names() -> None:
    """Names in /proc that are made to be misread; of this thread, which is the process's first."""
    map_snapshot(SNAPSHOT.with_name(f"{SNAPSHOT.name}\n7f00-7f01 rw-s 0 00:01 1 ..\n(deleted)"))
    ctypes.CDLL(None).prctl(_SET_NAME, b") R 1 1\n\xff(", 0, 0, 0)


def main() -> None:
    """Serve."""
    tricks = {"shrink": shrink, "exchange": exchange}
    if TRICK == "names":
        names()
    elif TRICK == "sparse":
        map_snapshot(SNAPSHOT, 2 << 30)
    elif TRICK in tricks:
        threading.Thread(target=tricks[TRICK], daemon=True).start()
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 30000
    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Answer)
    sys.stdout.write(f"port={server.server_port}\n")  # for whoever chose 0
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    BOMB = bomb() if TRICK == "bomb" else b""
    main()
