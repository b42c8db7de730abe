"""What every inspector says about a turn of a sandbox.

The answer is about *net* effect: a file that was made and removed again is none. Whatever an
inspector cannot vouch for is ``unknown``, with the reason, and counts as everything changed.
``BlindInspector`` is for where the kernel cannot be asked. Next step: ``bpf`` watches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rose_sandbox.runtimes.runtime import Facts


class Class(StrEnum):
    """Of a turn, by net effect."""

    NONE = "none"
    FILES = "files"
    PROCESSES = "processes"
    FULL = "full"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Effects:
    """What changed in a sandbox between two marks.

    Attributes:
        files: its files differ, or may differ.
        processes: its processes, or the memory of one that lives on, differ or may differ.
        unknown: why the inspector cannot vouch for the two; empty: it does.
        calls: system calls that it looked at; None: it does not count.
        why: in what processes differ, for people.
    """

    files: bool
    processes: bool
    unknown: tuple[str, ...] = ()
    calls: int | None = None
    why: tuple[str, ...] = ()

    @property
    def kind(self) -> Class:
        """The turn's class."""
        if self.unknown:
            return Class.UNKNOWN
        if self.files:
            return Class.FULL if self.processes else Class.FILES
        return Class.PROCESSES if self.processes else Class.NONE


class Inspector(Protocol):
    """Watches the sandboxes of one host."""

    async def watch(self, key: str, facts: Facts) -> None:
        """Take this state as the sandbox's mark: after create, restore and resume."""
        ...

    async def effects(self, key: str, facts: Facts) -> Effects:
        """What changed since the sandbox's last mark, which stays; no mark: unknown."""
        ...

    async def saved(self, key: str) -> None:
        """Everything that ``effects`` saw last has been saved since: it is the new mark.

        Never ``watch`` after a checkpoint: what changed between the cut and the mark would be lost.
        """
        ...

    async def forget(self, key: str) -> None:
        """The sandbox has ended; no mark is no error."""
        ...

    async def close(self) -> None:
        """Take the hooks out of the kernel."""
        ...


class BlindInspector:
    """Knows nothing, and says so.

    Args:
        reason: why there is no better one here.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def watch(self, key: str, facts: Facts) -> None:
        """Nothing to mark."""

    async def effects(self, key: str, facts: Facts) -> Effects:  # noqa: ARG002 - it looks at none
        """Everything may have changed."""
        return Effects(files=True, processes=True, unknown=(self.reason,))

    async def saved(self, key: str) -> None:
        """Nothing to mark."""

    async def forget(self, key: str) -> None:
        """Nothing to forget."""

    async def close(self) -> None:
        """Nothing to take out."""
