"""What the guard knows about its GPUs: read in the background, judged by ``rose_core.devices``.

The driver is asked once a second by one thread of its own, and by nothing else in the guard: a GPU
that is falling off the bus answers after seconds, and the guard's loop must not wait for it. Each
GPU's figures count from the moment they are there, and are unknown when they are older than
``STALE_SECONDS``. A GPU that did not answer, or answers slowly, is asked less often, so it does not
make the figures of the others old:

| a GPU's answers | then |
|---|---|
| are all there within its share of the reader's time | it is left alone for twice as long |
| are not | the rest is not asked; ``DeviceUnknown``; again after 1, 2, 4 ... 30 s |
| fail | the same |

A reading is of a moment ago, so it says nothing about what has changed since. A slot that has gone
counts as gone for readings that began later; only these say ``NotVacated``, or that all memory in
use is serving's. Between two questions of one reading an engine may take or free memory, so the
lower of two figures around the list of processes is what serving used: one figure too high would
count for a day.

``view`` is called by the guard for each replica and waits for nothing:

- ownership (``rose_core.devices.ownership``): whose the GPU is, and who else computes there;
- health (``health``): an unfit GPU is not lent, with the word why;
- who holds memory (``owners``): a process of an engine whose slot is not here any more means that
  the GPU was not vacated (``NotVacated``), which is what rung 5 promises;
- memory (``memory``): highest use of serving, what may be lent, the engine's budget, pressure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rose_agent.devices.driver import DeviceDriver, Gpu, GpuProcess, Memory
from rose_agent.devices.owners import Owner, command_of, owner_of
from rose_agent.errors import DeviceError, QueryFailed
from rose_core.devices.classes import class_of_all
from rose_core.devices.health import DeviceRefusal, Fitness, FitnessLimits, Vitals, assess
from rose_core.devices.memory import (
    Budget,
    BudgetLimits,
    Headroom,
    HighWater,
    Lendable,
    MemorySeen,
    lendable,
    steer,
)
from rose_core.devices.ownership import Claim, GpuParty, OnGpu, stranger
from rose_core.uids import GpuUuid, PodUid, SlotUid
from rose_core.wire.sync import PoolPolicy

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
STALE_SECONDS = 10.0
# How long a GPU that did not answer is left alone: doubled each time, up to the second figure. One
# that hangs takes the reader's time from all others.
_AGAIN_SECONDS, _AGAIN_MOST_SECONDS = 1.0, 30.0
# All GPUs together may take this much of the time after which figures are old, and one alone no
# more than the second figure.
_ALL_SECONDS, _SHARE_MOST_SECONDS = 0.6 * STALE_SECONDS, 2.0
# Of the reader's time a slow GPU gets a third.
_REST_FACTOR = 2.0


@dataclass(frozen=True)
class GpuReading:
    """One GPU as the driver described it at a moment; ``None`` = it did not.

    Attributes:
        owners: pid -> whose it is, of ``processes``.
        commands: pid -> its name, of those that belong to no pod.
        least_used: the lower of the bytes in use before and after ``processes`` were listed.
        problem: why the driver did not describe it; empty when it did.
    """

    read_s: float
    memory: Memory | None = None
    vitals: Vitals | None = None
    processes: tuple[GpuProcess, ...] | None = None
    owners: dict[int, Owner] = field(default_factory=dict)
    commands: dict[int, str] = field(default_factory=dict)
    least_used: int | None = None
    problem: str = ""

    def held_by_engines(self) -> int | None:
        """Bytes that rollout engines hold; None when the driver cannot tell whose memory it is."""
        if self.processes is None:
            return None
        held = 0
        for process in self.processes:
            owner = self.owners.get(process.pid)
            if owner is None:
                return None
            if owner.slot:
                if process.used_bytes is None:
                    return None
                held += process.used_bytes
        return held

    @property
    def unseen(self) -> frozenset[int]:
        """Processes whose owner was not to be seen."""
        return frozenset(p.pid for p in self.processes or () if p.pid not in self.owners)

    def present(self, pid: int) -> OnGpu:
        """One of its processes, as its owner is judged."""
        owner = self.owners.get(pid)
        if owner is None:
            return OnGpu(pid, seen=False)
        return OnGpu(pid, owner.slot, owner.pod, command=self.commands.get(pid, ""))

    def engines(self) -> frozenset[SlotUid]:
        """Slots whose engines have a process on the GPU."""
        return frozenset(owner.slot for owner in self.owners.values() if owner.slot)


@dataclass(frozen=True)
class LentState:
    """What is on a replica's GPUs beside serving, as the guard knows it.

    Attributes:
        slots: uids of slots that have or may have an engine there.
        residues: bytes that dormant engines still hold.
        released: bytes that dormant engines will take back.
        step: what weights the engines have; another word means that the next step has begun.
    """

    slots: frozenset[SlotUid] = frozenset()
    residues: tuple[int, ...] = ()
    released: int = 0
    step: str = ""


@dataclass(frozen=True)
class PoolGpuTerms:
    """What the pool says about its GPUs."""

    headroom: Headroom = field(default_factory=Headroom)
    max_power_watts: int = 0
    shared_faults: bool = False
    regrow_next_step: bool = False
    elastic: bool = False

    @classmethod
    def of(cls, policy: PoolPolicy) -> PoolGpuTerms:
        """The part of the policy that concerns GPUs."""
        return cls(
            Headroom(
                policy.memory_headroom_gib,
                policy.memory_headroom_percent,
                policy.memory_source == "Elastic",
            ),
            policy.max_power_watts,
            policy.compute == "MPS",
            policy.memory_regrow == "NextStep",
            policy.memory_source == "Elastic",
        )


@dataclass(frozen=True)
class ReplicaGpus:
    """A replica's GPUs together.

    Attributes:
        refusal: closed word, empty when nothing speaks against lending.
        lendable: on each of the GPUs, so that of the tightest one; None when one is unknown.
        held: slot -> most bytes that its engine's processes hold on one of the GPUs, as far as the
            driver tells.
        device_class: of its GPUs, empty when unknown (``rose_core.devices.classes``).
    """

    refusal: str
    message: str
    lendable: Lendable
    budget: Budget
    held: Mapping[SlotUid, int] = field(default_factory=dict)
    device_class: str = ""


@dataclass
class _Rest:
    """When a GPU is asked again; ``seconds`` grow while it does not answer, else are 0."""

    until_s: float
    seconds: float = 0.0


@dataclass
class _Gpu:
    reading: GpuReading
    unseen: frozenset[int] = frozenset()
    """Processes whose owner was not to be seen in the reading before either."""
    fitness: Fitness = field(default_factory=Fitness)
    high_water: HighWater = field(default_factory=HighWater)


class DeviceWatch:
    """The GPUs of a node.

    Args:
        driver: asked by the reader's thread alone.
        clock: monotonic seconds.
        owner: whose a process is.
        command: its name.
        limits: when budgets are cut and grow.
    """

    def __init__(
        self,
        driver: DeviceDriver,
        clock: Callable[[], float] = time.monotonic,
        owner: Callable[[int], Owner | None] = owner_of,
        command: Callable[[int], str] = command_of,
        limits: BudgetLimits | None = None,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._owner = owner
        self._command = command
        self._gpus: dict[GpuUuid, _Gpu] = {}
        self._budgets: dict[PodUid, Budget] = {}
        self._rests: dict[GpuUuid, _Rest] = {}
        self._listed: tuple[Gpu, ...] = ()
        self._silent: tuple[str, ...] = ()
        self._slots: frozenset[SlotUid] = frozenset()
        self._gone_s: dict[
            SlotUid, float
        ] = {}  # slots that were there, and since when they are not
        self._empty_s: float | None = None  # since when there is no slot
        self._limits = limits or BudgetLimits()
        # A static file tells of serving alone, and need not name every GPU.
        self._counts_engines = driver.name != "static"

    async def run(self) -> None:
        """Read until cancelled."""
        loop = asyncio.get_running_loop()
        reader = ThreadPoolExecutor(1, "gpus")
        try:
            while True:
                for gpu in await loop.run_in_executor(reader, self.survey):
                    reading = await loop.run_in_executor(reader, self.ask, gpu.uuid)
                    if reading is not None:
                        self.take(gpu.uuid, reading)
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            # A call that hangs in the driver must not hold up the guard's end.
            reader.shutdown(wait=False, cancel_futures=True)

    def read(self) -> dict[GpuUuid, GpuReading]:
        """Ask the driver about every GPU; may take as long as the driver does."""
        asked = {gpu.uuid: self.ask(gpu.uuid) for gpu in self.survey()}
        return {uuid: reading for uuid, reading in asked.items() if reading is not None}

    def survey(self) -> tuple[Gpu, ...]:
        """Ask the driver which GPUs there are."""
        try:
            self._listed = self._driver.gpus()
        except DeviceError as error:
            _log.warning("GPUs: %s", error)
            return ()
        if self._silent != self._driver.silent():
            self._silent = self._driver.silent()
            _log.warning("GPUs that do not answer: %s", "; ".join(self._silent) or "none any more")
        return self._listed

    def ask(self, uuid: GpuUuid) -> GpuReading | None:
        """Ask the driver about one GPU; None while it is left alone."""
        now_s = self._clock()
        rest = self._rests.get(uuid)
        if rest is not None and now_s < rest.until_s:
            return None
        try:
            reading = self._ask(uuid, now_s)
        except DeviceError as error:
            seconds = _AGAIN_SECONDS if rest is None or not rest.seconds else 2 * rest.seconds
            seconds = min(seconds, _AGAIN_MOST_SECONDS)
            self._rests[uuid] = _Rest(self._clock() + seconds, seconds)
            _log.warning("GPU %s: %s; asked again in %.0f s", uuid, error, seconds)
            return GpuReading(now_s, problem=str(error))
        done_s = self._clock()
        self._rests[uuid] = _Rest(done_s + _REST_FACTOR * (done_s - now_s))
        return reading

    def _ask(self, uuid: GpuUuid, began_s: float) -> GpuReading:
        """Every question about a GPU, while its share of the time lasts.

        Raises:
            DeviceError: it does not answer, or too slowly.
        """
        share_s = min(_SHARE_MOST_SECONDS, _ALL_SECONDS / max(1, len(self._listed)))

        def in_time() -> None:
            took_s = self._clock() - began_s
            if took_s > share_s:
                raise QueryFailed(
                    f"its answers take long: {took_s:.1f} s so far, and {share_s:.2f} s are its "
                    f"share beside {len(self._listed) - 1} other GPUs"
                )

        before = self._driver.memory(uuid).used_bytes
        in_time()
        processes = self._driver.processes(uuid)
        owners = {p.pid: self._owner(p.pid) for p in processes or ()}
        in_time()
        memory = self._driver.memory(uuid)
        in_time()
        vitals = self._driver.vitals(uuid)
        in_time()
        known = {pid: owner for pid, owner in owners.items() if owner is not None}
        commands = {pid: self._command(pid) for pid, owner in known.items() if not owner.pod}
        used = [item for item in (before, memory.used_bytes) if item is not None]
        least = min(used) if len(used) == 2 else None
        return GpuReading(began_s, memory, vitals, processes, known, commands, least)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """As the driver listed them last, by index."""
        return self._listed

    def used_by(self, pids: Iterable[int]) -> tuple[GpuUuid, ...]:
        """GPUs on which one of these processes holds memory, as last read."""
        members = frozenset(pids)
        now_s = self._clock()
        return tuple(
            gpu.uuid
            for gpu in self._listed
            if (known := self._gpus.get(gpu.uuid)) is not None
            and now_s - known.reading.read_s < STALE_SECONDS
            and any(process.pid in members for process in known.reading.processes or ())
        )

    def take(self, uuid: GpuUuid, reading: GpuReading) -> None:
        """Use a reading from now on."""
        known = self._gpus.get(uuid)
        if known is None:
            self._gpus[uuid] = _Gpu(reading)
        else:
            known.unseen = known.reading.unseen
            known.reading = reading

    def view(
        self,
        claim: Claim,
        party: GpuParty,
        terms: PoolGpuTerms,
        lent: LentState,
        kv_permille: int | None,
    ) -> ReplicaGpus:
        """A replica's GPUs now.

        Args:
            claim: which they are, and whether they are its own.
            party: who may be on them; the replica's budget is remembered under its pod's uid.
            terms: of its pool.
            lent: what is there beside serving.
            kv_permille: use of serving's KV pool.
        """
        now_s, uuids, key = self._clock(), claim.gpus, party.pod
        self._note_slots(lent.slots, now_s)
        gpus = [self._gpus.get(uuid) for uuid in uuids]
        fitness = [Fitness(DeviceRefusal(claim.refusal), claim.message)]
        for uuid, gpu in zip(uuids, gpus, strict=True):
            fitness.append(_trespass(uuid, gpu, party, now_s))
            fitness.append(self._judge(uuid, gpu, terms, lent, now_s))
        unfit = next((item for item in fitness if item.refusal), Fitness())
        room = {
            uuid: self._lendable(gpu, terms, lent, now_s)
            for uuid, gpu in zip(uuids, gpus, strict=True)
        }
        seen = self._seen(gpus, terms, lent, kv_permille, now_s)
        seen = replace(seen, step=lent.step if terms.regrow_next_step else None)
        first = Budget(self._limits.least_permille) if terms.elastic else Budget()
        budget = steer(self._budgets.get(key, first), seen, self._limits, now_s)
        self._budgets[key] = budget
        held = _held(gpus, now_s)
        names = {gpu.uuid: gpu.name for gpu in self._listed}
        kind = class_of_all(names.get(uuid, "") for uuid in uuids)
        return ReplicaGpus(unfit.refusal.value, unfit.message, _tightest(room), budget, held, kind)

    def forget(self, key: PodUid) -> None:
        """The replica is gone."""
        self._budgets.pop(key, None)

    def _note_slots(self, slots: frozenset[SlotUid], now_s: float) -> None:
        """Remember since when slots are gone, for as long as a reading may still be of before."""
        for slot in self._slots - slots:
            self._gone_s[slot] = now_s
        oldest_s = now_s - STALE_SECONDS
        self._gone_s = {
            slot: at_s
            for slot, at_s in self._gone_s.items()
            if at_s >= oldest_s and slot not in slots
        }
        if slots:
            self._empty_s = None
        elif self._empty_s is None:
            self._empty_s = now_s
        self._slots = slots

    def _left(self, reading: GpuReading, slots: frozenset[SlotUid]) -> frozenset[str]:
        """Slots that were gone when the reading began, and whose engines were on the GPU."""
        return frozenset(
            slot
            for slot in reading.engines() - slots
            if reading.read_s >= self._gone_s.get(slot, reading.read_s)
        )

    def _judge(
        self, uuid: GpuUuid, gpu: _Gpu | None, terms: PoolGpuTerms, lent: LentState, now_s: float
    ) -> Fitness:
        if gpu is None and not self._counts_engines:
            return Fitness()
        if gpu is None:
            return Fitness(DeviceRefusal.UNKNOWN, self._absence(uuid), now_s)
        reading = gpu.reading
        age_s = now_s - reading.read_s
        limits = FitnessLimits(terms.max_power_watts, terms.shared_faults)
        if reading.problem or age_s >= STALE_SECONDS:
            gpu.fitness = assess(gpu.fitness, None, limits, now_s)
            why = reading.problem or f"its last answer is older than {STALE_SECONDS:.0f} s"
            return replace(gpu.fitness, message=f"GPU {uuid} does not answer: {why}")
        gpu.fitness = assess(gpu.fitness, reading.vitals, limits, now_s)
        left = self._left(reading, lent.slots)
        if gpu.fitness.fit and left:
            names = ", ".join(sorted(left))
            text = f"engines that should be gone have processes on the GPU: {names}"
            return Fitness(DeviceRefusal.NOT_VACATED, text, now_s)
        return gpu.fitness

    def _absence(self, uuid: GpuUuid) -> str:
        """Why nothing is known of a GPU."""
        if not self._listed:
            return f"GPU {uuid}: the device driver has listed no GPU yet"
        text = f"no GPU {uuid} among the {len(self._listed)} that the device driver lists"
        return f"{text}; {'; '.join(self._silent)}" if self._silent else text

    def _lendable(
        self, gpu: _Gpu | None, terms: PoolGpuTerms, lent: LentState, now_s: float
    ) -> Lendable:
        if gpu is None or now_s - gpu.reading.read_s >= STALE_SECONDS:
            return lendable(None, None, terms.headroom)
        memory, engines = gpu.reading.memory, gpu.reading.held_by_engines()
        used = gpu.reading.least_used
        if used is not None:
            if engines is not None:
                gpu.high_water = gpu.high_water.observe(used - engines, now_s)
            elif not self._counts_engines or self._all_is_servings(gpu.reading):
                gpu.high_water = gpu.high_water.observe(used, now_s)
        total = memory.total_bytes if memory is not None else None
        highest = gpu.high_water.lately(now_s) if terms.elastic else gpu.high_water.bytes
        watched_s = gpu.high_water.watched_s(now_s)
        return lendable(total, highest, terms.headroom, watched_s, lent.residues)

    def _all_is_servings(self, reading: GpuReading) -> bool:
        """No engine was on any GPU when the reading began, nor has one come since."""
        return self._empty_s is not None and reading.read_s >= self._empty_s

    @staticmethod
    def _seen(
        gpus: list[_Gpu | None],
        terms: PoolGpuTerms,
        lent: LentState,
        kv_permille: int | None,
        now_s: float,
    ) -> MemorySeen:
        """The tightest of the GPUs."""
        free: list[tuple[int, int]] = []
        for gpu in gpus:
            memory = gpu.reading.memory if gpu is not None else None
            fresh = gpu is not None and now_s - gpu.reading.read_s < STALE_SECONDS
            if memory is None or memory.used_bytes is None or not fresh:
                return MemorySeen(None, 0, kv_permille, lent.released)
            headroom = terms.headroom.kept(memory.total_bytes)
            free.append((memory.total_bytes - memory.used_bytes, headroom))
        if not free:
            return MemorySeen(None, 0, kv_permille, lent.released)
        least = min(free, key=lambda pair: pair[0] - pair[1])
        return MemorySeen(*least, kv_permille, lent.released)


def _trespass(uuid: GpuUuid, gpu: _Gpu | None, party: GpuParty, now_s: float) -> Fitness:
    """Somebody who does not own the GPU and is no engine of ours computes on it.

    A process that has just ended, or has not been put into its cgroup yet, is not to be seen for a
    moment; one that stays so is a real one.
    """
    if gpu is None or now_s - gpu.reading.read_s >= STALE_SECONDS:
        return Fitness()
    reading = gpu.reading
    passing = reading.unseen - gpu.unseen
    asked = (p.pid for p in reading.processes or () if p.pid not in passing)
    found = [name for pid in asked if (name := stranger(reading.present(pid), party))]
    if not found:
        return Fitness()
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    text = f"GPU {uuid} is used by {found[0]}{more} as well"
    return Fitness(DeviceRefusal.FOREIGN, text, now_s)


def _held(gpus: list[_Gpu | None], now_s: float) -> dict[SlotUid, int]:
    """What each slot's engine holds; a slot of which a figure is missing is left out."""
    most: dict[SlotUid, int] = {}
    unknown: set[SlotUid] = set()
    for gpu in gpus:
        if gpu is None or now_s - gpu.reading.read_s >= STALE_SECONDS:
            continue
        held: Counter[SlotUid] = Counter()
        for process in gpu.reading.processes or ():
            owner = gpu.reading.owners.get(process.pid)
            if owner is None or not owner.slot:
                continue
            if process.used_bytes is None:
                unknown.add(owner.slot)
            held[owner.slot] += process.used_bytes or 0
        most |= {slot: max(size, most.get(slot, 0)) for slot, size in held.items()}
    return {slot: size for slot, size in most.items() if slot not in unknown}


def _tightest(each: Mapping[GpuUuid, Lendable]) -> Lendable:
    """What may be lent on every one of the GPUs: an engine takes its memory on each that it has.

    Not their sum: an engine of one GPU would be admitted by what the others have left, and take
    the headroom of its own.
    """
    if not each:
        return Lendable(None, "no GPU is known")
    unknown = next((item for item in each.values() if item.bytes is None), None)
    if unknown is not None:
        return unknown
    uuid, least = min(each.items(), key=lambda pair: pair[1].bytes or 0)
    if len(each) == 1:
        return least
    return replace(least, message=f"the tightest of {len(each)} GPUs, {uuid}: {least.message}")
