"""The engine host's slots: ensure, stop, hold, release, status; repair at start, drain at the end.

Serves ``rose_wire.services`` ENSURE, STOP, HOLD, DORMANT, LIMIT and STATUS on ``host.sock``. Rules:

- The same order again changes nothing; a new token or weight source is taken over in place.
- A higher generation replaces a lower one (the old tree is dead before the new one starts);
  a lower one is refused for good.
- A permit outlives the engine it was made for, and the host's process, until the slot is stopped:
  a guard that has it mapped need not attach again. After ``stop`` it must.

Next step: ``slot_engine`` for what a slot runs, ``lifecycle`` for one engine, ``enforcer`` for the
permit, ``proxy`` for the data route.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rose_agent.errors import HostError, WrongGeneration
from rose_agent.host import metrics
from rose_agent.host.processes.launchers import resolve_model
from rose_agent.host.route.proxy import Target
from rose_agent.host.route.tokenizer_files import tokenizer_frame
from rose_agent.host.slots.dual_share import DualShareEngine
from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.host.slots.site import Site
from rose_agent.host.slots.slot_engine import RolloutEngine, SingleEngine
from rose_agent.host.vacancy.holders import GpuHolder
from rose_core.host_reasons import HostReason
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import (
    Accepted,
    EngineState,
    EngineStatus,
    EnsureEngine,
    HoldEngine,
    HostStatus,
    HostStatusRequest,
    LimitMemory,
    SetDormant,
    StopEngine,
)
from rose_core.wire.sync import NodeModel
from rose_engines.node.permit import BadPermit, Permit
from rose_engines.node.rundir import RunDir, SlotDir
from rose_wire.errors import Refused
from rose_wire.rpc import Server
from rose_wire.services import DORMANT, ENSURE, HOLD, LIMIT, STATUS, STOP

_log = logging.getLogger(__name__)

# Longest that a hold waits for the tree to stand still before it answers.
_HOLD_WAIT_SECONDS = 1.0
_REPLACE_SECONDS = 10.0
# Engines that are gone and still reported.
GONE_KEPT = 64


class EngineHost:
    """All engines of a node.

    Args:
        rundir: the node's run directory, already made.
        site: what the slots share.
        endpoint: base URL under which routers reach the data routes.
    """

    def __init__(self, rundir: RunDir, site: Site, endpoint: str = "") -> None:
        self.endpoint = endpoint
        self._rundir = rundir
        self._site = site
        self._lives: dict[SlotUid, RolloutEngine] = {}
        self._gone: dict[SlotUid, EngineStatus] = {}
        self._generations: dict[SlotUid, int] = {}
        self._locks: dict[SlotUid, asyncio.Lock] = {}
        self._draining = False
        self.capabilities: Callable[[], dict[str, str]] = dict
        self.models: Callable[[], tuple[NodeModel, ...] | None] = lambda: None
        self.certificates: Callable[[], tuple[str, ...]] = tuple
        self.turns: Callable[[SlotUid], int | None] = lambda _uid: None  # under way, of a slot

    def bind(self, server: Server) -> None:
        """Offer the host's methods."""
        server.unary(ENSURE, self.ensure)
        server.unary(STOP, self.stop)
        server.unary(HOLD, self.hold)
        server.unary(DORMANT, self.set_dormant)
        server.unary(LIMIT, self.limit_memory)
        server.unary(STATUS, self.status)

    async def ensure(self, order: EnsureEngine) -> EngineStatus:
        """Run the ordered engine.

        Raises:
            Refused: an older generation, a changed engine under the same generation, or the host
                is draining.
        """
        uid = order.slot.uid
        self._check_generation(order.slot)
        if self._draining:
            raise Refused("this engine host is being replaced and starts nothing new")
        async with self._lock(uid):
            life = self._lives.get(uid)
            if life is not None and life.order.slot == order.slot:
                return self._update(life, order)
            if life is not None:
                await self._end(life, _REPLACE_SECONDS, HostReason.REPLACED)
            return self._start(order)

    async def stop(self, order: StopEngine) -> EngineStatus:
        """End the slot's engine.

        Raises:
            Refused: an older generation.
        """
        uid = order.slot.uid
        self._check_generation(order.slot)
        async with self._lock(uid):
            life = self._lives.get(uid)
            if life is None:
                gone = EngineStatus(order.slot, EngineState.GONE, reason=HostReason.STOP_ORDERED)
                return self._gone.get(uid, gone)
            _log.info("slot %s: the guard orders its end: %.64r", uid, order.reason)
            metrics.count_kill(HostReason.STOP_ORDERED)
            return await self._end(life, order.deadline_seconds, HostReason.STOP_ORDERED)

    async def hold(self, order: HoldEngine) -> Accepted:
        """Pause or no longer pause for one holder; a pause is answered once all stand still.

        Raises:
            Refused: no engine for this slot and generation.
        """
        life = self._life(order.slot)
        began = time.monotonic_ns()
        life.hold(order.holder, hold=order.hold)
        self._site.enforcer.wake()
        turns = self.turns(order.slot.uid)  # the same as before, and nothing waits for them
        deadline = began + int(_HOLD_WAIT_SECONDS * 1e9)
        while order.hold and time.monotonic_ns() < deadline:
            if life.stands_still_for(order.holder):
                break
            await asyncio.sleep(0.001)
        return Accepted((time.monotonic_ns() - began) // 1000, turns)

    async def set_dormant(self, order: SetDormant) -> EngineStatus:
        """Begin to release the engine's memory or to take it back; the status tells the effect.

        Raises:
            Refused: no engine for this slot and generation.
        """
        life = self._life(order.slot)
        life.set_dormant(dormant=order.dormant)
        return life.status(self.endpoint_of(order.slot.uid))

    async def limit_memory(self, order: LimitMemory) -> EngineStatus:
        """Hold the engine to a budget of memory; the status tells the effect.

        Raises:
            Refused: no engine for this slot and generation.
        """
        life = self._life(order.slot)
        life.limit_memory(order.permille, order.held_bytes)
        return life.status(self.endpoint_of(order.slot.uid))

    async def status(self, _request: HostStatusRequest) -> HostStatus:
        """Every engine, those that are gone included until their slot is ordered anew."""
        living = [life.status(self.endpoint_of(uid)) for uid, life in self._lives.items()]
        every = (*living, *self._gone.values())
        return HostStatus(every, self.capabilities(), self.models(), self.certificates())

    def holdings(self) -> tuple[GpuHolder, ...]:
        """Every engine that may hold a GPU, leftovers that could not be ended included."""
        living = tuple(
            GpuHolder(life.order.slot_name, life.state.value, life.order.gpu_uuids)
            for life in self.engines()
        )
        known = {self._site.freezer.directory(life.folder.uid) for life in self.engines()}
        leftovers = (tree for tree in self._site.freezer.strays() if tree.directory not in known)
        unowned = tuple(
            GpuHolder(str(tree.directory), "Leftover") for tree in leftovers if tree.pids()
        )
        return (*living, *unowned)

    def target(self, uid: SlotUid) -> Target | None:
        """Where the data route of a slot leads; None without such a slot."""
        slot = self._lives.get(uid)
        if slot is None:
            return None
        life = slot.current

        def count(tokens: int) -> None:
            life.generated_tokens += tokens
            metrics.GENERATED_TOKENS.inc(tokens)

        serving = life.state is EngineState.SERVING
        return Target(
            life.url if serving else "",
            life.order.token,
            count,
            life.key,
            partial(_tokenizer, self._site.models, life.order.engine.model),
            life.folder.plugin_socket,
        )

    def endpoint_of(self, uid: SlotUid) -> str:
        """Public base URL of a slot's data route."""
        return f"{self.endpoint}/slots/{uid}"

    def drain(self) -> None:
        """Start nothing new from now on."""
        self._draining = True

    async def shut_down(self, seconds: float) -> bool:
        """End every engine.

        Returns:
            False when something still lives afterwards.
        """
        self.drain()
        ended = await asyncio.gather(
            *(
                self._end(life, seconds, HostReason.HOST_ENDING)
                for life in tuple(self._lives.values())
            )
        )
        return all(status.state is EngineState.GONE for status in ended)

    def _update(self, life: RolloutEngine, order: EnsureEngine) -> EngineStatus:
        if order.engine != life.order.engine or order.gpu_uuids != life.order.gpu_uuids:
            raise Refused(
                f"slot {order.slot_name} runs another engine under generation "
                f"{order.slot.generation}; a changed engine needs a higher generation"
            )
        if order != life.order:
            life.update(order)
        return life.status(self.endpoint_of(order.slot.uid))

    def _start(self, order: EnsureEngine) -> EngineStatus:
        uid = order.slot.uid
        try:
            folder = self._rundir.slot(uid).create()
        except ValueError as error:
            raise Refused(str(error)) from error
        _close_permit(folder)
        life = engine_for(order, folder, self._site, self._count)
        self._generations[uid] = order.slot.generation
        self._gone.pop(uid, None)
        self._lives[uid] = life
        life.start()
        return life.status(self.endpoint_of(uid))

    async def _end(self, life: RolloutEngine, seconds: float, reason: HostReason) -> EngineStatus:
        uid = life.order.slot.uid
        gone = await life.end(seconds=seconds, reason=reason)
        status = life.status("")
        if gone:
            self._lives.pop(uid, None)
            self._gone[uid] = status
            self._forget_oldest()
            life.detach()
            replaced = reason == HostReason.REPLACED
            for folder in life.folders:
                if not replaced:
                    self._site.kv_folders.close(folder.uid)
                # Somebody may have the slot's own permit mapped; a second engine's is a link to it.
                self._site.forget(folder, not replaced or folder is not life.folder)
        self._count()
        return status

    def _forget_oldest(self) -> None:
        """Whoever asks has long heard that an engine is gone; its generation is never forgotten."""
        while len(self._gone) > GONE_KEPT:
            uid = next(iter(self._gone))
            del self._gone[uid]
            if not self._lock(uid).locked():
                del self._locks[uid]

    def _life(self, slot: SlotKey) -> RolloutEngine:
        life = self._lives.get(slot.uid)
        if life is None or life.order.slot != slot:
            raise Refused(f"no engine for slot {slot.uid}/{slot.generation}")
        return life

    def _check_generation(self, slot: SlotKey) -> None:
        known = self._generations.get(slot.uid, 0)
        if slot.generation < known:
            error = WrongGeneration(
                f"slot {slot.uid} is at generation {known}, not {slot.generation}"
            )
            raise Refused(str(error)) from error

    def _lock(self, uid: SlotUid) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    def engines(self) -> tuple[EngineLife, ...]:
        """Every engine of every slot."""
        return tuple(life for slot in self._lives.values() for life in slot.lives)

    def _count(self) -> None:
        counts = Counter(life.state for life in self.engines())
        for state in EngineState:
            metrics.ENGINES.labels(state=state.value).set(counts[state])


def engine_for(
    order: EnsureEngine, folder: SlotDir, site: Site, changed: Callable[[], None]
) -> RolloutEngine:
    """What a slot runs; two engines only where its pool has a share for busy serving.

    Args:
        order: what the guard asked for.
        folder: the slot's folder, with its permit in it.
        site: what the slots share.
        changed: called after every change of an engine's state.
    """
    if order.engine.sharing.busy_percent:
        return DualShareEngine(order, folder, site, changed)
    return SingleEngine(order, folder, site, changed)


def _close_permit(folder: SlotDir) -> None:
    """The slot's permit lies there, closed; one that did already stays the same memory."""
    try:
        permit = Permit.attach(folder.permit)
    except (OSError, BadPermit):
        permit = Permit.create(folder.permit)
    permit.close_now()
    permit.detach()


def _tokenizer(models: Path, name: str) -> bytes:
    try:
        return tokenizer_frame(models, resolve_model(models, name))
    except HostError:  # it is gone from the node
        return b""
