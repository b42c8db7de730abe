"""Whether an engine that said it let go of its memory has done so.

An engine's answer proves nothing: SGLang answers 200 and frees nothing when its memory saver is
off. So the memory of the engine's processes is measured before and after.

| measured                                   | verdict                                         |
|--------------------------------------------|-------------------------------------------------|
| one of the two figures is unknown          | refused: ``MemoryUnknown``                      |
| less than ``least_share`` of the claim free | refused: ``NothingReleased``                    |
| else                                       | dormant; what is left is charged to the slot    |

A refused engine is ended (rung 5), because its memory is what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.host_reasons import HostReason

# What an allocator may keep of what was let go of: caches, page edges, measuring noise.
LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Dormancy:
    """The verdict.

    Attributes:
        refusal: closed word, empty when the engine is dormant.
        released_bytes: what the measurement says is free now.
        residue_bytes: what a dormant engine still holds, charged to its slot; None = unknown.
        message: for people.
    """

    refusal: HostReason = HostReason.NONE
    released_bytes: int = 0
    residue_bytes: int | None = None
    message: str = ""

    @property
    def accepted(self) -> bool:
        """The engine is dormant."""
        return not self.refusal


def judge(
    before: int | None, after: int | None, claimed: int, least_share: float = LEAST_SHARE
) -> Dormancy:
    """Compare what the engine claims with what was measured.

    Args:
        before: bytes held by the engine's processes before it was told.
        after: the same after its answer.
        claimed: bytes that the engine says it let go of.
        least_share: of the claim that must be free.
    """
    if before is None or after is None:
        message = "the device driver does not tell how much memory the engine holds"
        return Dormancy(HostReason.MEMORY_UNKNOWN, message=message)
    released = max(0, before - after)
    if claimed <= 0 or released < claimed * least_share:
        message = (
            f"the engine says that it released {claimed} bytes; its processes held {before} "
            f"before and hold {after} after"
        )
        return Dormancy(HostReason.NOTHING_RELEASED, released, after, message)
    return Dormancy(released_bytes=released, residue_bytes=after)
