"""When a sandbox host that somebody waits for counts as lost, though its connections stand.

A host that is killed hangs up, and its callers know at once. One that is stopped, or whose machine
has lost its network, says nothing at all, and a command may take minutes. So whoever waits for a
host asks it beside that whether it lives, and takes it for lost after several questions in a row
without an answer. It may come back later: the fence of the session's record, and no clock, is what
keeps it from what lives elsewhere by then.
Next step: ``rose_wire.heartbeat`` asks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeats:
    """How often a host is asked, and what counts.

    Attributes:
        every: seconds between two questions.
        within: seconds that each answer may take.
        most_missed: questions in a row without an answer, after which the host is lost. A caller
            that was held up itself misses one of them and not all.
    """

    every: float = 2.0
    within: float = 2.0
    most_missed: int = 3

    @property
    def seconds(self) -> float:
        """After which a host that says nothing is lost, at most."""
        return (self.every + self.within) * self.most_missed

    def is_lost(self, missed: int) -> bool:
        """Whether a host is lost that has not answered so many questions in a row."""
        return missed >= self.most_missed
