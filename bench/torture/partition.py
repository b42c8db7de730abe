"""The link between relay and store, which can be cut in the middle of a block and healed."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

_PIECE = 1 << 14


class Link:
    """Passes bytes between two Unix sockets.

    Args:
        path: where the relay connects.
        upstream: the store's socket.
    """

    def __init__(self, path: Path, upstream: Path) -> None:
        self._upstream = upstream
        self._left: int | None = None
        self._cut = threading.Event()
        self._ends: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size: int) -> None:
        """Cut once so many more bytes have come from the store."""
        self._left = size

    @property
    def is_cut(self) -> bool:
        """Nothing passes."""
        return self._cut.is_set()

    def heal(self) -> None:
        """New connections pass again."""
        self._left = None
        self._cut.clear()

    def close(self) -> None:
        """Cut for good."""
        self._sever()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    if self.is_cut:
                        raise ConnectionRefusedError
                    far.connect(str(self._upstream))
                except OSError:
                    near.close()
                    far.close()
                    continue
                self._ends += [near, far]
                for source, target, counted in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=self._pass, args=(source, target, counted), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        target.sendall(data[: len(data) // 2])
                        self._sever()
                        return
                target.sendall(data)
        for end in (source, target):
            # Closing alone would not wake the thread that reads from it, and until it wakes the
            # other side is not told: a store's death would show only at gRPC's next keep-alive.
            _hang_up(end)
            end.close()

    def _sever(self) -> None:
        self._cut.set()
        ends, self._ends = self._ends, []
        for end in ends:
            _hang_up(end)


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has been closed already
        end.shutdown(socket.SHUT_RDWR)
