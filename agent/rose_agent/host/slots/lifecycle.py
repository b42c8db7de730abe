"""Life of one slot's engine: start, wait until ready, serve, restart with back-off, end.

| state    | event                              | next                                        |
|----------|------------------------------------|---------------------------------------------|
| Starting | ready path answers 200             | Serving                                     |
| Starting | process ended, or too long running | Failed                                      |
| Serving  | process ended, or weights broken   | Failed                                      |
| Serving  | memory released (``dormancy``)     | Dormant                                     |
| Dormant  | memory restored                    | Serving, without a version                  |
| Dormant  | process ended                      | Failed                                      |
| Failed   | back-off over                      | Starting                                    |
| Failed   | the order itself cannot work       | stays Failed until a new order              |
| any      | ``end``                            | Stopping -> Gone                            |

Time in which the engine was stopped does not count towards the start limit.
Next step: ``engine_process`` is the engine's process tree, ``engine_host`` keeps one
of these per slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from rose_agent.devices.usage import MemoryMeter
from rose_agent.errors import BadEngine, BrokenEngine, HostError, NoMemory
from rose_agent.host import metrics
from rose_agent.host.enforcement.enforcer import EnforcedEngine
from rose_agent.host.enforcement.tree import TreeState
from rose_agent.host.processes import process
from rose_agent.host.sharing.sharing import Sharing, room_of
from rose_agent.host.slots.dormancy import EngineDormancy
from rose_agent.host.slots.engine_process import EngineProcess
from rose_agent.host.slots.pool_membership import PoolMembership
from rose_agent.host.slots.site import Site
from rose_core.host_reasons import HostReason
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine
from rose_core.wire.routing import AdapterVersion
from rose_engines.errors import EngineError
from rose_engines.node.rundir import SlotDir, WeightsFile, read_json, write_json

_log = logging.getLogger(__name__)

_OfRun: TypeAlias = tuple[str, WeightsFile]

_KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.25
# After this long in Serving earlier failures are forgotten.
STABLE_SECONDS = 60.0


def backoff_seconds(failures: int) -> float:
    """Pause before the next start: 1, 2, 4 ... 60 seconds."""
    return min(60.0, 2.0 ** max(0, failures - 1))


class EngineLife:
    """One slot's engine.

    Args:
        order: what the guard asked for.
        folder: the slot's part of the run directory, already made.
        watched: the slot's entry with the enforcer.
        changed: called after every change of state.
    """

    def __init__(
        self,
        order: EnsureEngine,
        folder: SlotDir,
        site: Site,
        watched: EnforcedEngine,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.order = order
        self.folder = folder
        self.watched = watched
        self.generated_tokens = 0
        self.restarts = 0
        self._site = site
        self._changed = changed
        self._state = EngineState.STARTING
        self._reason = HostReason.NONE
        self._message = ""
        self._failures = 0
        self._needs: int | None = None
        self._fetched, self._fetched_of = 0, dict[str, int]()
        self._fetched_by_ns = 0
        self._ending: tuple[HostReason, str] | None = None
        self._sharing = Sharing(
            *(site.means, order, folder.plugin_socket, lambda: (self.url, self.key)),
            footprints=site.sizer.footprints,
        )
        self._sharing.room = room_of(order)
        self._process = EngineProcess(order, folder, site, watched, self._sharing)
        self.dormancy = EngineDormancy(self, site, lambda: site.cut(order.slot.uid))
        self._task: asyncio.Task[None] | None = None
        self._pool: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """Where the engine stands; see the table of the module."""
        return self._state

    @property
    def url(self) -> str:
        """The engine's own address, on this node only."""
        return self._process.url

    @property
    def key(self) -> str:
        """The key that the engine's own port asks for (``rose_engines.process.exposed_routes``)."""
        return self._process.key

    def start(self) -> None:
        """Start the engine in the background."""
        self._task = asyncio.create_task(self._live(), name=f"engine {self.order.slot_name}")

    def status(self, endpoint: str) -> EngineStatus:
        """The engine's status; address and version only while it serves."""
        found = tuple(self._each_run())
        weights = found[0][1]
        version, digest = self._usable(weights)
        serving = self._state is EngineState.SERVING
        elastic = self._sharing.elastic
        return EngineStatus(
            slot=self.order.slot,
            state=self._state,
            holders=self.watched.holders,
            pids=self._process.pids(),
            endpoint=endpoint if serving else "",
            version=version,
            digest=digest,
            head=weights.head,
            generated_tokens=self.generated_tokens,
            weight_bytes=self._count_fetched(found),
            restarts=self.restarts,
            reason=self._reason or self.watched.reason,
            message=self._message or self.dormancy.refusal or weights.error or _complaint(found),
            can_dormant=self.dormancy.is_possible,
            residue_bytes=self.dormancy.residue_bytes,
            released_bytes=self.dormancy.released_bytes,
            vocabulary=self._process.vocabulary if serving else 0,
            tokenizer=self._process.tokenizer if serving else "",
            drafts=self._process.drafts,
            refuses=self._process.refuses,
            device_bytes=self.device_bytes,
            needs_bytes=self._needs,
            measuring=self._sharing.measuring,
            kv_permille=elastic.permille if elastic is not None else None,
            kv_held_bytes=elastic.held_bytes if elastic is not None else None,
            adapters=self._adapters(found),
        )

    def _usable(self, weights: WeightsFile) -> tuple[str, str]:
        """Version and digest as attested on this very process; empty unless it serves."""
        fresh = weights.attested and weights.engine_started_ns == self._process.started_ns
        serving = self._state is EngineState.SERVING
        return (weights.version, weights.digest) if fresh and serving else ("", "")

    def _adapters(self, found: Sequence[_OfRun]) -> tuple[AdapterVersion, ...]:
        """What each run's adapter is, where the engine holds several."""
        if not self.order.engine.shares_adapters:
            return ()
        return tuple(
            AdapterVersion(run, *self._usable(weights), weights.head) for run, weights in found
        )

    def _each_run(self) -> Iterator[_OfRun]:
        """What weight-sync has written of each run, the engine's first one first."""
        source = self.order.weights
        for run in source.runs:
            path = self.folder.weights_of("" if run == source.run else run)
            yield run, read_json(path, WeightsFile) or WeightsFile()

    def _count_fetched(self, found: Sequence[_OfRun]) -> int:
        """What was fetched for this process; a run that goes takes nothing of it along."""
        if self._fetched_by_ns != self._process.started_ns:
            self._fetched, self._fetched_of = 0, {}
            self._fetched_by_ns = self._process.started_ns
        for run, weights in found:
            if weights.engine_started_ns == self._process.started_ns:
                fetched, counted = weights.fetched_bytes, self._fetched_of.get(run, 0)
                self._fetched += fetched - counted if fetched >= counted else fetched
                self._fetched_of[run] = fetched
        return self._fetched

    async def end(self, *, seconds: float, reason: HostReason) -> bool:
        """Kill the tree and close the permit.

        Returns:
            False when something still lives after ``seconds``; the state then stays Stopping.
        """
        self._set(EngineState.STOPPING, reason)
        self.watched.permit.close_now()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        gone = await self._kill(seconds)
        if gone:
            self._site.enforcer.forget(self.watched)
            self.watched.detach()
            self._set(EngineState.GONE, reason)
        return gone

    async def _live(self) -> None:
        while True:
            try:
                await self._once()
            except (HostError, EngineError, OSError) as error:
                self._message = str(error)
                if isinstance(error, NoMemory) and error.needed is not None:
                    self._needs = error.needed
                _log.warning("%s: %s", self.order.slot_name, error)
                self._set(EngineState.FAILED, _reason_of(error))
                if isinstance(error, BadEngine) or not isinstance(error, HostError | OSError):
                    return
            # Never two engines in one slot: the next one starts when nothing is left of this one.
            while not await self._kill(_KILL_SECONDS):
                _log.error("%s: cannot be killed", self.order.slot_name)
            self._failures += 1
            await asyncio.sleep(backoff_seconds(self._failures))
            self.restarts += 1
            metrics.RESTARTS.inc()

    async def _once(self) -> None:
        """From spawn to the end of the process."""
        self._set(EngineState.STARTING, self._reason)  # of the start that failed, if one did
        program = await self._site.ask(self._process.program)
        self._needs = program.start_bytes or program.device_bytes or None
        spawned = await self._process.spawn(program)
        exited = asyncio.create_task(spawned.root.wait())
        try:
            await self._process.wait_ready(program.ready_path, exited)
            await self._sharing.verify(spawned)
            began = time.monotonic()
            self._message = ""
            self._set(EngineState.SERVING, HostReason.NONE)
            self._site.sizer.settle(self.folder.uid)
            self._pool = self._join_pool()
            while not exited.done():
                await asyncio.wait({exited}, timeout=_LOOK_SECONDS)
                self._check_ending()
                running = self.watched.state is TreeState.RUNNING
                await self._sharing.check(running=running)
                process.rotate(self._process.log)
                self._check_weights()
                if time.monotonic() - began > STABLE_SECONDS:
                    self._failures = 0
        finally:
            exited.cancel()
            if self._pool is not None:
                self._pool.cancel()
        self._note_exit(spawned)

    def _join_pool(self) -> asyncio.Task[None] | None:
        """Tell the process of its lease's secret, where it has a pool of keys."""
        order = self.order
        if self._process.pool() is None:
            return None
        membership = PoolMembership(self.folder.plugin_socket, order.kv_secret)
        return asyncio.create_task(membership.keep(), name=f"pool of {order.slot_name}")

    def _check_weights(self) -> None:
        """An engine that could not undo a commit must not compute again.

        Raises:
            BrokenEngine: weight-sync has heard so from this very process.
        """
        for run, weights in self._each_run():
            if weights.broken and weights.engine_started_ns == self._process.started_ns:
                metrics.count_kill(HostReason.BROKEN_WEIGHTS)
                several = bool(self.order.weights.others)
                raise BrokenEngine(f"run {run}: {weights.error}" if several else weights.error)

    def held_bytes(self, meter: MemoryMeter) -> int | None:
        """Memory that the engine's processes hold; None = unknown."""
        return self._process.held_bytes(meter)

    @property
    def device_bytes(self) -> int:
        """Most memory that it takes of its GPU; 0 = not known."""
        return self._sharing.device_bytes

    def limit_memory(self, permille: int | None, held: int | None) -> None:
        """Take from the guard the budget of elastic memory, and what the driver says it holds."""
        if permille is not None and self._sharing.elastic is not None:
            self._sharing.elastic.order(permille)
        self._sharing.hold(held)

    def renew_weights(self) -> None:
        """Declare what was attested void: weight-sync begins anew, as with a new process."""
        self._process.renew()

    def enter(self, state: EngineState, reason: HostReason) -> None:
        """Become dormant, or serve again; ignored while the engine is being ended."""
        if self._state in {EngineState.SERVING, EngineState.DORMANT} and self._ending is None:
            self._set(state, reason)

    def fail(self, reason: HostReason, message: str) -> None:
        """End the process soon; it is started anew after the back-off."""
        metrics.count_kill(reason)
        self._ending = (reason, message)

    def _check_ending(self) -> None:
        """End the engine if ``fail`` was called.

        Raises:
            BrokenEngine: with the reason and message of ``fail``.
        """
        if self._ending is not None:
            reason, message = self._ending
            self._ending = None
            raise BrokenEngine(message, reason)

    def _note_exit(self, spawned: process.Spawned) -> None:
        code = spawned.root.returncode
        tail = process.last_lines(self._process.log)
        limit = self._site.limiter.broken(self.folder.uid)
        why = f"; {limit}" if limit else ""
        self._message = f"engine ended with exit code {code}{why}; its log ends: {tail}"
        _log.warning("%s: %s", self.order.slot_name, self._message)
        reason = HostReason.LIMIT_REACHED if limit else HostReason.ENGINE_EXITED
        self._set(EngineState.FAILED, reason)

    async def _kill(self, seconds: float) -> bool:
        await self.dormancy.forget()
        self._site.sizer.settle(self.folder.uid)
        return await self._process.kill(seconds)

    def _set(self, state: EngineState, reason: HostReason) -> None:
        self._state, self._reason = state, reason
        self._changed()

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under a running engine: token, weight source, room."""
        self.order = order
        self._sharing.room = room_of(order)
        write_json(self.folder.slot, msgspec.to_builtins(order))


def _complaint(found: Sequence[_OfRun]) -> str:
    """Why a run of several is not served at its head."""
    return next((f"run {run}: {weights.error}" for run, weights in found if weights.error), "")


def _reason_of(error: Exception) -> HostReason:
    if isinstance(error, HostError):
        return error.reason
    return HostReason.BAD_ENGINE if isinstance(error, EngineError) else HostError.reason
