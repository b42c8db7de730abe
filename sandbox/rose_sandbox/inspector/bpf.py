"""The inspector of real sandboxes: the kernel says which calls there were, a witness what is left.

| the turn had | answer |
|---|---|
| a call whose effect leaves no trace (io_uring, another's memory, System V) | Unknown |
| a shared writable map in one that lives on | Unknown |
| a program in the kernel that no longer counts, or a sandbox without a mark | Unknown |
| anything else | what differs between the two moments (``witness``) |

A mark is a moment *before* the cut that it belongs to: what changes between the two is saved, and
said to have changed once more at the next turn, never the other way round.
Next step: ``witness`` compares, ``kernel_program`` counts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.inspector import kernel_program, witness
from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.inspector.kernel_program import Counters, KernelProgram
from rose_sandbox.inspector.witness import Moment
from rose_sandbox.runtimes.runtime import Facts

_REASONS = (
    (kernel_program.URING, "io_uring"),
    (kernel_program.OTHERS_MEMORY, "memory of another process"),
    (kernel_program.SYSTEM_V, "System V or POSIX queues"),
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
            files=witness.files_differ(
                mark.moment, now.moment, strict=rare[kernel_program.METADATA] > 0
            ),
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
