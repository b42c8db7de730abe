"""The uids that travel have types of their own, so that a swapped pair is found before it runs.

Nothing here runs: ``make check`` reads it. mypy is strict, so it fails when a line is wrong that is
not ignored, and as much when one that is ignored is not wrong.
"""

from __future__ import annotations

from rose_core.devices.ownership import OnGpu
from rose_core.guard.grants import GrantBook
from rose_core.identity import GpuUuid, LeaseUid, PodUid, SlotKey, SlotUid


def every_swapped_uid_is_an_error(book: GrantBook) -> None:
    SlotKey(SlotUid("s"), 1)
    SlotKey(PodUid("p"), 1)  # type: ignore[arg-type]  # swapped
    book.is_alive(SlotUid("s"), 0.0)
    book.is_alive(PodUid("p"), 0.0)  # type: ignore[arg-type]  # swapped
    book.is_alive(LeaseUid("l"), 0.0)  # type: ignore[arg-type]  # swapped
    OnGpu(7, SlotUid("s"), PodUid("p"))
    OnGpu(7, SlotUid("s"), GpuUuid("g"))  # type: ignore[arg-type]  # swapped
