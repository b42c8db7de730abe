"""An engine's side of the platform's pool of keys: what is asked of it, how long, and when not.

The pool is reached by a process beside the engine (``pool_process``). What it brings lies in memory
that both have; what it takes away it reads in the lease's folder. Nothing here may hold the engine
up:

| what | bound |
|---|---|
| a turn that waits for its pages | ``kv_store.patience`` of all of them, from when it asked |
| turns that wait behind each other | the same: what is over before it begins is not begun |
| a store that is to give way (``leaving``) | within ``_SLICE_SECONDS`` |
| an answer that is late | nobody waits; after ``GRACE_SECONDS`` the process is ended |
| a process that has ended | no other for ``REST_SECONDS``, and twice as long each time |
| a closed permit | no order is given; one that is under way ends, ``AT_ONCE`` pages |
| pages to be written | ``WAITING`` at most; they are written while no turn asks |

Whether a pull is worth its time hangs on what pulls take, set-up and pages (``kv_store.PullPace``).
Each turn's is measured, and every ``kv_store.MEASURED_SECONDS`` the engine reads back what it has
just written. Next step: ``sglang.kv_backend`` asks.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import IO, Any, cast

from rose_core.rollouts.engines.kv_store import (
    PAGE_TOKENS,
    READ_BACK_PAGES,
    KvPoolSpec,
    PoolCounts,
    PullPace,
    measures_anew,
    patience,
)
from rose_engines.kv.pool_process import AT_ONCE, PoolSetup, pieces

log = logging.getLogger(__name__)

POOL_VARIABLE = "ROSE_KV_POOL"

REST_SECONDS, LONGEST_REST_SECONDS = 10.0, 320.0
"""After a failure, in which all is computed."""

START_SECONDS = 30.0
"""Until the process has joined the pool; nobody waits for it."""

GRACE_SECONDS = 2.0
"""After which a process that owes an answer is ended."""

WAITING = 512
"""Pages that wait to be written: 1 GiB of an 8B's."""

WRITTEN_AT_ONCE = 2
"""Pages of an order to write: a turn may have to wait for one."""

_PUSH_SECONDS = 5.0  # nobody waits for it but the next page
_IDLE_SECONDS = 1.0
_SLICE_SECONDS = 0.02
_END_SECONDS = 5.0


def to_text(spec: KvPoolSpec) -> str:
    """For an engine's environment, which is no place for a secret: that comes as a call."""
    return json.dumps(asdict(spec))


@cache
def from_environment() -> KvPoolSpec | None:
    """What this engine was told, once: what it starts itself is not told; None = of no pool."""
    text = os.environ.pop(POOL_VARIABLE, "")
    return KvPoolSpec(**json.loads(text)) if text else None


@dataclass
class PoolTurn:
    """One turn and the pages that it lacks.

    Attributes:
        asked: when, ``time.monotonic``.
        until: it waits no longer.
        found: of its pages, those that are in the pool.
        pulled: that have come; ``late`` beside them: of an order that was given up.
        spent: seconds of all orders for it.
        connects: one of them was the first pull of a process, which takes longer.
    """

    asked: float
    until: float
    found: int = 0
    pulled: int = 0
    late: int = 0
    spent: float = 0.0
    connects: bool = False


def _nobodys() -> PoolTurn:
    """Orders for which no turn waits."""
    now = time.monotonic()
    return PoolTurn(now, now + _PUSH_SECONDS)


class _Late(Exception):
    """There is no answer yet."""


class KvPool:
    """The pool, for one engine.

    Args:
        command: starts the process.
        setup: its first line.
        seconds_per_token: of the engine's prefill; 0 = it has not prefilled yet.
        may_move: waits until the permit is open; False = nothing is to be moved.
        leaving: whether whoever waits has to give up at once.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: PoolSetup,
        seconds_per_token: Callable[[], float],
        *,
        may_move: Callable[[], bool],
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        memory = os.memfd_create("rose-kv-pool")
        os.ftruncate(memory, AT_ONCE * setup.page_bytes)
        self._pulled = pieces(memoryview(mmap.mmap(memory, 0)), setup.page_bytes)
        self._command, self._setup = list(command), replace(setup, shared=memory)
        self._seconds_per_token, self._may_move = seconds_per_token, may_move
        self._leaving = leaving
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._asking = 0  # turns
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._ready = self._closed = False
        self._owes: float | None = None  # since when
        self._started = self._rests_until = 0.0
        self._rest_seconds = REST_SECONDS
        self._waiting: queue.Queue[str] = queue.Queue(WAITING)
        self._pace = PullPace()
        self._measured: float | None = None  # when
        self._is_connected = False  # a process's first pull also connects
        self._written: deque[str] = deque(maxlen=max(READ_BACK_PAGES))
        self._scratch: list[memoryview] | None = None
        self._counts = PoolCounts()
        with self._lock:
            self._look()
        threading.Thread(target=self._write, name="rose-kv-pool", daemon=True).start()

    def begin(self, pages: int, asked: float) -> PoolTurn:
        """A turn asks.

        Args:
            pages: that it may lack.
            asked: when, ``time.monotonic``.
        """
        return PoolTurn(asked, asked + self._patience(pages))

    def count(self, turn: PoolTurn, pages: Sequence[str]) -> int:
        """How many of some more pages are in the pool, up to the first that is not."""
        if time.monotonic() >= turn.until or not self._may_move():
            return 0
        with self._turn_asks():
            found = self._ask("count", pages, turn)
        turn.found += found
        return found

    def pulls(self, turn: PoolTurn) -> bool:
        """Whether what was found is worth pulling, now that all of it is known."""
        waits = self._patience(turn.found)
        turn.until = turn.asked + waits
        return waits > 0 and time.monotonic() < turn.until

    def pull(self, turn: PoolTurn, pages: Sequence[str], into: Sequence[memoryview]) -> int:
        """Bring some of a turn's pages, the first ones first, while there is time for more."""
        with self._turn_asks():
            for place in range(0, len(pages), AT_ONCE):
                some = pages[place : place + AT_ONCE]
                takes = self._pace.cost.seconds_per_page * len(some)
                if not self._may_move() or time.monotonic() + takes >= turn.until:
                    return place
                done = self._ask("pull", some, turn, into[place : place + AT_ONCE])
                if done < len(some):  # what follows is of no use without it
                    return place + done
        return len(pages)

    def finish(self, turn: PoolTurn) -> None:
        """No more of the turn's pages are pulled: learn what those took."""
        pages = turn.pulled + turn.late
        if not pages or turn.connects:
            return
        with self._counting:
            known = self._pace.cost
            if turn.late and turn.spent <= known.of(pages):  # of a short wait: no news
                return
            if not known.seconds_per_page:
                log.info("rose: %s", self._comparison(turn.spent / pages))
            self._pace.note(turn.spent, pages)

    def push(self, page: str) -> None:
        """Have a page of the folder written to the pool, in a while; dropped where many wait."""
        try:
            self._waiting.put_nowait(page)
        except queue.Full:
            self._count(dropped_bytes=self._setup.page_bytes)

    def counts(self) -> PoolCounts:
        """What became of it so far; asks nobody."""
        if self._lock.acquire(blocking=False):  # else it is being asked, and found out
            try:
                if self._process is not None:
                    self._look()
            finally:
                self._lock.release()
        return replace(self._counts, joined=self._ready)

    def close(self) -> None:
        """End the process and the thread; nothing is found any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()
                os.close(self._setup.shared)

    def _patience(self, pages: int) -> float:
        return patience(pages, self._seconds_per_token(), self._pace.cost)

    def _count(self, **more: float) -> None:
        with self._counting:
            new = {name: getattr(self._counts, name) + value for name, value in more.items()}
            self._counts = replace(self._counts, **new)

    @contextmanager
    def _turn_asks(self) -> Iterator[None]:
        with self._counting:
            self._asking += 1
        try:
            yield
        finally:
            with self._counting:
                self._asking -= 1

    def _write(self) -> None:
        while not self._closed:
            try:
                some = [self._waiting.get(timeout=_IDLE_SECONDS)]
            except queue.Empty:
                self._rejoin()
                continue
            with suppress(queue.Empty):
                while len(some) < WRITTEN_AT_ONCE:
                    some.append(self._waiting.get_nowait())
            while self._asking and not self._closed:
                time.sleep(_SLICE_SECONDS)
            if self._may_move():
                done = self._ask("push", some, _nobodys())
                self._count(written_bytes=done * self._setup.page_bytes)
                self._written.extend(some[:done])
                self._measure()

    def _rejoin(self) -> None:
        """An engine that has nothing to write joins again, too: others wait for what it finds."""
        if self._process is None and self._may_move() and self._take(time.monotonic()):
            try:
                self._look()
            finally:
                self._lock.release()

    def _measure(self) -> None:
        """Read back what was written, if it is time; nobody waits."""
        now = time.monotonic()
        if not self._written or not measures_anew(self._measured, now):
            return
        self._measured = now  # also where it fails: not after each page
        size, pages = self._setup.page_bytes, list(self._written)
        if self._scratch is None:
            self._scratch = [memoryview(bytearray(size)) for _ in range(AT_ONCE)]
        lengths = sorted({min(length, len(pages)) for length in READ_BACK_PAGES})
        for length in lengths if self._is_connected else [1, *lengths]:
            turn = _nobodys()
            if self._ask("count", pages[:length], turn) == length:
                self._read_back(pages[:length], turn, self._scratch)
            self.finish(turn)

    def _read_back(
        self, pages: Sequence[str], turn: PoolTurn, scratch: Sequence[memoryview]
    ) -> None:
        for place in range(0, len(pages), AT_ONCE):
            some = pages[place : place + AT_ONCE]
            if self._asking or not self._may_move():
                return
            if self._ask("pull", some, turn, scratch) < len(some):
                return

    def _ask(
        self, what: str, pages: Sequence[str], turn: PoolTurn, into: Sequence[memoryview] = ()
    ) -> int:
        """Pages for which it was done; 0 where none could be asked, or the answer is late.

        Args:
            what: to do.
            pages: names.
            turn: for whom; nobody waits for longer than it does.
            into: where what was pulled is copied, before anybody else asks.
        """
        if not self._take(turn.until):
            return 0
        began = time.monotonic()
        try:
            if not self._look() or self._process is None:
                return 0
            order = json.dumps({"do": what, "pages": list(pages)}) + "\n"
            cast("IO[bytes]", self._process.stdin).write(order.encode())
            self._owes = began
            return self._answer(turn, began, into)
        except _Late:
            self._owes = time.monotonic()
            self._count(late_orders=1)
            turn.late += len(pages) if into else 0
            return 0
        except (OSError, ValueError, KeyError) as error:
            self._rest(f"{what} of {len(pages)} pages: {error}")
            return 0
        finally:
            turn.spent += time.monotonic() - began
            self._lock.release()

    def _answer(self, turn: PoolTurn, began: float, into: Sequence[memoryview]) -> int:
        done = int(self._reply(turn.until)["done"])
        self._owes, self._rest_seconds = None, REST_SECONDS
        for target, page in zip(into[:done], self._pulled, strict=False):
            target[:] = page
        if into and done:
            size, took = done * self._setup.page_bytes, time.monotonic() - began
            self._count(pulled_bytes=size, pull_seconds=took)
            turn.pulled += done
            turn.connects |= not self._is_connected
            self._is_connected = True
        return done

    def _comparison(self, page_seconds: float) -> str:
        """Why pages are pulled, or are not."""
        megabytes, prefill = self._setup.page_bytes / 1e6, PAGE_TOKENS * self._seconds_per_token()
        made = f"makes {megabytes / prefill:.0f}" if prefill else "has not been measured yet"
        return (
            f"the pool of keys brings {megabytes / page_seconds:.0f} MB/s, and prefilling {made}; "
            "a turn's keys come by the quicker way"
        )

    def _take(self, until: float) -> bool:
        """Get the lock, unless that takes too long."""
        while not self._leaving() and not self._closed:
            if self._lock.acquire(timeout=_SLICE_SECONDS):
                return True
            if time.monotonic() >= until:
                break
        return False

    def _look(self) -> bool:
        """Whether the process can be asked; where there is none, and none has to rest, start it."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._rests_until and not self._closed:
                self._start(now)
            return False
        if self._ready and self._owes is None and self._process.poll() is None:
            return True
        try:
            reply = self._reply(0.0)
            self._ready = self._ready or bool(reply["ready"])
            self._owes = None  # what was owed is nobody's any more
        except _Late:
            since, most = (
                (self._owes, GRACE_SECONDS)
                if self._owes is not None
                else (self._started, START_SECONDS)
            )
            if now - since > most:
                self._rest(f"no answer for {most:.0f} s")
            return False
        except (OSError, ValueError, KeyError) as error:
            self._rest(str(error))
        return self._process is not None

    def _start(self, now: float) -> None:
        self._started, self._read, self._ready, self._owes = now, b"", False, None
        self._is_connected = False
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                *(self._command, 0), stdin=pipe, stdout=pipe, pass_fds=[self._setup.shared]
            )
            line = self._setup.line() + "\n"
            cast("IO[bytes]", self._process.stdin).write(line.encode())
        except OSError as error:
            self._rest(str(error))

    def _reply(self, until: float) -> dict[str, Any]:
        """The next line.

        Raises:
            _Late: there is none in time, or whoever waits has to give up.
            OSError, ValueError: there will be none.
        """
        output = cast("IO[bytes]", cast("subprocess.Popen[bytes]", self._process).stdout)
        while b"\n" not in self._read:
            left = min(_SLICE_SECONDS, max(until - time.monotonic(), 0.0))
            if select.select([output], [], [], left)[0]:
                got = os.read(output.fileno(), 65536)
                if not got:
                    raise OSError("its process has ended")
                self._read += got
            elif self._leaving() or time.monotonic() >= until:
                raise _Late
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _rest(self, why: str) -> None:
        log.warning("rose: the pool of keys is left alone for %.0f s: %s", self._rest_seconds, why)
        self._count(failures=1)
        self._rests_until = time.monotonic() + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, LONGEST_REST_SECONDS)
        self._end()

    def _end(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
