"""One process tree of a slot's engine: spawned, written down, waited for, ended without a trace.

An engine that is restarted gets a new tree in the same ``EngineProcess``; between two trees it is
empty. What belongs to a tree and must not outlive it is here: its cgroup, its user, its record in
``engine.json``, its weights' attestation, its snapshots in shared memory, and the key that its own
port asks for. Next step: ``lifecycle`` decides when, ``process`` and ``exec_engine`` do the
spawning.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from pathlib import Path

import aiohttp

from rose_agent.devices.usage import MemoryMeter
from rose_agent.errors import NotReady
from rose_agent.host import metrics
from rose_agent.host.enforcement.enforcer import EnforcedEngine
from rose_agent.host.enforcement.tree import TreeState
from rose_agent.host.memory.sizing import vocabulary
from rose_agent.host.processes import process
from rose_agent.host.processes.launchers import (
    EngineOrder,
    EngineProgram,
    launcher_for,
    resolve_model,
)
from rose_agent.host.route.tokenizer_files import tokenizer_frame
from rose_agent.host.sharing.sharing import Sharing
from rose_agent.host.slots.site import Site
from rose_agent.host.users.kv_folders import KvOwner
from rose_agent.os import processes
from rose_agent.os.groups import ProcessGroup, end
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.host import EnsureEngine
from rose_core.wire.tokenizer_files import digest
from rose_engines.node.rundir import EngineFile, SlotDir, write_json
from rose_engines.process.exposed_routes import KEY_VARIABLE
from rose_wire.ports import free_port

_POLL_SECONDS = 0.25
_MEMBERS_SECONDS = 1.0
_READY_TIMEOUT = aiohttp.ClientTimeout(total=2)


class EngineProcess:
    """The process tree of one slot's engine, if there is one.

    Args:
        order: what runs; of it, only what never changes under a running engine is used.
        folder: the slot's part of the run directory.
        watched: the slot's entry with the enforcer.
        sharing: how the engine shares its GPU.
    """

    def __init__(
        self,
        order: EnsureEngine,
        folder: SlotDir,
        site: Site,
        watched: EnforcedEngine,
        sharing: Sharing,
    ) -> None:
        self.port = 0
        self.key = ""
        self.started_ns = 0
        self.vocabulary = 0
        self.tokenizer = ""
        self.drafts = False
        self.refuses: tuple[str, ...] = ()
        self._order = order
        self._folder = folder
        self._site = site
        self._watched = watched
        self._sharing = sharing
        self._spawned: process.Spawned | None = None
        self._members: tuple[float, tuple[int, ...]] | None = None

    @property
    def url(self) -> str:
        """The engine's own address, on this node only."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The engine's log."""
        return self._site.logs / f"{self._folder.uid}.log"

    def pids(self) -> tuple[int, ...]:
        """Members of the tree, at most a second old: the status is asked for many times."""
        if self._spawned is None:
            return ()
        now = time.monotonic()
        if self._members is None or now - self._members[0] > _MEMBERS_SECONDS:
            self._members = (now, self._spawned.group.pids())
        return self._members[1]

    def held_bytes(self, meter: MemoryMeter) -> int | None:
        """Memory that the tree holds; None = unknown."""
        pids = self._spawned.group.pids() if self._spawned is not None else ()
        return meter.read(pids, self._order.gpu_uuids)

    # --- its beginning

    def program(self) -> EngineProgram:
        """What to run, on a port that is free now.

        Raises:
            HostError, EngineError: the order cannot work, or not now.
        """
        spec = self._order.engine
        launcher = launcher_for(spec.engine_class, self._site.launchers)
        model = resolve_model(self._site.models, spec.model)
        self.port = free_port()
        self.vocabulary = vocabulary(model)
        frame = tokenizer_frame(self._site.models, model)
        self.tokenizer = digest(frame) if frame else ""
        order = EngineOrder(
            *(spec, self._folder, model, self._site.python, self.port),
            gpu_uuids=self._order.gpu_uuids,
            sizer=self._site.sizer,
            kv_store=self._store(),
            kv_pool=self.pool(),
        )
        program = launcher(order)
        self.drafts, self.refuses = program.drafts, program.refuses
        return program

    def _store(self) -> Path | None:
        """Folder of the lease's keys, where it keeps any."""
        wanted = self._order.engine.kv_store_bytes
        if not wanted:
            return None
        owner = KvOwner(self._order.lease, self._order.lease_uid)
        return self._site.kv_folders.open(self._folder.uid, owner, wanted).path

    def pool(self) -> KvPoolSpec | None:
        """The platform's pool, where the lease has a secret: what nobody could seal stays here."""
        order = self._order
        return self._site.kv_pool if order.kv_secret and order.engine.kv_store_bytes else None

    async def spawn(self, program: EngineProgram) -> process.Spawned:
        """Start it under the enforcer.

        Raises:
            HostError, OSError: it cannot be started, or not contained.
        """
        # The new process has base weights: what was attested before is void.
        self._forget_weights()
        self._folder.plugin_socket.unlink(missing_ok=True)
        self._folder.activity.unlink(missing_ok=True)
        self.started_ns = time.monotonic_ns()
        self._members = None
        account = self._site.accounts.take(self._folder)
        program = await self._sharing.admit(program, account.uid, self._folder.uid)
        self.key = secrets.token_hex(16)
        inside = process.Containment(
            self._folder.uid,
            self._site.freezer,
            self.log,
            account,
            self._site.limiter,
            self._sharing.own_shm,
            self._site.spawner,
            self._site.kv_folders.group_of(self._folder.uid),
        )
        keyed = replace(program, environment={**program.environment, KEY_VARIABLE: self.key})
        spawned = await process.spawn(keyed, inside)
        self._spawned = spawned = self._sharing.steer(spawned)
        self.record()
        self._watched.put(self._sharing.enforced(spawned) or spawned.group)
        self._site.enforcer.wake()
        return spawned

    def record(self) -> None:
        """Write ``engine.json``, for the node's other processes and the next host."""
        spawned = self._spawned
        if spawned is None:
            return
        members = [pid for pid in spawned.group.pids() if pid != spawned.root.pid]
        record = EngineFile(
            slot=self._order.slot.uid,
            generation=self._order.slot.generation,
            pids=(spawned.root.pid, *members),
            cgroup=str(spawned.group.directory or ""),
            cgroup_version=spawned.group.driver,
            cgroup_path=spawned.cgroup_path,
            cgroup_number=_number(spawned.group.directory),
            pid_namespace=processes.pid_namespace(),
            start_ticks=spawned.start_ticks,
            url=self.url,
            port=self.port,
            python=str(self._site.python),
            model=self._order.engine.model,
            started_ns=self.started_ns,
            dedicated=self._site.dedicated,
        )
        write_json(self._folder.engine, record)

    def _forget_weights(self) -> None:
        for path in self._folder.every_weights():
            path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Declare what was attested void: weight-sync begins anew, as with a new process."""
        self._forget_weights()
        self.started_ns = time.monotonic_ns()
        self.record()

    async def wait_ready(self, ready_path: str, exited: asyncio.Task[int]) -> None:
        """Wait until it answers, or has ended; time in which it is stopped does not count.

        Raises:
            NotReady: it took too long.
        """
        allowed = self._site.start_limit_seconds
        async with aiohttp.ClientSession(timeout=_READY_TIMEOUT) as session:
            while allowed > 0:
                if exited.done():
                    return
                if await self._answers(session, ready_path):
                    metrics.START_SECONDS.observe((time.monotonic_ns() - self.started_ns) / 1e9)
                    self.record()
                    return
                running = self._watched.state is TreeState.RUNNING
                allowed -= _POLL_SECONDS if running else 0.0
                await asyncio.wait({exited}, timeout=_POLL_SECONDS)
        message = f"not ready after {self._site.start_limit_seconds:.0f} s of running"
        raise NotReady(message)

    async def _answers(self, session: aiohttp.ClientSession, path: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(self.url + path) as reply:
                return reply.status == 200
        return False

    # --- its end

    async def kill(self, seconds: float) -> bool:
        """End the tree and remove what it leaves.

        Returns:
            False when something still lives after ``seconds``.
        """
        # From here on nothing may freeze the tree again: a frozen v1 task ignores SIGKILL.
        self._watched.put(None)
        group = self._group()
        if group is None:
            return True
        members = group.pids()
        shared = processes.shared_memory(members)
        gone = await asyncio.to_thread(end, group, seconds)
        if gone:
            await self._clear(members, shared)
        return gone

    def _group(self) -> ProcessGroup | None:
        if self._spawned is not None:
            return self._spawned.group
        if self._site.freezer.base is None:
            return None
        # Cancelled between fork and return: the cgroup knows what was started.
        return self._site.freezer.group(self._folder.uid, 0)

    async def _clear(self, members: tuple[int, ...], shared: frozenset[Path]) -> None:
        for path in shared:
            path.unlink(missing_ok=True)
        if self._spawned is not None:
            await self._spawned.root.wait()
        processes.reap(members)
        self._site.limiter.remove(self._folder.uid)
        self._sharing.clean_up()
        self._site.accounts.release(self._folder)
        self._spawned = None
        self._folder.engine.unlink(missing_ok=True)


def _number(folder: Path | None) -> int:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return folder.stat().st_ino if folder is not None else 0
    return 0
