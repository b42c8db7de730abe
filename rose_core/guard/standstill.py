"""Tells whether a process tree that was ordered to stop, and has not, should be killed.

A thread stops only once it has been scheduled for that. On a core that serving fills this may take
long. Meanwhile the tree computes nothing, so killing it gains nothing: a killed thread has to be
scheduled too, and the start of another engine would cost serving more. So a tree that is late is
killed only when it goes on using the processor. One that uses none and still does not stop hangs in
the kernel; it is killed at the end of a long patience.

Pure. Next step: the engine host (``rose_agent.host.enforcement.tree``) and the guard (``slot``) ask
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StandstillPatience:
    """How long a tree may take to stop, nanoseconds.

    Attributes:
        limit_ns: from here on it is late, and its processor time is looked at.
        used_ns: processor time after which a late tree counts as computing; far more than all its
            threads need to stop.
        longest_ns: end of patience with a tree that uses nothing.
    """

    limit_ns: int
    used_ns: int = 100_000_000
    longest_ns: int = 60_000_000_000


def disobeys(
    patience: StandstillPatience, late_ns: int, first_cpu_ns: int | None, cpu_ns: int | None
) -> bool:
    """Whether a tree that has not stopped is to be killed.

    Args:
        patience: how long it may take.
        late_ns: time since it was ordered to stop.
        first_cpu_ns: processor time of the tree when it was first found late; None = not yet.
        cpu_ns: its processor time now; None = cannot be known, so it counts as computing.
    """
    if late_ns <= patience.limit_ns:
        return False
    if cpu_ns is None or late_ns > patience.longest_ns:
        return True
    return first_cpu_ns is not None and cpu_ns - first_cpu_ns > patience.used_ns
