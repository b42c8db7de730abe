"""The stager: a process beside an engine that reads, checks and decodes bundles for it.

What it finds it hands over in shared memory, so the engine's thread never waits for its
interpreter. It is a child of the engine: it counts to the engine's limits, stands still when the
engine is frozen, and ends with it. It knows no weights and writes none. Whatever becomes of it, the
engine keeps its version, says why, and starts another one:

    Starting --hello--> Ready --decode--> Working --done, refused--> Ready
    any --ended, silent, unreadable--> Lost: what was asked is ``Aborted``, the next one starts

    python -m rose_engines.weights.stager SOCKET FLAGS ENGINE    (two descriptors, its process)

``InThread`` does the same work where it is asked to. Next step: ``staging`` makes an update of it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from rose_core.unreadable import UNREADABLE
from rose_engines.errors import CommitRefused
from rose_engines.node.pace import Pace, give_way
from rose_engines.weights.decoding import Decoded, Decoder, HeldTensor, Outline
from rose_engines.weights.segment import (
    SharedMemory,
    Sizes,
    StagedSegment,
    memory_of,
    nameless_file,
    own_memory,
)

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""Without a sign of life of a stager that works, while this process itself runs."""

_LOOK_SECONDS = 0.02
_ALIVE_SECONDS = 2.0
_HEAD = struct.Struct("<Q")
_FLAGS = struct.Struct("<qq")  # serving is busy; pieces of work done


class Stager(Protocol):
    """Decodes bundles for one engine process."""

    def decode(self, bundle: Path, current: str, pace: Pace) -> Decoded:
        """Read, check and decode a bundle.

        Args:
            bundle: its folder.
            current: digest of the live weights.
            pace: how it works while serving is busy.

        Raises:
            CommitRefused: ``Layout``, ``WrongBase``, ``Corrupt``; ``Aborted``: it may work next
                time.
        """
        ...


class InThread:
    """In the thread that asks.

    Args:
        held: what the engine process holds.
    """

    def __init__(self, held: Sequence[HeldTensor]) -> None:
        self._decoder = Decoder(held)

    def decode(self, bundle: Path, current: str, pace: Pace) -> Decoded:
        """Decode a bundle in this thread."""
        outline, _, segment = self._decoder.decode(bundle, current, own_memory, pace.rest)
        return Decoded(outline, segment)


class _Hold(msgspec.Struct, frozen=True, tag=True):
    held: tuple[HeldTensor, ...]


class _Decode(msgspec.Struct, frozen=True, tag=True):
    bundle: str
    current: str


class _Done(msgspec.Struct, frozen=True, tag=True):
    outline: Outline
    sizes: Sizes


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str
    message: str


_orders: msgspec.msgpack.Decoder[_Hold | _Decode] = msgspec.msgpack.Decoder(_Hold | _Decode)
_answers: msgspec.msgpack.Decoder[_Done | _Refusal] = msgspec.msgpack.Decoder(_Done | _Refusal)
_encoder = msgspec.msgpack.Encoder()


class _Lost(Exception):
    """The stager does not answer any more."""


class OwnProcess:
    """In a process of its own, which is started at once.

    Args:
        held: what the engine process holds.
        patience: seconds without a sign of life.
    """

    def __init__(self, held: Sequence[HeldTensor], patience: float = PATIENCE_SECONDS) -> None:
        self._held = tuple(held)
        self._patience = patience
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process, None = it could not be started."""
        return self._child.pid if self._child is not None else None

    def decode(self, bundle: Path, current: str, pace: Pace) -> Decoded:
        """Have the stager decode a bundle, or start another one."""
        with self._lock:
            if self._child is None or self._child.ended:
                self._start()
            child = self._child
            if child is None:
                raise CommitRefused("Aborted", "no stager can be started; see the engine's log")
            try:
                return child.decode(bundle, current, pace, self._patience)
            except _Lost as lost:
                ending = child.end()
                self._start()
                raise CommitRefused(
                    "Aborted", f"the stager {lost}{ending}; a new one is started"
                ) from lost
            except CommitRefused:
                raise
            except BaseException:  # its answer to this would be taken for one to the next
                self._start()
                raise

    def close(self) -> None:
        """End it."""
        with self._lock:
            if self._child is not None:
                self._child.end()
            self._child = None

    def _start(self) -> None:
        if self._child is not None:
            self._child.end()
        try:
            self._child = _Child(self._held)
        except OSError:
            log.exception("rose: no stager can be started")
            self._child = None


class _Child:
    """One stager process, seen from the engine."""

    def __init__(self, held: tuple[HeldTensor, ...]) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            flags = nameless_file("rose-stager-flags")
            theirs.callback(os.close, flags)
            os.ftruncate(flags, _FLAGS.size)
            self._flags = mmap.mmap(flags, _FLAGS.size)
            self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            theirs.callback(end.close)
            ours.callback(self._socket.close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, (end.fileno(), flags, os.getpid()))],
                stdin=subprocess.DEVNULL,
                pass_fds=(end.fileno(), flags),
                env=_environment(),
            )
            ours.pop_all()  # kept until ``end``
        self.pid = self._process.pid
        self._hello: bytes | None = _frame(_Hold(held))

    @property
    def ended(self) -> bool:
        """It is no process any more."""
        return self._process.poll() is not None

    def end(self) -> str:
        """End it, if it has not ended; says how it had."""
        code = self._process.poll()
        if code is None:
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.close()
        if code is None:
            return ""
        return (
            f" (it ended by {signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        )

    def decode(self, bundle: Path, current: str, pace: Pace, patience: float) -> Decoded:
        """Have a bundle decoded.

        Raises:
            _Lost: it ended, is silent, or says what cannot be read.
            CommitRefused: it refuses.
        """
        descriptors: list[int] = []
        try:
            answer = self._ask(_Decode(str(bundle), current), descriptors, pace, patience)
            if isinstance(answer, _Refusal):
                raise CommitRefused(answer.reason, answer.message)
            if len(descriptors) != 1:
                raise _Lost("handed over no memory")
            memory = memory_of(descriptors[0], answer.sizes.nbytes)
            return Decoded(answer.outline, StagedSegment.over(memory, answer.sizes))
        except (OSError, *UNREADABLE, ValueError) as error:
            raise _Lost(f"was lost: {error}") from error
        finally:
            for one in descriptors:
                os.close(one)

    def _ask(
        self, order: _Decode, descriptors: list[int], pace: Pace, patience: float
    ) -> _Done | _Refusal:
        self._send((self._hello or b"") + _frame(order), pace, patience)
        self._hello = None
        found = bytearray()
        self._receive(found, _HEAD.size, descriptors, pace, patience)
        (length,) = _HEAD.unpack(found)
        body = bytearray()
        self._receive(body, length, descriptors, pace, patience)
        return _answers.decode(bytes(body))

    def _send(self, data: bytes, pace: Pace, patience: float) -> None:
        self._socket.setblocking(False)
        view = memoryview(data)
        while view:
            self._wait(select.POLLOUT, pace, patience)
            view = view[self._socket.send(view) :]

    def _receive(
        self, into: bytearray, size: int, descriptors: list[int], pace: Pace, patience: float
    ) -> None:
        while len(into) < size:
            self._wait(select.POLLIN, pace, patience)
            data, given, _, _ = socket.recv_fds(self._socket, size - len(into), 4)
            descriptors += given
            if not data:
                raise _Lost("hung up")
            into += data

    def _wait(self, events: int, pace: Pace, patience: float) -> None:
        """Wait for the socket, tell whether serving is busy, and listen for signs of life.

        Waiting is counted in looks and not by the clock: while this process is frozen, the stager
        is too.
        """
        poll = select.poll()
        poll.register(self._socket, events)
        silent, seen = 0.0, -1
        while True:
            _, done = _FLAGS.unpack_from(self._flags)
            _set(self._flags, 0, int(pace.busy()))
            if done != seen:
                silent, seen = 0.0, done
            before = time.monotonic()
            if poll.poll(1000 * _LOOK_SECONDS):
                return
            silent += min(time.monotonic() - before, 5 * _LOOK_SECONDS)
            if silent > patience:
                raise _Lost(f"gave no sign of life in {patience:g} s")


def _set(flags: mmap.mmap, number: int, value: int) -> None:
    struct.pack_into("<q", flags, 8 * number, value)


def _frame(message: _Hold | _Decode | _Done | _Refusal) -> bytes:
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


def _environment() -> dict[str, str]:
    """Of the stager: it computes in one thread and is no client of a GPU.

    What is laid over an engine's own memory (SGLang's saver is) has nothing to do there.
    """
    own = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return {**kept, **own}


class _Server:
    """The stager's own side.

    Args:
        connection: to the engine.
        flags: see ``_FLAGS``.
        engine: its process, which is this one's parent while it lives.
    """

    def __init__(self, connection: socket.socket, flags: mmap.mmap, engine: int) -> None:
        self._connection = connection
        self._flags = flags
        self._engine = engine
        self._decoder = Decoder(())
        self._done = 0

    def serve(self) -> None:
        """Until the engine hangs up or is gone."""
        self._connection.settimeout(_ALIVE_SECONDS)
        while (order := self._next()) is not None:
            if isinstance(order, _Hold):
                self._decoder = Decoder(order.held)
            else:
                self._decode(order)

    def _next(self) -> _Hold | _Decode | None:
        head = self._read(_HEAD.size)
        if head is None:
            return None
        body = self._read(_HEAD.unpack(head)[0])
        return _orders.decode(body) if body is not None else None

    def _read(self, size: int) -> bytes | None:
        found = bytearray()
        while len(found) < size:
            try:
                data = self._connection.recv(size - len(found))
            except TimeoutError:  # a forked child of the engine may hold its end open
                if self._orphan:
                    return None
                continue
            if not data:
                return None
            found += data
        return bytes(found)

    @property
    def _orphan(self) -> bool:
        return os.getppid() != self._engine

    def _decode(self, order: _Decode) -> None:
        pace = Pace(lambda: bool(_FLAGS.unpack_from(self._flags)[0]))

        def rest() -> None:
            if self._orphan:  # the process that reported busy serving is gone
                sys.exit(0)
            self._done += 1
            _set(self._flags, 1, self._done)
            pace.rest()

        shared = SharedMemory()
        self._connection.settimeout(None)
        try:
            outline, sizes, segment = self._decoder.decode(
                Path(order.bundle), order.current, shared.room, rest
            )
            del segment
            data = memoryview(_frame(_Done(outline, sizes)))
            sent = socket.send_fds(self._connection, [data[:1]], [shared.descriptor])
            self._connection.sendall(data[sent:])
        except CommitRefused as refused:
            self._connection.sendall(_frame(_Refusal(refused.reason, refused.message)))
        except (OSError, MemoryError) as error:
            message = f"the stager has no room: {type(error).__name__}: {error}"
            self._connection.sendall(_frame(_Refusal("Aborted", message)))
        except Exception as error:  # a bad bundle must not end it
            log.exception("a bundle could not be decoded")
            message = f"{type(error).__name__}: {error}"
            self._connection.sendall(_frame(_Refusal("Corrupt", message)))
        finally:
            shared.close()
            self._connection.settimeout(_ALIVE_SECONDS)


def warm_up() -> None:
    """Load the loops that decode, before there is work."""
    from rose_core.delta.kernels import kernels  # noqa: PLC0415  # numba takes its time

    for kind in ("<u1", "<u2", "<u4", "<u8"):
        nothing = np.zeros(0, kind)
        kernels().unpack(np.zeros(0, np.uint8), np.zeros(0, np.uint8), nothing)


def main(argv: Sequence[str]) -> int:
    """Serve one engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the engine's terminal, which ends the engine
    _ask_to_be_ended_first()
    connection = socket.socket(fileno=int(argv[0]))
    flags, engine = int(argv[1]), int(argv[2])
    with contextlib.suppress(ProcessLookupError):  # it is gone, and so will this process be
        give_way(engine)
    server = _Server(connection, mmap.mmap(flags, _FLAGS.size), engine)
    os.close(flags)
    warm_up()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine is gone
        server.serve()
    return 0


def _ask_to_be_ended_first() -> None:
    """Where memory runs out the engine shall live: it keeps its version without this process.

    Not under an engine host, whose engines may all be ended first and end as a whole.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main(sys.argv[1:]))
