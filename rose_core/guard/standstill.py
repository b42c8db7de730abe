"""A tree that should stand still and does not: does it disobey, or does it wait for its turn?

A thread stands still only once it has been scheduled for it. On a core that serving fills this may
take long; meanwhile the tree computes nothing, and to kill it would gain nothing, because a killed
thread must be scheduled too, but would cost serving the start of another engine. So a tree that is
late is ended only when it goes on using the processor. One that uses none and still does not stand
still hangs in the kernel, and is ended in the end.

Pure; the engine host (``rose_agent.host.enforcement``) and the guard (``slot``) both ask it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How long a tree may take to stand still, nanoseconds.

    Attributes:
        limit_ns: from here on it is late, and its processor time is looked at.
        used_ns: processor time after which a late tree counts as computing; far more than all its
            threads need to stand still.
        longest_ns: end of patience with a tree that uses nothing.
    """

    limit_ns: int
    used_ns: int = 100_000_000
    longest_ns: int = 60_000_000_000


def disobeys(
    patience: Patience, late_ns: int, first_cpu_ns: int | None, cpu_ns: int | None
) -> bool:
    """Whether a tree that does not stand still is to be ended.

    Args:
        patience: see there.
        late_ns: time since it was told to stand still.
        first_cpu_ns: processor time of the tree when it was first found late; None = not yet.
        cpu_ns: its processor time now; None = cannot be known, so it counts as computing.
    """
    if late_ns <= patience.limit_ns:
        return False
    if cpu_ns is None or late_ns > patience.longest_ns:
        return True
    return first_cpu_ns is not None and cpu_ns - first_cpu_ns > patience.used_ns
