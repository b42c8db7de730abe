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
Next step: ``engine_host`` keeps one of these per slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from rose_agent.devices.usage import MemoryMeter
from rose_agent.host import metrics, process
from rose_agent.host.dormancy import Rest
from rose_agent.host.enforcement import TreeState
from rose_agent.host.enforcer import Watched
from rose_agent.host.errors import BadEngine, BrokenEngine, HostError, NotReady
from rose_agent.host.groups import end
from rose_agent.host.launchers import (
    EngineOrder,
    EngineProgram,
    launcher_for,
    resolve_model,
)
from rose_agent.host.sharing import Sharing
from rose_agent.host.site import Site
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine
from rose_engines.errors import EngineError
from rose_engines.rundir import EngineFile, SlotDir, WeightsFile, read_json, write_json

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_KILL_SECONDS = 10.0
_MEMBERS_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_READY_TIMEOUT = aiohttp.ClientTimeout(total=2)
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
        watched: Watched,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.order = order
        self.folder = folder
        self.watched = watched
        self.generated_tokens = 0
        self.restarts = 0
        self.port = 0
        self._site = site
        self._changed = changed
        self._state = EngineState.STARTING
        self._reason = ""
        self._message = ""
        self._failures = 0
        self._started_ns = 0
        self._spawned: process.Spawned | None = None
        self._members: tuple[float, tuple[int, ...]] | None = None
        self._ending: tuple[str, str] | None = None
        self._sharing = Sharing(site.ways, order, folder.plugin_socket)
        self.rest = Rest(self, site.enforcer, site.meter, lambda: site.cut(folder.uid))
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """State of the table."""
        return self._state

    @property
    def url(self) -> str:
        """The engine's own address, on this node only."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The engine's log."""
        return self._site.logs / f"{self.folder.uid}.log"

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._live(), name=f"engine {self.order.slot_name}")

    def status(self, endpoint: str) -> EngineStatus:
        """The engine as others may see it."""
        weights = read_json(self.folder.weights, WeightsFile) or WeightsFile()
        fresh = weights.attested and weights.engine_started_ns == self._started_ns
        serving = self._state is EngineState.SERVING
        return EngineStatus(
            slot=self.order.slot,
            state=self._state,
            holders=self.watched.holders,
            pids=self._pids(),
            endpoint=endpoint if serving else "",
            version=weights.version if fresh and serving else "",
            digest=weights.digest if fresh and serving else "",
            head=weights.head,
            generated_tokens=self.generated_tokens,
            restarts=self.restarts,
            reason=self._reason or self.watched.reason,
            message=self._message or self.rest.refusal or weights.error,
            can_dormant=self.rest.possible,
            residue_bytes=self.rest.residue_bytes,
            released_bytes=self.rest.released_bytes,
        )

    def _pids(self) -> tuple[int, ...]:
        """Members of the tree, at most a second old: the status is asked for many times."""
        if self._spawned is None:
            return ()
        now = time.monotonic()
        if self._members is None or now - self._members[0] > _MEMBERS_SECONDS:
            self._members = (now, self._spawned.group.pids())
        return self._members[1]

    async def end(self, *, seconds: float, reason: str) -> bool:
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
        self._set(EngineState.STARTING, "")
        program = self._program()
        spawned = await self._spawn(program)
        exited = asyncio.create_task(spawned.root.wait())
        try:
            await self._until_ready(program, exited)
            await self._sharing.verify(spawned)
            began = time.monotonic()
            self._message = ""
            self._set(EngineState.SERVING, "")
            self._site.sizer.settle(self.folder.uid)
            while not exited.done():
                await asyncio.wait({exited}, timeout=_LOOK_SECONDS)
                self._check_ending()
                await self._sharing.check()
                process.rotate(self.log)
                self._check_weights()
                if time.monotonic() - began > STABLE_SECONDS:
                    self._failures = 0
        finally:
            exited.cancel()
        self._exited(spawned)

    def _program(self) -> EngineProgram:
        spec = self.order.engine
        launcher = launcher_for(spec.engine_class, self._site.launchers)
        model = resolve_model(self._site.models, spec.model)
        self.port = process.free_port()
        return launcher(
            EngineOrder(
                spec,
                self.folder,
                model,
                self._site.python,
                self.port,
                self.order.gpu_uuids,
                self._site.sizer,
            )
        )

    async def _spawn(self, program: EngineProgram) -> process.Spawned:
        # The new process has base weights: what was attested before is void.
        self.folder.weights.unlink(missing_ok=True)
        self.folder.plugin_socket.unlink(missing_ok=True)
        self._started_ns = time.monotonic_ns()
        self._members = None
        account = self._site.accounts.take(self.folder)
        program = await self._sharing.admit(program, account.uid, self.folder.uid)
        spawned = await process.spawn(
            program,
            freezer=self._site.freezer,
            name=self.folder.uid,
            log=self.log,
            account=account,
            limiter=self._site.limiter,
            own_shm=not self._sharing.by_mps,
        )
        self._spawned = spawned = self._sharing.steer(spawned)
        self._record(spawned)
        self.watched.put(self._sharing.enforced(spawned) or spawned.group)
        self._site.enforcer.poke()
        return spawned

    def _record(self, spawned: process.Spawned) -> None:
        members = [pid for pid in spawned.group.pids() if pid != spawned.root.pid]
        record = EngineFile(
            slot=self.order.slot.uid,
            generation=self.order.slot.generation,
            pids=(spawned.root.pid, *members),
            cgroup=str(spawned.group.directory or ""),
            cgroup_version=spawned.group.driver,
            cgroup_path=spawned.cgroup_path,
            pid_namespace=process.pid_namespace(),
            start_ticks=spawned.start_ticks,
            url=self.url,
            port=self.port,
            python=str(self._site.python),
            model=self.order.engine.model,
            started_ns=self._started_ns,
            dedicated=self._site.dedicated,
        )
        write_json(self.folder.engine, record)

    async def _until_ready(self, program: EngineProgram, exited: asyncio.Task[int]) -> None:
        allowed = self._site.start_limit_seconds
        async with aiohttp.ClientSession(timeout=_READY_TIMEOUT) as session:
            while allowed > 0:
                if exited.done():
                    return
                if await self._answers(session, program.ready_path):
                    metrics.START_SECONDS.observe((time.monotonic_ns() - self._started_ns) / 1e9)
                    if self._spawned is not None:
                        self._record(self._spawned)
                    return
                running = self.watched.state is TreeState.RUNNING
                allowed -= _POLL_SECONDS if running else 0.0
                await asyncio.wait({exited}, timeout=_POLL_SECONDS)
        message = f"not ready after {self._site.start_limit_seconds:.0f} s of running"
        raise NotReady(message)

    async def _answers(self, session: aiohttp.ClientSession, path: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(self.url + path) as reply:
                return reply.status == 200
        return False

    def _check_weights(self) -> None:
        """An engine that could not undo a commit must not compute again.

        Raises:
            BrokenEngine: weight-sync has heard so from this very process.
        """
        weights = read_json(self.folder.weights, WeightsFile)
        ours = weights is not None and weights.engine_started_ns == self._started_ns
        if weights is not None and ours and weights.broken:
            metrics.KILLED.labels(reason="BrokenWeights").inc()
            raise BrokenEngine(weights.error)

    def held_bytes(self, meter: MemoryMeter) -> int | None:
        """Memory that the engine's processes hold; None = unknown."""
        pids = self._spawned.group.pids() if self._spawned is not None else ()
        return meter.read(pids, self.order.gpu_uuids)

    def renew_weights(self) -> None:
        """Void what was attested: weight-sync begins anew, as with another process."""
        self.folder.weights.unlink(missing_ok=True)
        self._started_ns = time.monotonic_ns()
        if self._spawned is not None:
            self._record(self._spawned)

    def enter(self, state: EngineState, reason: str) -> None:
        """Become dormant, or serve again; says nothing to an engine that is on its way out."""
        if self._state in {EngineState.SERVING, EngineState.DORMANT} and self._ending is None:
            self._set(state, reason)

    def fail(self, reason: str, message: str) -> None:
        """End the process; it is started anew after the back-off."""
        metrics.KILLED.labels(reason=reason).inc()
        self._ending = (reason, message)

    def _check_ending(self) -> None:
        """An engine that was told to end does not go on.

        Raises:
            BrokenEngine: with the reason it was told.
        """
        if self._ending is not None:
            reason, message = self._ending
            self._ending = None
            raise BrokenEngine(message, reason)

    def _exited(self, spawned: process.Spawned) -> None:
        code = spawned.root.returncode
        tail = process.last_lines(self.log)
        limit = self._site.limiter.broken(self.folder.uid)
        why = f"; {limit}" if limit else ""
        self._message = f"engine ended with exit code {code}{why}; its log ends: {tail}"
        _log.warning("%s: %s", self.order.slot_name, self._message)
        self._set(EngineState.FAILED, "LimitReached" if limit else "EngineExited")

    async def _kill(self, seconds: float) -> bool:
        await self.rest.forget()
        self._site.sizer.settle(self.folder.uid)
        spawned = self._spawned
        # From here on nothing may freeze the tree again: a frozen v1 task ignores SIGKILL.
        self.watched.put(None)
        if spawned is not None:
            group = spawned.group
        elif self._site.freezer.base is not None:
            # Cancelled between fork and return: the cgroup knows what was started.
            group = self._site.freezer.group(self.folder.uid, 0)
        else:
            return True
        members = group.pids()
        shared = process.shared_memory(members)
        gone = await asyncio.to_thread(end, group, seconds)
        if gone:
            for path in shared:
                path.unlink(missing_ok=True)
            if spawned is not None:
                await spawned.root.wait()
            process.reap(members)
            self._site.limiter.remove(self.folder.uid)
            self._sharing.ended()
            self._site.accounts.release(self.folder)
            self._spawned = None
            self.folder.engine.unlink(missing_ok=True)
        return gone

    def _set(self, state: EngineState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._changed()

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under a running engine: token, weight source."""
        self.order = order
        write_json(self.folder.slot, msgspec.to_builtins(order))


def _reason_of(error: Exception) -> str:
    if isinstance(error, HostError):
        return error.reason
    return "BadEngine" if isinstance(error, EngineError) else HostError.reason
