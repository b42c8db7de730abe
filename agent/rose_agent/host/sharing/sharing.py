"""How one engine shares its GPU, checked from before its start until its end.

With plain time-slicing there is nothing to check.

| moment | asked | when not |
|---|---|---|
| before the start | ``MpsNode.may_share``; the driver takes the limit | tried again later |
| before the start | serving's highest use leaves room for it | tried again later |
| it is ready | it is a listed client that sees its share; it sees its memory limit | ended |
| it is ready | with ``Elastic``, its KV pool is kvcached's (``elastic``) | ended |
| while it serves | the server is not in FAULT | ended, started again when it no longer is |
| while it serves | with ``Elastic``, it holds no more than its limit | ended |
| while it serves | its processes hold no more than it was made for (``footprint``) | ended |
| before it is killed | its processes leave the server (``mps``) | killed after two seconds |

Effects are checked, not answers: with a wrong pipe directory a process silently gets the whole GPU,
and a limit that was set in the wrong cgroup limits nobody. Next step: ``mps`` and ``elastic``
do the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from rose_agent.devices.driver_limit import DriverLimits
from rose_agent.devices.elastic import ElasticMemory, KvcachedSegment
from rose_agent.errors import BadEngine, BrokenEngine, DeviceError, NoMemory, NotShared
from rose_agent.host import metrics
from rose_agent.host.memory.elastic import Elastic
from rose_agent.host.memory.elastic import environment as elastic_environment
from rose_agent.host.memory.footprints import Footprints
from rose_agent.host.processes.launchers import EngineProgram
from rose_agent.host.processes.process import Spawned
from rose_agent.host.sharing.mps import ClientGroup, MpsNode, SteeredGroup, ask_status
from rose_agent.os.find_group import find_group
from rose_core.devices.footprint import judge
from rose_core.devices.memory import EngineSize, Lendable, limit_refusal, overrun
from rose_core.devices.mps import Finding, MpsClient
from rose_core.host_reasons import HostReason
from rose_core.identity import GpuUuid, PodUid
from rose_core.wire.host import EnsureEngine
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from rose_engines.weights.calls import Status

# What sets a driver's limits, or writes into an engine's shared memory, must be root.
APART = "it is not root (--host-uid; chart: engineHost.user: 0 makes it so)"
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_UNKNOWN_POD = PodUid("-")  # no pod's uid: where serving is unknown, none of its clients is found


def _kvcached(name: str, uid: int) -> ElasticMemory:
    return KvcachedSegment(name, uid or None)


def room_of(order: EnsureEngine) -> Lendable | None:
    """The memory that serving leaves, as the guard wrote into the order; None = it did not."""
    if not order.lendable_text:
        return None
    return Lendable(order.lendable_bytes, order.lendable_text)


def segment_name(control: Path) -> str:
    """Name of an engine's segment, one for each control socket."""
    return f"rose-{hashlib.sha256(str(control).encode()).hexdigest()[:16]}"


def out_of_reach(_name: str, _uid: int) -> ElasticMemory:
    """Stands in for elastic memory where the host has no rights of its own.

    Raises:
        NotShared: always.
    """
    raise NotShared(
        HostReason.ELASTIC_UNAVAILABLE, f"this host cannot reach shared memory; {APART}"
    )


@dataclass(frozen=True)
class SharingMeans:
    """The means of sharing GPUs that this host has.

    Attributes:
        limits: sets the driver's memory limits; None = engines are not limited by it.
        elastic: the memory that an engine gives back by degrees, by the name of its segment and
            the engine's user.
    """

    mps: MpsNode = field(default_factory=MpsNode)
    limits: DriverLimits | None = None
    elastic: Callable[[str, int], ElasticMemory] = _kvcached


class Sharing:
    """How one engine shares its GPU.

    Args:
        means: the host's.
        order: the engine's; its GPU, its pod and how it shares do not change.
        control: control socket of the plugin inside.
        door: where the engine listens, and the key that its port asks for.
        footprints: where what it is seen to hold is remembered.
        room: what serving leaves; None = nobody has worked it out. May change between starts.
    """

    def __init__(
        self,
        means: SharingMeans,
        order: EnsureEngine,
        control: Path,
        door: Callable[[], tuple[str, str]] = lambda: ("", ""),
        footprints: Footprints | None = None,
    ) -> None:
        self.room: Lendable | None = None
        self._means = means
        self._order = order
        self._control = control
        self._terms = order.engine.sharing
        self._program = EngineProgram(())
        self._overrun = ""
        self._footprints = footprints or Footprints()
        self._size: EngineSize | None = None
        self._ready_s: float | None = None
        # One segment for each process tree: a slot's second engine has a folder of its own.
        self._segment = segment_name(control)
        self.elastic: Elastic | None = None
        if self._terms.memory_source == "Elastic":
            self.elastic = Elastic(lambda uid: means.elastic(self._segment, uid), door)
        self._limit = 0
        self._folder: Path | None = None
        self._looked_s = 0.0

    @property
    def by_mps(self) -> bool:
        """The engine is a client of an MPS server."""
        return self._terms.compute == "MPS"

    @property
    def own_shm(self) -> bool:
        """It may have its own ``/dev/shm``; MPS and kvcached need the one that we share."""
        return not self.by_mps and self.elastic is None

    @property
    def device_bytes(self) -> int:
        """What it takes of its GPU at most; 0 = not known."""
        return self._size.total if self._size is not None else self._program.device_bytes

    @property
    def measuring(self) -> bool:
        """What it holds is still followed, to remember it for engines of its kind."""
        if self._size is None or self._ready_s is None:
            return False
        known = self._footprints.find(self._program.kind)
        return known is None or not known.settled

    async def admit(self, program: EngineProgram, uid: int, name: str) -> EngineProgram:
        """The program as it may be started now, with what it has to join.

        Args:
            program: what the launcher made.
            uid: user that the engine will be.
            name: of its cgroup.

        Raises:
            NotShared: not now; says what to do.
            NoMemory: it needs more than may be lent.
            BadEngine: its size is not known.
        """
        self._check_room(program)
        self._program, self._overrun = program, ""
        self._size, self._ready_s = program.size, None
        if self.elastic is not None:
            self.elastic.prepare(uid)
            own = elastic_environment(self._segment)
            program = replace(program, environment={**program.environment, **own})
        if self._terms.memory_limit == "Driver":
            folder = await asyncio.to_thread(self._set_limit, program, name)
            program = replace(program, cgroups=(*program.cgroups, folder))
        if self.by_mps:
            finding = await asyncio.to_thread(
                self._means.mps.may_share,
                self._order.gpu_uuids,
                uid,
                self._order.pod_uid or _UNKNOWN_POD,
            )
            if finding.refusal:
                raise NotShared(HostReason(finding.refusal), finding.message)
            share = self._means.mps.environment(self._terms.percent)
            program = replace(program, environment={**program.environment, **share})
        return program

    def steer(self, spawned: Spawned) -> Spawned:
        """The engine's tree; MPS clients leave their server before they are killed."""
        if not self.by_mps:
            return spawned
        return replace(spawned, group=ClientGroup(spawned.group, self._let_go))

    def enforced(self, spawned: Spawned) -> ClientGroup | None:
        """The tree of an MPS client, which stops by its permit; None = it can be frozen."""
        if not self.by_mps:
            return None
        return SteeredGroup(spawned.group, lambda _pids: None, self._control)

    async def verify(self, spawned: Spawned) -> None:
        """Check, once the engine is ready, that it got its share and its limit.

        Raises:
            BrokenEngine: it did not; the reason says which.
        """
        if self.elastic is not None:
            await self.elastic.verify(self._program.kv_bytes, self._program.kv_bundle)
        self._ready_s = time.monotonic()
        if not self.by_mps and not self._limit:
            return
        seen = await self._status()
        if self._limit:
            refusal = limit_refusal(self._limit, seen.device_bytes if seen else None)
            if refusal:
                raise BrokenEngine(refusal, HostReason.DRIVER_LIMIT_UNAVAILABLE)
        if self.by_mps:
            client = MpsClient(
                frozenset(spawned.group.pids()), seen.multiprocessors if seen else None
            )
            _check(await asyncio.to_thread(self._limited, client))

    def hold(self, held: int | None) -> None:
        """Note how much the driver says the processes hold; too much ends the engine."""
        if self._size is None or self._ready_s is None:
            self._overrun = overrun(self.device_bytes, held)
            return
        kind, served_s = self._program.kind, time.monotonic() - self._ready_s
        room = self.room.bytes if self.room is not None else None
        known = self._footprints.find(kind)
        found = judge(known, self._size, held, room, served_s=served_s)
        self._size, self._overrun = found.size, found.refusal
        if found.footprint is not None:
            self._footprints.remember(kind, found.footprint)

    async def check(self, *, running: bool = True) -> None:
        """Check, while it serves, that it keeps to its limits; asks the server once a second.

        Args:
            running: the engine is free to run.

        Raises:
            BrokenEngine: the server is in FAULT, or it holds more memory than it may.
        """
        if self._overrun:
            metrics.count_kill(HostReason.MEMORY_OVERRUN)
            raise BrokenEngine(self._overrun, HostReason.MEMORY_OVERRUN)
        if self.elastic is not None:
            self.elastic.check(running=running)
        if not self.by_mps or time.monotonic() - self._looked_s < _LOOK_SECONDS:
            return
        self._looked_s = time.monotonic()
        if await asyncio.to_thread(self._means.mps.is_faulty):
            text = "an MPS server is in FAULT: a client has crashed a GPU for all that share it"
            raise BrokenEngine(text, HostReason.MPS_FAULT)

    def clean_up(self) -> None:
        """Remove the limit's cgroup and the elastic memory of an engine that has ended."""
        self._limit = 0
        if self.elastic is not None:
            self.elastic.remove_segment()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the freezer may have removed it, or will
                self._folder.rmdir()
            self._folder = None

    def _limited(self, client: MpsClient) -> Finding:
        first = next(iter(self._order.gpu_uuids), GpuUuid(""))
        return self._means.mps.is_limited(first, client, self._terms.percent)

    def _let_go(self, pids: Collection[int]) -> None:
        self._means.mps.detach(pids)

    def _check_room(self, program: EngineProgram) -> None:
        room = self.room
        needed = program.start_bytes or program.device_bytes
        if room is None or not needed or (room.bytes is None and self._means.limits is None):
            return
        refusal = room.refusal(needed)
        if refusal:
            raise NoMemory(refusal, needed)

    def _set_limit(self, program: EngineProgram, name: str) -> Path:
        if self._means.limits is None:
            text = f"this host sets no driver limits; {APART}"
            raise NotShared(HostReason.DRIVER_LIMIT_UNAVAILABLE, text)
        if not program.device_bytes:
            raise BadEngine("memoryLimit: Driver needs an engine whose size on the GPU is known")
        try:
            folder = self._folder = self._means.limits.folder(name)
            for gpu in self._order.gpu_uuids:
                self._limit = self._means.limits.set(folder, gpu, program.device_bytes)
        except (DeviceError, OSError) as error:
            raise NotShared(HostReason.DRIVER_LIMIT_UNAVAILABLE, str(error)) from error
        return folder

    async def _status(self) -> Status | None:
        """What the engine says about its GPU; its socket may open a moment after its port."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                return await asyncio.to_thread(ask_status, self._control)
            except OSError:
                await asyncio.sleep(0.05)
        return None


def _check(finding: Finding) -> None:
    if finding.refusal:
        raise BrokenEngine(finding.message, HostReason(finding.refusal))


def free_leftovers(means: SharingMeans, rundir: RunDir) -> None:
    """Make the engines of an earlier host leave their MPS servers, before they are killed."""
    for slot in rundir.all_slots():
        order = read_json(slot.slot, EnsureEngine)
        record = read_json(slot.engine, EngineFile)
        if order is None or record is None or order.engine.sharing.compute != "MPS":
            continue
        tree = find_group(record)
        means.mps.detach(tree.pids() if tree is not None else ())
