"""Runs the lines of all batches at the lease's router, as one of its callers.

| a batch is | from | left by |
|---|---|---|
| validating | ``create`` | its file was read: in progress, or failed |
| in_progress | every line waits or runs | the last answer, its deadline, or ``cancel`` |
| finalizing | the same | its files are written: completed or expired |
| cancelling | the same | its files are written: cancelled |

A line is asked with an id of its own and below everybody's priority. Its answer counts once it is
on the disk; what was asked and not written down when something died is asked again, and the router
gives the same answer while it remembers the id. Next step: ``journal`` keeps what comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import logging
import sqlite3
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import aiohttp
import msgspec

from rose_batches import metrics
from rose_batches.errors import BadBatch
from rose_batches.journal import Answer, Journal
from rose_batches.objects import StoredBatch, StoredFile, output_line
from rose_core.batches.lines import LONGEST_LINE, Checked, Problem, check, turn_of
from rose_core.batches.schedule import LineFate, WaitingBatch, next_batch, outcome, wait_seconds
from rose_core.unreadable import UNREADABLE
from rose_wire import flags

LOG = logging.getLogger(__name__)

_LONGEST_ANSWER = LONGEST_LINE
_LONGEST_ERROR = 4096
# A turn has no time limit of its own here: gates close for as long as serving is busy.
_TURN_SECONDS = 3600.0
_IDLE_SECONDS = 60.0
_CANCELLABLE = frozenset({"validating", "in_progress"})
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _LiveBatch:
    """A batch under way: numbers of its lines by what they do.

    Attributes:
        tries: of each line, for how long it rests.
        errors: answers 500 of each line; what it only waited for (503, 429) is none.
    """

    batch: StoredBatch
    waiting: deque[int] = field(default_factory=deque)
    resting: list[tuple[float, int]] = field(default_factory=list)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    errors: Counter[int] = field(default_factory=Counter)

    def wake(self, now: float) -> None:
        """Let lines wait whose rest is over."""
        while self.resting and self.resting[0][0] <= now:
            self.waiting.append(heapq.heappop(self.resting)[1])

    @property
    def done(self) -> bool:
        """Whether no line lacks an answer."""
        return not (self.waiting or self.resting or self.running)


@dataclass
class Worker:
    """All batches of one lease.

    Args:
        journal: keeps them; every call goes through ``do``.
        session: to ask the router with.
        router: its URL.
        clock: Unix seconds.
        token_file: the lease's token, read at every try; None = the router asks nobody.
        most: lines under way at a time.
        tenant_bytes, total_bytes: of files and answers, a tenant's and everybody's.
        keep_seconds: how long files are kept.
    """

    journal: Journal
    session: aiohttp.ClientSession
    router: str
    clock: Callable[[], float]
    token_file: Path | None = None
    most: int = 64
    tenant_bytes: int = 2 << 30
    total_bytes: int = 20 << 30
    keep_seconds: int = 30 * 86_400
    _live: dict[str, _LiveBatch] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: asyncio.Queue[tuple[Answer, asyncio.Future[None]]] = field(
        default_factory=asyncio.Queue
    )
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "journal"))
    # Its own, since a read goes on in its thread when its batch is cancelled.
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reader"))
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _preparing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _broken: BaseException | None = None

    async def do(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call the journal on its thread."""
        asked = partial(call, *given, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, asked)

    def room(self, tenant: str, coming: Mapping[str, int] | None = None) -> int:
        """Bytes that the tenant may still store.

        Args:
            tenant: who asks.
            coming: bytes of uploads under way, by tenant: each takes room of its own tenant's
                share, and all of them of everybody's.
        """
        used, coming = self.journal.used, coming or {}
        return min(
            self.tenant_bytes - used[tenant] - coming.get(tenant, 0),
            self.total_bytes - used.total() - sum(coming.values()),
        )

    async def run(self) -> None:
        """Work until cancelled; goes on where the last process was ended."""
        recording = self._begin(self._record())
        try:
            for batch in await self.do(self.journal.live):
                await self._resume(batch)
            while True:
                self._changed.clear()
                if self._broken is not None:
                    raise self._broken
                await self._end_what_ended()
                self._fill()
                metrics.STORED.set(self.journal.used.total())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._until_next()):
                        await self._changed.wait()
        finally:
            running = [t for live in self._live.values() for t in live.running.values()]
            for task in (recording, *running, *self._preparing.values()):
                task.cancel()
            await asyncio.gather(
                recording, *running, *self._preparing.values(), return_exceptions=True
            )
            self._thread.shutdown()
            self._reader.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Look again: something changed."""
        self._changed.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that nobody waits for: its error ends ``run``, its end wakes it."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error
        self.wake()

    # Coming and going -------------------------------------------------------------------------

    async def create(self, batch: StoredBatch) -> None:
        """Take a new batch, written down before this returns."""
        await self.do(self.journal.save, batch)
        self._prepare(batch)

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Stop a batch; its files come at once."""
        if (preparing := self._preparing.get(batch.id)) is not None:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        moved = await self.do(
            self.journal.move, batch.id, "cancelling", self.clock(), only=_CANCELLABLE
        )
        if moved.status == "cancelling":
            self._live.setdefault(batch.id, _LiveBatch(moved)).batch = moved
            self.wake()
        return moved

    async def _resume(self, batch: StoredBatch) -> None:
        if batch.status == "validating":
            self._prepare(batch)
            return
        waiting = await self.do(self.journal.waiting, batch.id)
        self._live[batch.id] = _LiveBatch(batch, deque(waiting))

    def _prepare(self, batch: StoredBatch) -> None:
        task = self._begin(self._validate(batch))
        self._preparing[batch.id] = task
        task.add_done_callback(lambda _: self._preparing.pop(batch.id, None))

    async def _validate(self, batch: StoredBatch) -> None:
        """Let the batch's lines wait, or say what is wrong with its file."""
        try:
            problems = await self._begin_lines(batch)
        except BadBatch as error:
            problems = [Problem(error.code, str(error))]
        except sqlite3.Error:
            raise  # of the disk, and no batch's own
        except Exception:  # one tenant's file must neither stop all others nor wait for ever
            LOG.exception("batch %s: its file could not be checked", batch.id)
            text = "the file could not be checked; the log of rose batches says why"
            problems = [Problem("internal_error", text)]
        if problems:
            await self._fail(batch, problems)

    async def _begin_lines(self, batch: StoredBatch) -> list[Problem]:
        """What is wrong with the batch's file; where nothing is, its lines wait."""
        models = await self._models(batch)
        if models is None:
            text = f"the lease's router did not answer within {batch.window}"
            return [Problem("router_away", text)]
        # One file at a time: a tenant may name a long one in a hundred batches.
        async with self._reading:
            file = await self.do(self.journal.file, batch.input_file, batch.tenant)
            checked = await asyncio.get_running_loop().run_in_executor(
                self._reader, _read, self.journal, file, batch.endpoint, models
            )
            if checked.problems:
                return checked.problems
            begun = msgspec.structs.replace(
                batch.with_status("in_progress", self.clock()), total=len(checked.places)
            )
            await self.do(self.journal.start, begun, checked.places)
        self._live[batch.id] = _LiveBatch(begun, deque(one.number for one in checked.places))
        return []

    async def _fail(self, batch: StoredBatch, problems: Iterable[Problem]) -> None:
        ended = batch.with_status("failed", self.clock())
        errors = [dataclasses.asdict(one) for one in problems]
        await self.do(self.journal.save, msgspec.structs.replace(ended, errors=errors))
        metrics.ENDED.labels("failed").inc()

    async def _models(self, batch: StoredBatch) -> frozenset[str] | None:
        """The lease's models; None when its router did not say in the batch's time."""
        tries = 0
        while self.clock() < batch.deadline:
            try:
                async with self.session.get(
                    f"{self.router}/v1/models", headers=self._headers()
                ) as reply:
                    if reply.status == 200:
                        models = msgspec.json.decode(await reply.read())
                        return frozenset(str(one["id"]) for one in models["data"])
                    LOG.warning("%s/v1/models: %d", self.router, reply.status)
            except (aiohttp.ClientError, OSError, *UNREADABLE, LookupError, TypeError) as error:
                LOG.warning("%s/v1/models: %s", self.router, error or type(error).__name__)
            tries += 1
            await asyncio.sleep(
                min(wait_seconds(tries, None), batch.deadline - self.clock() + 0.01)
            )
        return None

    async def _end_what_ended(self) -> None:
        for live in list(self._live.values()):
            batch, now = live.batch, self.clock()
            if batch.status == "cancelling":
                await self._finish(live, "cancelled")
            elif live.done:
                torn = await self.do(self.journal.reopen_torn, batch.id)
                if torn:
                    LOG.warning(
                        "batch %s: answers of lines %s were torn; asked again", batch.id, torn
                    )
                    live.waiting.extend(torn)
                    live.batch = await self.do(
                        self.journal.move, batch.id, "in_progress", now, only={"finalizing"}
                    )
                else:
                    await self._finish(live, "completed")
            elif now >= batch.deadline:
                await self._finish(live, "expired")

    async def _finish(self, live: _LiveBatch, status: str) -> None:
        for task in live.running.values():
            task.cancel()
        await asyncio.gather(*live.running.values(), return_exceptions=True)
        name, now = live.batch.id, self.clock()
        # Its files may take a while: who asks meanwhile is told, and it is too late to cancel.
        moved = await self.do(self.journal.move, name, "finalizing", now, only={"in_progress"})
        if moved.status == "cancelling":
            status = "cancelled"
        left = await self.do(self.journal.finish, name, status, int(now), self.keep_seconds)
        del self._live[name]
        if left is not None:
            metrics.ENDED.labels(status).inc()
            metrics.LINES.labels("expired").inc(left)

    # Lines ------------------------------------------------------------------------------------

    def _until_next(self) -> float:
        """Seconds until something is due by itself."""
        now = self.clock()
        moments: list[float] = [live.batch.deadline for live in self._live.values()]
        moments += [live.resting[0][0] for live in self._live.values() if live.resting]
        return min((max(0.0, one - now) + 0.001 for one in moments), default=_IDLE_SECONDS)

    def _fill(self) -> None:
        """Send lines while there is room for more."""
        now = self.clock()
        of_tenant: Counter[str] = Counter()
        for live in self._live.values():
            live.wake(now)
            of_tenant[live.batch.tenant] += len(live.running)
        while of_tenant.total() < self.most:
            name = next_batch(
                WaitingBatch(
                    one.batch.id, one.batch.tenant, one.batch.deadline, of_tenant[one.batch.tenant]
                )
                for one in self._live.values()
                if one.waiting and one.batch.status == "in_progress"
            )
            if name is None:
                break
            live = self._live[name]
            number = live.waiting.popleft()
            live.running[number] = self._begin(self._line(live, number))
            of_tenant[live.batch.tenant] += 1
        metrics.RUNNING.set(of_tenant.total())
        metrics.WAITING.set(sum(len(one.waiting) + len(one.resting) for one in self._live.values()))

    async def _line(self, live: _LiveBatch, number: int) -> None:
        """One try of a line; where the disk fails it stays under way: its batch is not done."""
        try:
            again = await self._try(live, number)
        except sqlite3.Error:
            raise  # of the disk, and no line's own
        except Exception:  # one line must neither stop all others nor be lost
            LOG.exception("batch %s, line %d", live.batch.id, number)
            text = "rose batches could not ask this line; its log says why"
            line = output_line(f"{live.batch.id}-{number}", "", error=("internal_error", text))
            await self._keep(Answer(live.batch.id, number, line, failed=True))
            again = None
        if again is not None:
            heapq.heappush(live.resting, (self.clock() + again, number))
        del live.running[number]

    async def _try(self, live: _LiveBatch, number: int) -> float | None:
        """Ask the router once; seconds until the next try, None when there is an answer."""
        batch, name = live.batch, f"{live.batch.id}-{number}"
        try:
            raw = await self.do(self.journal.line, batch, number)
            custom_id, body = turn_of(raw, name)
        except (OSError, *UNREADABLE) as error:
            line = output_line(name, "", error=("input_file_damaged", str(error)))
            await self._keep(Answer(batch.id, number, line, failed=True))
            return None
        live.tries[number] += 1
        metrics.TRIES.inc()
        status, answer, after = await self._ask(batch, body)
        live.errors[number] += status == 500
        what = outcome(status, live.errors[number])
        if status is None or what is LineFate.AGAIN:
            return wait_seconds(live.tries[number], after)
        failed = what is LineFate.FAILED
        if failed and len(answer) > _LONGEST_ERROR:
            answer = answer[:_LONGEST_ERROR]
        line = output_line(name, custom_id, response=(status, answer))
        if len(line) > self.room(batch.tenant):
            failed = True
            text = f"files hold all of {self.tenant_bytes} bytes; delete some, send the line again"
            line = output_line(name, custom_id, error=("storage_exceeded", text))
        await self._keep(Answer(batch.id, number, line, failed))
        return None

    async def _ask(
        self, batch: StoredBatch, body: dict[str, Any]
    ) -> tuple[int | None, bytes, float | None]:
        """Status, body and ``Retry-After`` of the answer; no status where it was not whole."""
        job = urllib.parse.quote(f"batch:{batch.tenant}", safe=":/@ ")[:512]
        left = max(0.01, min(_TURN_SECONDS, batch.deadline - self.clock()))
        try:
            async with self.session.post(
                self.router + batch.endpoint,
                data=msgspec.json.encode(body),
                headers={**self._headers(), "X-Rose-Job": job, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=left),
            ) as reply:
                after = reply.headers.get("Retry-After", "")
                answer = bytearray()
                async for piece in reply.content.iter_any():
                    answer += piece
                    if len(answer) > _LONGEST_ANSWER:
                        return 413, b'{"error": {"message": "the answer is too long"}}', None
                return reply.status, bytes(answer), float(after) if after.isdecimal() else None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            LOG.debug("%s: %s", self.router, error)
            return None, b"", None

    def _headers(self) -> dict[str, str]:
        token = flags.token(self.token_file)
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _keep(self, answer: Answer) -> None:
        """Return when the answer is on the disk."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.put_nowait((answer, written))
        await written

    async def _record(self) -> None:
        """Write answers down, as many at a time as there are: a transaction waits for the disk."""
        while True:
            # 1. As many as there are.
            taken = [await self._answers.get()]
            while not self._answers.empty():
                taken.append(self._answers.get_nowait())
            # 2. To the disk.
            changed = await self.do(self.journal.record, [answer for answer, _ in taken])
            # 3. Only now is one counted, and whoever waits for it told.
            for batch in changed.values():
                live = self._live.get(batch.id)
                if live is not None:
                    live.batch = msgspec.structs.replace(
                        live.batch, answered=batch.answered, failed=batch.failed
                    )
            for answer, written in taken:
                metrics.LINES.labels("failed" if answer.failed else "answered").inc()
                if not written.done():
                    written.set_result(None)


def _read(journal: Journal, file: StoredFile, endpoint: str, models: frozenset[str]) -> Checked:
    if not journal.is_whole(file):
        problem = Problem("input_file_damaged", "the file is not what was sent; send it again")
        return Checked(problems=[problem])
    with journal.path(file.id).open("rb") as opened:
        return check(_raw_lines(opened), endpoint, models)


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """The file's lines; of one that is too long only the beginning, which fits into memory."""
    while raw := file.readline(LONGEST_LINE + 1):
        yield raw
        while len(raw) > LONGEST_LINE and not raw.endswith(b"\n"):
            raw = file.readline(LONGEST_LINE + 1)
