"""The inspector for where the kernel cannot be asked: it always says Unknown."""

from __future__ import annotations

from rose_sandbox.inspector.inspector import Effects
from rose_sandbox.runtimes.runtime import Facts


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
