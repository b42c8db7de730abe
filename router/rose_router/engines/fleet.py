"""The engines of the lease, as their owners describe them and as the router saw them.

    (unknown) --first update--> open <--gate--> closed
    open/closed --stream ends--> closed, detached --forget_seconds--> (unknown)
    open/closed --leaving--> leaving --stream ends--> (unknown)

Each update replaces the one before. A second stream for the same name takes over; the end of the
first no longer closes anything. An engine with adapters of several runs is one engine for each of
them here, which have their cap in common. Next step: ``turn_queue`` chooses among ``views()``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts import versions
from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.engines.suspects import suspects
from rose_core.rollouts.placement.residency import Residents
from rose_core.rollouts.placement.selection import EngineView
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.requests.fields import Bounds, check_taken, least
from rose_core.rollouts.versions import NO_PIN, Pin
from rose_core.wire.routing import EngineKind, EngineUpdate, each_adapter
from rose_router import metrics

LOG = logging.getLogger(__name__)

Clock = Callable[[], float]


class Signal:
    """Wakes everybody who waits, once per ``fire``."""

    def __init__(self) -> None:
        # Each has a future of its own: shielding a common one would cost every token a round more
        # of the loop. In order, so that runs under virtual time repeat.
        self._waiting: dict[asyncio.Future[None], Callable[[], bool] | None] = {}

    def fire(self) -> None:
        """Wake all who wait now, but for those who deal with it asleep."""
        waiting, self._waiting = self._waiting, {}
        for future, asleep in waiting.items():
            if future.done():
                continue
            try:
                if asleep is not None and asleep():
                    self._waiting[future] = asleep
                    continue
            except Exception as error:  # noqa: BLE001  # the waiter's own, not of whoever fires
                future.set_exception(error)
            else:
                future.set_result(None)

    async def wait(self, asleep: Callable[[], bool] | None = None) -> None:
        """Sleep until the next ``fire``.

        Args:
            asleep: called at every fire; true = dealt with, sleep on. Its errors come out here.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = asleep
        try:
            await future
        finally:
            self._waiting.pop(future, None)


def _can_move() -> bool:
    return True


def _stay(_: LiveLeg) -> None:
    pass


class LiveLeg(msgspec.Struct, eq=False):
    """A leg in flight, with the handle that ends it.

    Attributes:
        can_move: some other engine could take its turn now.
        queue: given this leg, has its turn wait for another engine, if it may move, while it stands
            here. What held the leg itself would be a cycle, and keep all of its turn.
    """

    rid: str
    began: float
    last_event: float
    tokens: int = 0
    verdict: MoveReason | None = None
    task: asyncio.Task[None] | None = None
    can_move: Callable[[], bool] = _can_move
    queue: Callable[[LiveLeg], None] = _stay

    def end(self, verdict: MoveReason) -> None:
        """Stop reading; the turn decides what follows."""
        if self.verdict is None:
            self.verdict = verdict
            if self.task is not None:
                self.task.cancel()


@dataclass(eq=False)
class Engine:
    """One engine.

    Attributes:
        stream: which ATTACH stream speaks for it.
        gate_since: when the gate last opened or closed.
        speed: as the router saw it; ``None`` before it saw any.
        gaps: between two events of a stream that were seen since a step was learned from.
        learned_at: when that was.
        fences: request ids whose abort the engine has not taken yet.
        reserved: turns placed here, in flight or about to be.
        part: this replica's part of a cap; ``None`` = it is alone.
        kept: it takes no other turn until one that must be alone has come.
        solo: that one runs there.
        died_with: legs of its last death, and those of them that may have caused it.
        together: all adapters of its process, itself among them.
        name: unique in the lease.
        head: newest version of its run, where that is not the lease's first.
        last_version: what its process attested last; it may do so again in a moment.
    """

    update: EngineUpdate
    stream: int
    gate_since: float
    version: WeightVersion | None = None
    detached_at: float | None = None
    speed: Speed | None = None
    gaps: int = 0
    learned_at: float = 0.0
    hazard: Hazard = field(default_factory=Hazard)
    legs: dict[str, LiveLeg] = field(default_factory=dict)
    fences: set[str] = field(default_factory=set)
    reserved: int = 0
    failures: int = 0
    backing_off_until: float = 0.0
    turns: int = 0
    tokens: int = 0
    part: Callable[[int], int] | None = None
    kept: bool = False
    solo: bool = False
    died_with: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    head: WeightVersion | None = None
    last_version: WeightVersion | None = None
    together: tuple[Engine, ...] = field(init=False, repr=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.together, self.name = (self,), self.update.engine

    @property
    def leads(self) -> bool:
        """It is the first of its process, which speaks for all of it."""
        return self.together[0] is self

    @property
    def occupied(self) -> int:
        """Turns that its process has."""
        if len(self.together) == 1:  # asked at every token
            return self.reserved
        return sum(one.reserved for one in self.together)

    @property
    def excess(self) -> int:
        """By how many the legs of its process are more than the cap, which was cut then."""
        return max(0, sum(len(one.legs) for one in self.together) - self.cap)

    def beyond_cap(self) -> frozenset[str]:
        """The youngest legs of its process, as many as are more than the cap."""
        excess = self.excess
        if not excess:
            return frozenset()
        legs = [leg for one in self.together for leg in one.legs.values()]
        legs.sort(key=lambda leg: -leg.began)
        return frozenset(leg.rid for leg in legs[:excess])

    @property
    def places(self) -> int:
        """Turns that its process could take more; told once, by the first of its adapters."""
        return max(0, self.cap - self.occupied) if self.leads else 0

    @property
    def bounds(self) -> Bounds:
        """What it is known to bear."""
        return Bounds(self.update.vocabulary, self.update.context_tokens, drafts=self.update.drafts)

    def suspects(self, rid: str) -> frozenset[str]:
        """The legs that may have ended its process, which has just lost the leg ``rid``.

        All of its legs are lost together, and each of them asks; what stands when the first does
        holds for all.
        """
        with_it, blamed = self.died_with
        if rid not in with_it:
            legs = [leg for one in self.together for leg in one.legs.values()]
            blamed = suspects({leg.rid: leg.tokens for leg in legs})
            self.died_with = (frozenset(leg.rid for leg in legs), blamed)
        return blamed

    @property
    def cap(self) -> int:
        """Most turns that this router may have on it; other replicas have their own part."""
        return self.update.cap if self.part is None else self.part(self.update.cap)

    @property
    def process(self) -> str:
        """The name that its owner gives the process, which other adapters may be in too."""
        return self.name.removesuffix(f"/{self.update.run}") if self.update.run else self.name

    @property
    def kind(self) -> EngineKind:
        """Whether it may be taken back at any moment."""
        return self.update.kind

    @property
    def gate_open(self) -> bool:
        """Turns may be sent: the owner says so, and is there to say otherwise."""
        return self.update.gate_open and self.detached_at is None and not self.update.leaving

    def view(self, usual: Speed) -> EngineView:
        """For placement; ``usual`` is the speed to expect of an engine not seen working yet."""
        update, alone = self.update, len(self.together) == 1
        return EngineView(
            name=update.engine,
            kind=update.kind,
            version=self.version,
            # Written out: this is made of each engine for each turn.
            gate_open=update.gate_open and self.detached_at is None and not update.leaving,
            cap=update.cap if self.part is None else self.part(update.cap),
            live=self.reserved if alone else self.occupied,
            leaving=update.leaving,
            fencing=bool(self.fences),
            kept=self.kept or (self.solo if alone else any(one.solo for one in self.together)),
            backing_off_until=self.backing_off_until,
            speed=self.speed or usual,
            hazard=self.hazard,
            head=self.head,
            named=update.named,
            refuses=update.refuses,
            slowdown=update.slowdown,
        )

    def back_off(self, now: float) -> None:
        """Leave it alone for a while: 0.5 s, doubled at every failure in a row, at most 15 s."""
        self.failures += 1
        self.hazard = self.hazard.passed(0.0, is_open=True, reclaimed=True)
        self.backing_off_until = now + min(15.0, 0.5 * 2 ** min(self.failures - 1, 6))

    def note_success(self) -> None:
        """Stop backing off: it works (again)."""
        self.failures = 0
        self.backing_off_until = 0.0


class Fleet:
    """Every engine attached, and the newest version anybody named.

    Args:
        clock: monotonic seconds.
        pause_seconds: a gate closed for longer counts as a reclaim.
    """

    def __init__(self, clock: Clock, pause_seconds: float) -> None:
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._engines: dict[str, Engine] = {}
        self._bounds: Bounds | None = None  # asked for at every turn, and seldom another
        self.head: WeightVersion | None = None
        self._heads: dict[str, WeightVersion] = {}  # of runs beside the first
        self.residents = Residents()
        self._part: Callable[[int], int] | None = None
        self.usual = Speed()
        self.by_class: dict[str, Speed] = {}
        self.changed = Signal()

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, name: str) -> Engine | None:
        """The engine of that name."""
        return self._engines.get(name)

    def share_caps(self, part: Callable[[int], int]) -> None:
        """From now on only this part of every cap is this router's."""
        self._part = part
        for engine in self._engines.values():
            engine.part = part
        self.changed.fire()

    def views(self) -> list[EngineView]:
        """All engines, for placement."""
        return [engine.view(self.expected(engine)) for engine in self._engines.values()]

    def processes(self) -> list[EngineView]:
        """One view of each process, whatever number of adapters it has."""
        return [one.view(self.expected(one)) for one in self._engines.values() if one.leads]

    def expected(self, engine: Engine) -> Speed:
        """What to expect of an engine not seen working yet: what its class does, else all."""
        return self.by_class.get(engine.update.device_class, self.usual)

    def learn_speed(self, engine: Engine, learn: Callable[[Speed], Speed]) -> None:
        """Learn the speed of one engine, and from it what to expect of those not seen yet."""
        engine.speed = learn(engine.speed or self.expected(engine))
        kind = engine.update.device_class
        if kind:
            found = self.by_class[kind] = learn(self.by_class.get(kind, self.usual))
            metrics.CLASS_STEP_SECONDS.labels(kind).set(found.step_seconds)
            metrics.CLASS_PREFILL_SECONDS.labels(kind).set(found.prefill_seconds_per_token)
        self.usual = learn(self.usual)

    def bounds(self) -> Bounds:
        """What every engine attached is known to bear."""
        if self._bounds is None:
            self._bounds = least(engine.bounds for engine in self._engines.values())
        return self._bounds

    def has_room(self) -> bool:
        """Whether any engine is open and below its cap."""
        for one in self._engines.values():  # asked for every turn: no generator
            if one.gate_open and not one.fences and one.occupied < one.cap:
                return True
        return False

    def live_versions(self) -> list[WeightVersion]:
        """Attested versions of the engines attached."""
        return [engine.version for engine in self._engines.values() if engine.version]

    def check_pin(self, pin: Pin) -> None:
        """Refuse a pin that cannot be met by waiting a moment.

        Raises:
            UnknownVersion: nobody has announced such a version yet.
            VersionGone: nobody will.
        """
        if pin is NO_PIN:
            return
        held = {engine.update.run for engine in self._engines.values()} - {""}
        last = (engine.last_version for engine in self._engines.values())
        head, had = self.head_of(pin.run), [version for version in last if version]
        versions.check_pin(pin, head, had, held=held)

    def check_taken(self, asked: frozenset[str], *, dedicated_only: bool) -> None:
        """Refuse a turn that each engine attached refuses something of.

        Raises:
            UnsafeTurn: each does; names what.
        """
        kinds = [EngineKind.DEDICATED] if dedicated_only else list(EngineKind)
        engines = self._engines.values()
        check_taken(asked, [one.update.refuses for one in engines if one.kind in kinds])

    def lacks_dedicated(self) -> bool:
        """Engines are attached, and all are borrowed."""
        kinds = {engine.kind for engine in self._engines.values()}
        return bool(kinds) and EngineKind.DEDICATED not in kinds

    def heads(self) -> dict[str, WeightVersion]:
        """The newest versions of runs beside the lease's first."""
        return dict(self._heads)

    def head_of(self, run: str) -> WeightVersion | None:
        """The newest version of a run.

        The lease's first's without a name, and for a run that no engine has told of.
        """
        return self._heads.get(run) or self.head

    def apply(self, update: EngineUpdate, stream: int) -> None:
        """Apply an owner's update of an engine.

        Replicas pass on each adapter by itself, so what they say is of that alone. An owner that
        names no adapters means all that its engine had: it knows nothing of them at the moment.
        """
        if update.relayed:
            self._apply(update, stream)
            return
        known = self._adapters_of(update.engine)
        if update.adapters:
            parts = each_adapter(update)
        elif update.version:
            parts = (update,)  # its process follows one run now
        else:
            parts = tuple(_of_adapter(update, one.update, len(known)) for one in known) or (update,)
        held = {part.engine for part in parts}
        bare = self._engines.get(update.engine)
        for engine in (*known, *([bare] if bare is not None else [])):
            if engine.name not in held:
                self._drop(engine)  # its run has no adapter there any more, or it is one of several
        for part in parts:
            self._apply(part, stream)

    def _adapters_of(self, name: str) -> list[Engine]:
        """What that engine is here, where it holds adapters."""
        engines = self._engines.values()
        return [one for one in engines if one.update.run and one.name == f"{name}/{one.update.run}"]

    def _apply(self, update: EngineUpdate, stream: int) -> None:
        now, self._bounds = self._clock(), None
        engine = self._engines.get(update.engine)
        if engine is None:
            engine = Engine(update, stream, now, part=self._part)
            self._engines[update.engine] = engine
            if update.run:
                self._join(engine)
            was_open = engine.gate_open
        elif update.relayed and not engine.update.relayed and engine.detached_at is None:
            return  # its owner speaks to this replica itself
        else:
            was_open = engine.gate_open
            if engine.update.url != update.url:
                engine.fences.clear()  # another process: no leg of ours lives there
                engine.last_version = None
                self.residents.drop_engine(engine.name)
            engine.update, engine.stream, engine.detached_at = update, stream, None
        self.residents.set_pool(update.engine, update.kv_tokens)
        before = engine.version
        engine.version = versions.parse(update.version) if update.version else None
        engine.last_version = engine.version or engine.last_version
        if update.named:
            self._raise_own_head(engine)
        else:
            self._raise_head(engine.version, versions.parse(update.head))
            if engine.version != before:
                self._compare_checkpoints(engine)
        self._gate_moved(engine, was_open, now)
        self.changed.fire()

    def announce(self, head: WeightVersion) -> None:
        """A version has been published; engines further behind than the bound get no new turns."""
        if head.run in self._heads:
            newest = versions.newest((head, self._heads[head.run])) or head
            self._heads[head.run] = newest
            for engine in self._engines.values():
                if engine.update.named and engine.update.run == head.run:
                    engine.head = newest
        else:
            self._raise_head(head)
        self.changed.fire()

    def detach(self, stream: int) -> None:
        """An owner's stream has ended: its engines' gates count as closed."""
        now = self._clock()
        for engine in list(self._engines.values()):
            if engine.stream == stream and engine.detached_at is None:
                was_open = engine.gate_open
                engine.detached_at = now
                self._gate_moved(engine, was_open, now)
                if engine.update.leaving:
                    self._drop(engine)
        self._raise_head()
        self.changed.fire()

    def forget(self, after_seconds: float) -> None:
        """Drop engines whose owner has been gone for that long."""
        limit = self._clock() - after_seconds
        gone = [e for e in self._engines.values() if e.detached_at and e.detached_at <= limit]
        for engine in gone:
            self._drop(engine)
        if gone:
            self._raise_head()
            self.changed.fire()

    def _drop(self, engine: Engine) -> None:
        self._bounds = None
        del self._engines[engine.name]
        if engine.update.run:
            self._join(engine)
        self.residents.drop_engine(engine.name)
        for leg in list(engine.legs.values()):
            leg.end(MoveReason.GONE)

    def _join(self, engine: Engine) -> None:
        """Adapters of one process know each other, by the name that its owner gives it.

        Where it is reached says nothing: one that starts is reached nowhere yet.
        """
        name = engine.process
        same = [e for e in self._engines.values() if e.update.run and e.process == name]
        for one in same:
            one.together = tuple(same)

    def _raise_own_head(self, engine: Engine) -> None:
        """The newest version of a run beside the lease's first."""
        run, reported = engine.update.run, versions.parse(engine.update.head)
        peers = [e for e in self._engines.values() if e.update.named and e.update.run == run]
        held = [one.version for one in peers if one.version and not one.update.leaving]
        found = versions.next_head(self._heads.get(run), (engine.version, reported), held)
        if found is not None:
            self._heads[run] = found
        for one in peers:
            one.head = found

    def _raise_head(self, *named: WeightVersion | None) -> None:
        staying = (
            engine
            for engine in self._engines.values()
            if not engine.update.leaving and not engine.update.named
        )
        held = [engine.version for engine in staying if engine.version]
        self.head = versions.next_head(self.head, named, held)
        if self.head is not None and not self.head.is_base:
            metrics.HEAD.set(self.head.sequence)

    def _compare_checkpoints(self, engine: Engine) -> None:
        """Say so when an engine gets no turns because it was started from another checkpoint."""
        version, head = engine.version, self.head
        if version is None or head is None or not head.is_base or version == head:
            return
        LOG.warning(
            "engine %s gets no turns before the first publish: its own checkpoint is %s, turns "
            "are sampled by %s; start all engines of a lease from one checkpoint",
            *(engine.name, version, head),
        )

    def _gate_moved(self, engine: Engine, was_open: bool, now: float) -> None:
        if was_open == engine.gate_open:
            return
        since = now - engine.gate_since
        reclaimed = not was_open and since >= self._pause_seconds
        engine.hazard = engine.hazard.passed(since, is_open=was_open, reclaimed=reclaimed)
        if not was_open:
            engine.note_success()  # whatever made it fail lies before the pause
        engine.gate_since = now


def _of_adapter(update: EngineUpdate, known: EngineUpdate, adapters: int) -> EngineUpdate:
    """What an update that names no adapters says of one: nothing of its version."""
    return msgspec.structs.replace(
        update,
        engine=known.engine,
        version="",
        digest="",
        head="",
        kv_tokens=update.kv_tokens // adapters,
        run=known.run,
        named=known.named,
    )
