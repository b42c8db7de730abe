"""The inspector of real sandboxes: the kernel says which calls there were, a witness what is left.

| the turn had | answer |
|---|---|
| a call whose effect leaves no trace (io_uring, another's memory, System V) | Unknown |
| a shared writable map in one that lives on | Unknown |
| a program in the kernel that no longer counts, or a sandbox without a mark | Unknown |
| anything else | what differs between the two moments (``witness``) |

A mark is a moment *before* the cut that it belongs to: what changes between the two is saved, and
said to have changed once more at the next turn, never the other way round.
Raw tracepoints only: kernels of clouds often have neither kprobes nor BPF trampolines for others.
Next step: ``KernelProgram`` counts, ``witness`` compares.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.errors import Unavailable
from rose_sandbox.inspector import witness
from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.inspector.witness import Moment
from rose_sandbox.runtimes.runtime import Facts
from rose_wire.cgroups import TOP, is_unified, paths_by_controller

URING, OTHERS_MEMORY, SYSTEM_V, METADATA = range(4)
RARE = 4
PROGRAMS = ("call_begins", "process_begins")
_VALUE = struct.Struct(f"={2 + RARE}Q")


@dataclass(frozen=True)
class Counters:
    """Of a group since it was watched.

    Attributes:
        calls: system calls.
        starts: processes and threads begun.
        rare: calls of each rare kind, by its number.
    """

    calls: int
    starts: int
    rare: tuple[int, ...]


class KernelProgram:
    """Loaded and attached until ``close``.

    Args:
        folder: with ``effects.o`` and ``libbpf.so.1``.

    Raises:
        Unavailable: the kernel refuses it, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        own = folder / "libbpf.so.1"
        try:
            self._lib = ctypes.CDLL(str(own) if own.exists() else "libbpf.so.1", use_errno=True)
        except OSError as error:
            raise Unavailable(f"libbpf cannot be loaded ({error}): run `make sandbox`") from error
        for name in (
            *("bpf_object__open_file", "bpf_object__find_program_by_name"),
            *("bpf_program__attach", "bpf_object__find_map_by_name"),
        ):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._object = self._lib.bpf_object__open_file(os.fsencode(folder / "effects.o"), None)
        if not self._object:
            raise Unavailable(f"{folder / 'effects.o'} is no BPF object: run `make sandbox`")
        self._links: list[int] = []
        if self._lib.bpf_object__load(ctypes.c_void_p(self._object)):
            raise Unavailable(
                f"the kernel refuses the inspector: {os.strerror(ctypes.get_errno())}"
            )
        for name in PROGRAMS:
            program = self._lib.bpf_object__find_program_by_name(
                ctypes.c_void_p(self._object), name.encode()
            )
            link = self._lib.bpf_program__attach(ctypes.c_void_p(program)) if program else None
            if not link:
                self.close()
                raise Unavailable(f"the kernel does not let {name} listen")
            self._links.append(link)
        watched = self._lib.bpf_object__find_map_by_name(ctypes.c_void_p(self._object), b"watched")
        self._map = self._lib.bpf_map__fd(ctypes.c_void_p(watched))

    def watch(self, group: int) -> None:
        """Count a group from zero.

        Raises:
            Unavailable: there is no room for more.
        """
        value = bytes(_VALUE.size)
        if self._lib.bpf_map_update_elem(
            self._map, struct.pack("=Q", group), value, ctypes.c_ulonglong(0)
        ):
            raise Unavailable("the inspector has no room for another sandbox")

    def read(self, group: int) -> Counters | None:
        """A group's counters; None where it is not watched."""
        value = ctypes.create_string_buffer(_VALUE.size)
        if self._lib.bpf_map_lookup_elem(self._map, struct.pack("=Q", group), value):
            return None
        calls, starts, *rare = _VALUE.unpack(value.raw)
        return Counters(calls, starts, tuple(rare))

    def forget(self, group: int) -> None:
        """Count it no longer."""
        self._lib.bpf_map_delete_elem(self._map, struct.pack("=Q", group))

    def is_alive(self) -> bool:
        """Whether it counts: a call of this process is seen."""
        try:
            own = _own_group().stat().st_ino
            self.watch(own)
        except (OSError, Unavailable):
            return False
        os.getppid()
        counters = self.read(own)
        self.forget(own)
        return counters is not None and counters.calls > 0

    def close(self) -> None:
        """Out of the kernel."""
        for link in self._links:
            self._lib.bpf_link__destroy(ctypes.c_void_p(link))
        self._links = []
        if self._object:
            self._lib.bpf_object__close(ctypes.c_void_p(self._object))
            self._object = None


def _own_group() -> Path:
    unified = TOP if is_unified() else TOP / "unified"
    path = paths_by_controller(Path("/proc/self/cgroup").read_text()).get("")
    if path is None:
        raise Unavailable("this process is in no unified control group")
    return unified / str(path).lstrip("/")


_REASONS = (
    (URING, "io_uring"),
    (OTHERS_MEMORY, "memory of another process"),
    (SYSTEM_V, "System V or POSIX queues"),
)


@dataclass(frozen=True)
class _Seen:
    moment: Moment
    counters: Counters


class BpfInspector:
    """Watches sandboxes by a program in the kernel.

    Args:
        folder: with the program and libbpf (``Parts.folder / "bpf"``).

    Raises:
        Unavailable: the kernel does not let it; ``BlindInspector`` is for there.
    """

    def __init__(self, folder: Path) -> None:
        self._program = KernelProgram(folder)
        self._marks: dict[str, _Seen] = {}
        self._last: dict[str, _Seen] = {}
        self._groups: dict[str, int] = {}

    async def watch(self, key: str, facts: Facts) -> None:
        """See ``Inspector``."""
        await self.forget(key)
        if facts.cgroup is None:
            return  # it has no mark, so every turn is unknown
        group = facts.cgroup.stat().st_ino
        self._program.watch(group)
        self._groups[key] = group
        seen = await self._look(key, facts, None)
        if seen is not None:
            self._marks[key] = self._last[key] = seen

    async def effects(self, key: str, facts: Facts) -> Effects:
        """See ``Inspector``."""
        mark = self._marks.get(key)
        if mark is None:
            return _unknown("it was not watched")
        now = await self._look(key, facts, self._last.get(key))
        if now is None:
            return _unknown("the inspector does not answer")
        self._last[key] = now
        rare = [b - a for a, b in zip(mark.counters.rare, now.counters.rare, strict=True)]
        reasons = {reason for kind, reason in _REASONS if rare[kind]}
        reasons |= {*mark.moment.unsure, *now.moment.unsure}
        calls = now.counters.calls - mark.counters.calls
        if min(calls, *rare) < 0:
            reasons.add("lost events")
        processes = witness.processes_differ(mark.moment, now.moment)
        return Effects(
            files=witness.files_differ(mark.moment, now.moment, strict=rare[METADATA] > 0),
            processes=bool(processes),
            unknown=tuple(sorted(reasons)),
            calls=calls,
            why=tuple(sorted(processes)),
        )

    async def saved(self, key: str) -> None:
        """See ``Inspector``."""
        last, group = self._last.get(key), self._groups.get(key)
        if last is not None and group is not None:
            self._marks[key] = last

    async def forget(self, key: str) -> None:
        """See ``Inspector``."""
        self._marks.pop(key, None)
        self._last.pop(key, None)
        group = self._groups.pop(key, None)
        if group is not None:
            self._program.forget(group)

    async def close(self) -> None:
        """See ``Inspector``."""
        self._program.close()

    async def _look(self, key: str, facts: Facts, before: _Seen | None) -> _Seen | None:
        # Counters first: a call between the two shows in the moment, or at the next turn.
        counters = self._program.read(self._groups[key])
        if counters is None or not self._program.is_alive():
            return None
        try:
            moment = await asyncio.to_thread(
                witness.look, facts, None if before is None else before.moment
            )
        except OSError:
            return None
        return _Seen(moment, counters)


def _unknown(reason: str) -> Effects:
    return Effects(files=True, processes=True, unknown=(reason,))
