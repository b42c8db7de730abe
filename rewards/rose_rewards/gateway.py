"""Takes rewards, computes each once, and says how it ended.

| a reward is | from | left by |
|---|---|---|
| waiting | ``score``, while every worker is busy | ``rose_core.rewards.order`` picks it |
| running | a worker, two of them, a judge or a sandbox host have it | its result |
| known | scored or masked | asked again under its trajectory: the same result |

``rose_core.rewards.hedging`` says which late one is given to a second worker: the first verdict is
the result, and the other worker is stopped. A lost one is forgotten, so that asking again tries
anew. Judges run in an engine and take no worker; nor do programs, which wait in the same order for
one of their host's places. With a journal a result is on the disk before
anybody is told it, and known to the next gateway; without one that computes anew what it is asked
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sqlite3
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol

import aiohttp
import msgspec

from rose_core.rewards.cases import BadCases, Case, read_cases
from rose_core.rewards.demand import RewardDemand, Scaling, p50, wished
from rose_core.rewards.groups import GroupProgress
from rose_core.rewards.hedging import RunningReward, hedge, next_late
from rose_core.rewards.limits import TimeLimits
from rose_core.rewards.order import RewardQueue
from rose_core.rewards.results import Lost, Masked, Result, Scored, result_of
from rose_rewards import judge, metrics, programs
from rose_rewards.errors import BadReward, Busy, WorkerEnded, WorkerKilled
from rose_rewards.functions import RewardFunction
from rose_rewards.journal import KnownResult, ResultJournal
from rose_rewards.pool import Machines

# Results that are remembered, and groups of which members are missing: some steps of a large run.
REMEMBERED = 200_000
# Below it a clock's rounding would have a reward that is just not late looked at for ever.
_LEAST_LOOK_SECONDS = 0.001
# Deaths by SIGKILL are nobody's fault as a rule and use up no try. What does kill its workers, or
# has the kernel kill them for its memory, shall not do so for ever.
_MOST_KILLED = 5
# Of a body whose cases are read at once, some 10 ms of work at most; longer ones would hold up all
# others, and are read in a thread.
_SHORT_BYTES = 8 << 10


class Pool(Protocol):
    """What verifies: processes of this machine (``pool``), or pods that dial (``links``)."""

    def room(self, name: str, verifying: Counter[str]) -> bool:
        """Whether one more of this function may begin; ``verifying`` counts by owner's team."""

    def idle(self, team: str, verifying: Counter[str]) -> int:
        """How many of this team's workers have nothing to do."""

    def leaves(self, machine: object) -> bool:
        """Whether it finishes what it has and takes nothing more, or is gone."""

    async def verify(
        self, name: str, body: bytes, seconds: float, machines: Machines
    ) -> tuple[object, float]:
        """What the function said, and its seconds.

        Args:
            name: of the function.
            body: the object that it takes.
            seconds: that it may take.
            machines: the one that it takes is written there.

        Raises:
            WorkerEnded: the worker is gone, or the function failed; the text says how.
            TimeoutError: it took longer than ``seconds``.
        """

    async def close(self) -> None:
        """End what runs."""


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer sends the moment a trajectory ends.

    Attributes:
        trajectory: its session key; asking again under it gives the same result.
        function: by the platform's name.
        answer, expected: what the function compares, any JSON.
        task: which verifications take about as long as each other; empty = unknown.
        group, members: its group and how many trajectories that has; 0 = unknown.
        keep: of these its trainer trains on, the first that are scored; 0 = all.
        data: more that the function is given.
        deadline_seconds: from now; earlier ones go first.
    """

    trajectory: str
    function: str
    answer: Any
    expected: Any = None
    task: str = ""
    group: str = ""
    members: Annotated[int, msgspec.Meta(ge=0)] = 0
    keep: Annotated[int, msgspec.Meta(ge=0)] = 0
    data: Any = None
    deadline_seconds: float | None = None


@dataclass
class _Known:
    """A reward that runs, or has its result."""

    digest: bytes
    result: asyncio.Future[Result]


@dataclass(frozen=True)
class _Waiting:
    """A reward in the queue."""

    key: tuple[str, str]
    reward: Reward
    deadline: float | None
    since: float
    cases: tuple[Case, ...] = ()

    @property
    def task(self) -> str:
        """Its team's task: what one team sends must not draw a limit for another."""
        return f"{self.key[0]}/{self.reward.task}" if self.reward.task else ""


class _Verification:
    """One try of a reward, by one worker or by two: the first verdict is its result.

    Attributes:
        began: when the first worker was given it.
        copies: those that were given it, in that order.
        machines: that have them, in the same order.
        verdict: what the function returned and its seconds, and which copy that was of.
    """

    def __init__(self, one: _Waiting, body: bytes, seconds: float, apart: set[object]) -> None:
        self.one, self.body, self.seconds, self.apart = one, body, seconds, apart
        self.began = 0.0
        self.copies: list[asyncio.Task[None]] = []
        self.machines: list[Machines] = []
        self.verdict: asyncio.Future[tuple[object, float, int]] = (
            asyncio.get_running_loop().create_future()
        )
        self._open = 0

    def start(self, pool: Pool) -> asyncio.Task[None]:
        """Give it to one more worker."""
        self._open += 1
        self.machines.append(Machines(self.apart))
        copy = asyncio.create_task(self._copy(pool, len(self.copies)))
        self.copies.append(copy)
        return copy

    async def _copy(self, pool: Pool, number: int) -> None:
        name = self.one.reward.function
        try:
            machines = self.machines[number]
            returned, took = await pool.verify(name, self.body, self.seconds, machines)
        except Exception as error:  # noqa: BLE001  # whoever waits for the verdict is told
            self._open -= 1
            # While another copy runs there may be a verdict yet.
            if not self._open and not self.verdict.done():
                self.verdict.set_exception(error)
        else:
            if not self.verdict.done():
                self.verdict.set_result((returned, took, number))


def _cases(reward: Reward) -> tuple[Case, ...]:
    """Of a reward that a program earns.

    Raises:
        BadReward: it has no program, or what is expected is no form of cases.
    """
    if not isinstance(reward.answer, str):
        message = f"answer is {type(reward.answer).__name__}; send the text that has the program"
        raise BadReward(message)
    try:
        return read_cases(reward.expected)
    except BadCases as error:
        raise BadReward(str(error)) from error


def _in(room: Collection[str], lane: tuple[str, tuple[str, str]]) -> bool:
    return lane[0] in room


@dataclass
class Gateway:
    """The rewards of one process.

    Args:
        functions: the platform's list.
        pool: verifies.
        session: to ask judges with.
        queue_limit: rewards that may wait, those that judges have included.
        journal: keeps results; None = they end with this process.
        patience: seconds beyond the wish's target for a reward whose group lacks others that are
            still rolled out.
        cold_start: seconds until a worker that is wished for is ready.
    """

    functions: Mapping[str, RewardFunction]
    pool: Pool
    session: aiohttp.ClientSession
    queue_limit: int = 4096
    clock: Callable[[], float] = time.monotonic
    journal: ResultJournal | None = None
    patience: float = 0.0
    cold_start: float = 1.5
    limits: TimeLimits = field(default_factory=TimeLimits)
    _known: OrderedDict[tuple[str, str], _Known] = field(default_factory=OrderedDict)
    _groups: OrderedDict[tuple[str, str], GroupProgress] = field(default_factory=OrderedDict)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    # By function, and by team and group.
    _order: RewardQueue[tuple[str, tuple[str, str]]] = field(default_factory=RewardQueue)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _verifying: Counter[str] = field(default_factory=Counter)
    _programs: Counter[str] = field(default_factory=Counter)  # programs that run, by hosts' URL
    _under_way: dict[tuple[str, str], _Waiting] = field(default_factory=dict)
    _verifications: dict[int, _Verification] = field(default_factory=dict)
    _copies: set[asyncio.Task[None]] = field(default_factory=set)
    _look: asyncio.TimerHandle | None = None
    _late: bool = False  # at the last look something was late that one worker has
    _arrivals: int = 0
    _tries: int = 0
    _closed: bool = False
    # By the caller's team, of which one long body is read at a time.
    _reading: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    _unwritten: list[tuple[KnownResult, asyncio.Future[None]]] = field(default_factory=list)
    _writing: asyncio.Task[None] | None = None
    # By the functions' team: what one team sends must not decide how many workers another has.
    _demand: defaultdict[str, RewardDemand] = field(
        default_factory=lambda: defaultdict(RewardDemand)
    )

    @property
    def queue(self) -> int:
        """Rewards that wait or run."""
        return len(self._waiting) + len(self._running)

    def queued(self, team: str | None = None) -> int:
        """Of those, the ones of a team's functions; None = all."""
        if team is None:
            return self.queue
        found = (*self._waiting.values(), *self._under_way.values())
        return sum(self._counts(one, team) for one in found)

    def _counts(self, one: _Waiting, team: str | None) -> bool:
        return team is None or self.functions[one.reward.function].team == team

    @property
    def verifications(self) -> int:
        """Of those, the ones that take a worker."""
        kinds = (self.functions[one.reward.function] for one in self._waiting.values())
        return sum(one.takes_worker for one in kinds) + self._verifying.total()

    def wish(self, target: float, team: str | None = None) -> int:
        """Workers that would give each its result within ``target`` seconds of when it was taken.

        Args:
            target: seconds.
            team: whose functions count, not who calls them; None = all.
        """
        now = self.clock()
        waiting = [
            (now - one.since, self._complete(one, now))
            for one in self._waiting.values()
            if self._counts(one, team) and self.functions[one.reward.function].takes_worker
        ]
        # What a worker that goes finishes is not the work of those that are wished for.
        running = [
            now - given.began
            for given in self._verifications.values()
            for one in given.machines
            if self._counts(given.one, team) and not self.pool.leaves(one.mine)
        ]
        scaling = Scaling(target, self.patience, self.cold_start, self.queue_limit)
        teams = {one.team for one in self.functions.values() if team in {None, one.team}}
        idle = sum(self.pool.idle(one, self._verifying) for one in teams)
        found = wished(self._demands(team), scaling, now, waiting, running, idle=idle)
        # What runs holds its worker, so a second copy takes one more.
        return max(found, len(running) + 1) if self._hedge_wanted(team) else found

    def _hedge_wanted(self, team: str | None) -> bool:
        """Whether something late would be given to a second worker if there was one."""
        return self._late and None is not hedge(
            [
                replace(one, free=True)
                for one in self._running_rewards()
                if self._counts(self._verifications[one.number].one, team)
            ]
        )

    def _demands(self, team: str | None) -> list[RewardDemand]:
        return [one for whose, one in self._demand.items() if team in {None, whose}]

    def _complete(self, one: _Waiting, now: float) -> float | None:
        """Seconds since its group lacks none but what was taken; of none, since for ever."""
        progress = self._groups.get((one.key[0], one.reward.group))
        if progress is None:
            return math.inf
        return None if progress.complete is None else now - progress.complete

    def p50(self, team: str | None = None) -> float | None:
        """Median seconds of a verification of a team's functions; None while none has ended.

        Args:
            team: whose; None = all.
        """
        return p50(self._demands(team))

    def remember(self) -> None:
        """Know what the journal knows; before the first reward is taken."""
        for one in self.journal.results() if self.journal is not None else ():
            known = _Known(one.digest, asyncio.get_running_loop().create_future())
            known.result.set_result(one.result)
            self._known[one.key] = known

    async def score(self, reward: Reward, team: str = "") -> Result:
        """The reward's result; the same for the same trajectory.

        Raises:
            BadReward: there is no such function for this team, the trajectory was asked with
                another body, or what a program is expected to do is no form of cases, or its
                answer no text.
            Busy: too many wait, or it is closed.
        """
        self._check(reward, team)
        key = (team, reward.trajectory)
        # Who asks again has less time left; ``keep`` says when, and journals are older than it.
        same = msgspec.structs.asdict(reward) | {"deadline_seconds": None}
        del same["keep"]
        body = msgspec.json.encode(same)
        digest = hashlib.sha256(body).digest()
        known = self._recall(key, digest)
        if known is None:
            cases = await self._read(reward, team, len(body))
            # Meanwhile it may have been sent once more.
            known = self._recall(key, digest) or self._admit(key, reward, digest, cases)
        # Shielded: a caller that goes away must not take the result from one that asks again.
        return await asyncio.shield(known.result)

    def _recall(self, key: tuple[str, str], digest: bytes) -> _Known | None:
        known = self._known.get(key)
        if known is not None and known.digest != digest:
            message = f"trajectory {key[1]!r} was sent before with another content"
            raise BadReward(message)
        return known

    async def _read(self, reward: Reward, team: str, size: int) -> tuple[Case, ...]:
        """The cases of a program; none of another function.

        Args:
            reward: is taken, if there is room.
            team: of its caller.
            size: of its body, in bytes.
        """
        self._check_room()
        if self.functions[reward.function].sandbox is None:
            return ()
        if size <= _SHORT_BYTES:
            return _cases(reward)
        async with self._reading[team]:
            return await asyncio.to_thread(_cases, reward)

    def _check_room(self) -> None:
        if self._closed:
            message = "this gateway is stopping"
            raise Busy(message)
        running = self._verifying.total() + self._programs.total()
        if self.queue - running >= self.queue_limit:
            message = f"{self.queue_limit} rewards wait already"
            raise Busy(message)

    def _check(self, reward: Reward, team: str) -> None:
        function = self.functions.get(reward.function)
        if function is None or function.team not in {"", team}:
            open_to = sorted(n for n, one in self.functions.items() if one.team in {"", team})
            message = f"function {reward.function!r} is none of {', '.join(open_to) or 'none'}"
            raise BadReward(message)
        if not reward.trajectory:
            message = "trajectory is empty; send the trajectory's session key"
            raise BadReward(message)
        if reward.keep > reward.members:
            message = (
                f"keep is {reward.keep} of {reward.members} members; send how many of a group's "
                "members are trained on, and members with it"
            )
            raise BadReward(message)

    def _admit(
        self, key: tuple[str, str], reward: Reward, digest: bytes, cases: tuple[Case, ...]
    ) -> _Known:
        self._check_room()
        function = self.functions[reward.function]
        known = self._known[key] = _Known(digest, asyncio.get_running_loop().create_future())
        while len(self._known) > REMEMBERED and next(iter(self._known.values())).result.done():
            self._known.popitem(last=False)
        now = self.clock()
        group, progress = (key[0], reward.group), None
        if reward.group and reward.members:
            begun = self._groups.get(group, GroupProgress(reward.members, reward.keep))
            progress = self._groups[group] = begun.taking(now)
            while len(self._groups) > REMEMBERED:
                self._groups.popitem(last=False)
        seconds = reward.deadline_seconds
        one = _Waiting(key, reward, None if seconds is None else now + seconds, now, cases)
        if function.judge is not None:
            self._start(one)
        else:
            if function.takes_worker:
                self._demand[function.team].note_taken(now, group, progress)
            self._arrivals += 1
            self._waiting[self._arrivals] = one
            self._order.put((reward.function, group), self._arrivals, one.deadline)
            self.fill()
        metrics.QUEUE.set(self.queue)
        return known

    def fill(self) -> None:
        """Start what may start; whoever makes room in the pool calls it."""
        if self._closed:  # ending what ran makes room too
            return
        while self._waiting:
            # By the list, which is short: thousands may wait, and mostly every place is taken.
            room = {name for name in self.functions if self._room(name)}
            if not room:
                break
            number = self._order.take(lambda lane: self._left(lane[1]), partial(_in, room))
            if number is None:
                break
            one = self._waiting.pop(number)
            self._hold(self.functions[one.reward.function], 1)
            self._start(one)
        if self._late:  # a place has come free, or a group lacks one result less
            self._hedge()
        metrics.BUSY.set(self._verifying.total())

    def _room(self, name: str) -> bool:
        """Whether one more of what waits may begin."""
        function = self.functions[name]
        if function.sandbox is not None:
            return self._programs[function.sandbox] < function.at_once
        return function.takes_worker and self.pool.room(name, self._verifying)

    def _hold(self, function: RewardFunction, places: int) -> None:
        """Take or give back a place; judges have none."""
        if function.takes_worker:
            self._verifying[function.team] += places
        elif function.sandbox is not None:
            self._programs[function.sandbox] += places

    def _left(self, group: tuple[str, str]) -> int | None:
        progress = self._groups.get(group)
        return None if progress is None else progress.left

    def _hedge(self) -> None:
        """Give what is late to a second worker where one is free, and look again in time."""
        while late := hedge(self._running_rewards()):
            found = self._verifications[late.number]
            self._verifying[self.functions[found.one.reward.function].team] += 1
            self._watch(found.start(self.pool))
        running = self._running_rewards()
        self._late = any(
            not one.hedged and one.late_in is not None and one.late_in <= 0 for one in running
        )
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if (due := next_late(running)) is not None:
            self._look_in(due)

    def _look_in(self, seconds: float) -> None:
        """Look then, or when a look is due before: most verifications end before they are late."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(seconds, _LEAST_LOOK_SECONDS)
        if self._look is not None and self._look.when() > at:
            self._look.cancel()
            self._look = None
        if self._look is None:
            self._look = loop.call_at(at, self._look_now)

    def _look_now(self) -> None:
        self._look = None
        self._hedge()

    def _running_rewards(self) -> list[RunningReward]:
        """What runs, as ``hedging`` sees it."""
        now = self.clock()
        # Where one is free nothing waits that it could do: ``fill`` has been before.
        room = {name for name in self.functions if self._room(name)}
        found = []
        for number, given in self._verifications.items():
            if given.verdict.done():
                continue
            name, key = given.one.reward.function, (given.one.key[0], given.one.reward.group)
            progress = self._groups.get(key)
            found.append(
                RunningReward(
                    number,
                    now - given.began,
                    self._late_after(given.one),
                    None if progress is None else key,
                    1 if progress is None else progress.left,
                    len(given.copies) > 1,
                    name in room,
                )
            )
        return found

    def _late_after(self, one: _Waiting) -> float | None:
        name = one.reward.function
        # What may be tried once alone, since it acts elsewhere, is not run twice at a time either.
        return self.limits.late_after(name, one.task) if self.functions[name].tries > 1 else None

    def _watch(self, copy: asyncio.Task[None]) -> None:
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    def _leave(self, team: str) -> None:
        """A copy has ended, and with it the place that it held."""
        self._verifying[team] -= 1
        self.fill()

    def _start(self, one: _Waiting) -> None:
        self._under_way[one.key] = one
        task = asyncio.create_task(self._run(one))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, one: _Waiting) -> None:
        function = self.functions[one.reward.function]
        try:
            result = await self._result(function, one)
        except Exception as error:  # noqa: BLE001  # a caller waits: it is told, and not left alone
            result = Lost(f"Failed: {type(error).__name__}: {error}")
        finally:
            self._hold(function, -1)
            self._under_way.pop(one.key, None)
        self._count_member(one, result)
        self.fill()  # the disk is waited for without a worker
        if self.journal is not None and not isinstance(result, Lost):
            result = await self._kept(KnownResult(one.key, self._known[one.key].digest, result))
        self._conclude(one, result)

    async def _kept(self, known: KnownResult) -> Result:
        """The result once it is on the disk; lost where it cannot be."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.append((known, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        try:
            await written
        except (OSError, sqlite3.Error) as error:
            return Lost(f"NotKept: the result could not be written down: {error}")
        return known.result

    async def _write(self) -> None:
        """Write down what waits for it, as much at a time as there is."""
        assert self.journal is not None  # noqa: S101  # whoever calls has asked
        while self._unwritten:
            taken, self._unwritten = self._unwritten, []
            failure: Exception | None = None
            try:
                await asyncio.to_thread(self.journal.record, [known for known, _ in taken])
            except (OSError, sqlite3.Error) as error:
                failure = error
            for _, written in taken:
                if written.done():
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)

    def _count_member(self, one: _Waiting, result: Result) -> None:
        """One more of its group has a result."""
        group = (one.key[0], one.reward.group)
        if group in self._groups:
            self._groups[group] = self._groups[group].after(result)
            function = self.functions[one.reward.function]
            if function.takes_worker:
                self._demand[function.team].note_progress(group, self._groups[group])
            if self._groups[group].ended:
                del self._groups[group]

    def _conclude(self, one: _Waiting, result: Result) -> None:
        name = one.reward.function
        known = self._known[one.key]
        if isinstance(result, Lost):
            del self._known[one.key]
        outcome = type(result).__name__.lower()
        metrics.RESULTS.labels(name, outcome).inc()
        if isinstance(result, Scored):
            metrics.SECONDS.labels(name).observe(result.seconds)
            if result.correct:
                metrics.CORRECT.labels(name).inc()
                if self.functions[name].takes_worker:  # of the others nobody asks
                    self.limits.learn(name, one.task, result.seconds)
        known.result.set_result(result)
        metrics.QUEUE.set(self.queue - 1)  # this one's task ends after it

    async def _result(self, function: RewardFunction, one: _Waiting) -> Result:
        reward = one.reward
        if function.judge is not None:
            return await self._judged(function, reward)
        if function.sandbox is not None:
            return await self._judge_program(function, one)
        body = msgspec.json.encode(
            {part: getattr(reward, part) for part in ("answer", "expected", "task", "data")}
        )
        seconds = self.limits.limit(reward.function, one.task, function.seconds)
        failure = "it was not tried"
        apart = set[object]()
        failed = killed = 0
        most_killed = _MOST_KILLED if function.tries > 1 else 1  # of one try nothing runs twice
        while failed < function.tries and killed < most_killed:
            try:
                found, took = await self._verdict(_Verification(one, body, seconds, apart))
            except TimeoutError:
                self._demand[function.team].times.append(seconds)
                return Masked(f"TimedOut: no verdict after {seconds:.3g} s", seconds)
            except (WorkerEnded, OSError) as error:
                if isinstance(error, WorkerKilled):
                    killed += 1
                else:
                    failed += 1
                failure = f"{error} (tried {failed + killed} times)"
                continue
            self._demand[function.team].times.append(took)
            return result_of(found, function.correct_from, took)
        return Lost(f"WorkerEnded: {failure}")

    async def _verdict(self, given: _Verification) -> tuple[object, float]:
        """The first verdict; raises what the last of its copies raised where there is none."""
        name, team = given.one.reward.function, self.functions[given.one.reward.function].team
        number = self._tries = self._tries + 1
        given.began = self.clock()
        self._watch(given.start(self.pool))
        self._verifications[number] = given
        if (late_after := self._late_after(given.one)) is not None:
            self._look_in(late_after)
        kept, winner = 0, "none"
        try:
            found, took, kept = await given.verdict
            winner = "second" if kept else "first"
            return found, took
        finally:
            del self._verifications[number]
            if len(given.copies) > 1:
                metrics.HEDGED.labels(name, winner).inc()
            # The reward goes on to hold one place; another is free once its worker has ended.
            for other, copy in enumerate(given.copies):
                copy.cancel()
                if other != kept:
                    copy.add_done_callback(lambda _: self._leave(team))

    async def _judged(self, function: RewardFunction, reward: Reward) -> Result:
        began = self.clock()
        fields = {part: str(getattr(reward, part)) for part in ("answer", "expected", "task")}
        try:
            found = await judge.verdict(function, self.session, fields)
        except WorkerEnded as error:
            return Lost(f"JudgeFailed: {error}")
        return result_of(found, function.correct_from, self.clock() - began)

    async def _judge_program(self, function: RewardFunction, one: _Waiting) -> Result:
        if not one.cases:
            return Masked("NoVerdict: the program has no case", 0.0)
        try:
            return await programs.verdict(
                function, self.session, one.reward.answer, one.cases, self.clock
            )
        except WorkerEnded as error:
            return Lost(f"SandboxFailed: {error}")

    async def close(self) -> None:
        """End what runs; who waits for it gets no result, and asks the next gateway."""
        self._closed = True  # the port is open a little longer, and its callers ask again
        self._waiting.clear()
        self._order.clear()
        if self._look is not None:
            self._look.cancel()
            self._look = None
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*self._copies, return_exceptions=True)
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        for known in self._known.values():
            known.result.cancel()
        await self.pool.close()
