"""An engine's side of the platform's pool of keys: what is asked of it, how long, and when not.

The pool is reached by a process beside the engine (``pool_process``). What it brings lies in memory
that both have; what it takes away it reads in the lease's folder. Nothing here may hold the engine
up:

| what | bound |
|---|---|
| a turn that waits for its pages | ``kv_store.patience``: what their prefill would take |
| an answer that is late, a process that died | it is ended; none is asked for ``REST_SECONDS`` |
| a closed permit | no order is given; one that is under way ends, ``AT_ONCE`` pages |
| pages to be written | ``WAITING`` at most; what comes then is not written |

Time in which the engine itself was frozen is not counted: its process was, too. Next step:
``sglang.kv_backend`` asks.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import IO, Any, cast

from rose_core.rollouts.engines.kv_store import KvPoolSpec, patience
from rose_engines.kv.pool_process import AT_ONCE, PoolSetup, pieces

log = logging.getLogger(__name__)

POOL_VARIABLE = "ROSE_KV_POOL"

REST_SECONDS = 10.0
"""After a failure, in which all is computed."""

START_SECONDS = 30.0
"""Until the process has joined the pool; nobody waits for it."""

WAITING = 512
"""Pages that wait to be written: 1 GiB of an 8B's."""

_PUSH_SECONDS = 5.0  # nobody waits for it but the next page
_SLICE_SECONDS = 0.02


def to_text(spec: KvPoolSpec) -> str:
    """For an engine's environment."""
    return json.dumps(asdict(spec))


def from_environment() -> KvPoolSpec | None:
    """What this engine was told; None = of no pool."""
    text = os.environ.get(POOL_VARIABLE)
    return KvPoolSpec(**json.loads(text)) if text else None


class _Silent(Exception):
    """The process does not answer."""


class KvPool:
    """The pool, for one engine.

    Args:
        command: starts the process.
        setup: its first line.
        bytes_per_second: of the link.
        seconds_per_token: of the engine's prefill; 0 = it has not prefilled yet.
        may_move: waits until the permit is open; False = nothing is to be moved.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: PoolSetup,
        bytes_per_second: float,
        seconds_per_token: Callable[[], float],
        may_move: Callable[[], bool],
    ) -> None:
        memory = os.memfd_create("rose-kv-pool")
        os.ftruncate(memory, AT_ONCE * setup.page_bytes)
        self._pulled = pieces(memoryview(mmap.mmap(memory, 0)), setup.page_bytes)
        self._command, self._setup = list(command), replace(setup, shared=memory)
        self._rate = bytes_per_second
        self._seconds_per_token, self._may_move = seconds_per_token, may_move
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._ready = False
        self._started = 0.0
        self._rests_until = 0.0
        self._waiting: queue.Queue[str] = queue.Queue(WAITING)
        with self._lock:
            self._look()
        threading.Thread(target=self._write, name="rose-kv-pool", daemon=True).start()

    def count(self, pages: Sequence[str]) -> int:
        """How many of the first pages are worth pulling: they are there, and that is quicker."""
        waits = self._patience(len(pages))
        if not waits or not self._may_move():
            return 0
        found = self._ask("count", pages, waits)[0]
        return found if self._patience(found) else 0

    def pull(self, pages: Sequence[str], into: Sequence[memoryview]) -> int:
        """Bring pages, the first ones first, for as long as that is quicker; how many came."""
        left = self._patience(len(pages))
        for place in range(0, len(pages), AT_ONCE):
            some = pages[place : place + AT_ONCE]
            if left <= 0 or not self._may_move():
                return place
            done, took = self._ask("pull", some, left, into[place : place + AT_ONCE])
            left -= took
            if done < len(some):  # what follows is of no use without it
                return place + done
        return len(pages)

    def push(self, page: str) -> None:
        """Have a page of the folder written to the pool, in a while; dropped where many wait."""
        try:
            self._waiting.put_nowait(page)
        except queue.Full:
            log.debug("rose: %s is not written to the pool, too many wait", page)

    def close(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._rests_until = float("inf")
            self._end()

    def _patience(self, pages: int) -> float:
        size = self._setup.page_bytes
        return patience(pages, size, self._seconds_per_token(), self._rate) if pages else 0.0

    def _write(self) -> None:
        while True:
            some = [self._waiting.get()]
            while len(some) < AT_ONCE and not self._waiting.empty():
                some.append(self._waiting.get())
            if self._may_move():
                self._ask("push", some, _PUSH_SECONDS)

    def _ask(
        self, what: str, pages: Sequence[str], seconds: float, into: Sequence[memoryview] = ()
    ) -> tuple[int, float]:
        """Pages for which it was done, and the seconds that it took; 0 where none could be asked.

        Args:
            what: to do.
            pages: names.
            seconds: after which the process is given up, waiting for its turn included.
            into: where what was pulled is copied, before anybody else asks.
        """
        began = time.monotonic()
        if not self._lock.acquire(timeout=seconds):
            return 0, seconds
        try:
            if not self._look() or self._process is None:
                return 0, 0.0
            waited = min(time.monotonic() - began, seconds)
            order = json.dumps({"do": what, "pages": list(pages)}) + "\n"
            try:
                cast("IO[bytes]", self._process.stdin).write(order.encode())
                reply, took = self._reply(seconds - waited)
                done = int(reply["done"])
                for target, page in zip(into[:done], self._pulled, strict=False):
                    target[:] = page
                return done, waited + took
            except (OSError, _Silent, ValueError, KeyError) as error:
                self._rest(f"{what} of {len(pages)} pages: {error or 'it is late'}")
                return 0, seconds
        finally:
            self._lock.release()

    def _look(self) -> bool:
        """Whether the process can be asked; where there is none, and none has to rest, start it."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._rests_until:
                self._start(now)
            return False
        if self._process.poll() is not None:
            self._rest(f"it has ended with code {self._process.returncode}")
        elif not self._ready:
            try:
                self._ready = bool(self._reply(0.0)[0]["ready"])
            except _Silent:
                if now - self._started > START_SECONDS:
                    self._rest("it does not join the pool")
            except (OSError, ValueError, KeyError) as error:
                self._rest(str(error))
        return self._ready

    def _start(self, now: float) -> None:
        self._started, self._read, self._ready = now, b"", False
        pipe = subprocess.PIPE
        try:
            own = {name: text for name, text in os.environ.items() if name != POOL_VARIABLE}
            self._process = subprocess.Popen(
                *(self._command, 0),
                stdin=pipe,
                stdout=pipe,
                env=own,
                pass_fds=[self._setup.shared],
            )
            line = self._setup.line() + "\n"
            cast("IO[bytes]", self._process.stdin).write(line.encode())
        except OSError as error:
            self._rest(str(error))

    def _reply(self, seconds: float) -> tuple[dict[str, Any], float]:
        """The next line, and how long it took; a time in which this process stood still is none.

        Raises:
            _Silent: there is none in time.
            OSError, ValueError: there will be none.
        """
        output = cast("IO[bytes]", cast("subprocess.Popen[bytes]", self._process).stdout)
        waited = 0.0
        while b"\n" not in self._read:
            began = time.monotonic()
            timeout = min(_SLICE_SECONDS, max(seconds - waited, 0.0))
            readable = select.select([output], [], [], timeout)[0]
            waited += min(time.monotonic() - began, 2 * _SLICE_SECONDS)
            if readable:
                got = os.read(output.fileno(), 65536)
                if not got:
                    raise OSError("it has ended")
                self._read += got
            elif waited >= seconds:
                raise _Silent
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line), waited

    def _rest(self, why: str) -> None:
        log.warning("rose: the pool of keys is left alone for %.0f s: %s", REST_SECONDS, why)
        self._rests_until = max(self._rests_until, time.monotonic() + REST_SECONDS)
        self._end()

    def _end(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()
