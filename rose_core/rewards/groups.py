"""How far a group of trajectories is, and which of its rewards decides it (pure).

| a group is | when |
|---|---|
| open | its trainer still lacks results |
| decided | the first ``keep`` are scored, or every member has a result |

No member that comes later changes whether a decided group is trained on, or on which members. A
trainer that leaves out groups that are all right or all wrong may know that earlier, but the
advantages of a group are made of all the rewards that it keeps: it waits for the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rose_core.rewards.results import Masked, Result, Scored


@dataclass(frozen=True)
class GroupProgress:
    """One group.

    Attributes:
        members: trajectories that were begun for it.
        keep: scored ones that its trainer trains on; 0 = all members.
        scored, masked: results that it has.
    """

    members: int
    keep: int = 0
    scored: int = 0
    masked: int = 0

    @property
    def left(self) -> int:
        """Results until it is decided, at the earliest; 1 = the next may decide it, 0 = none."""
        unknown = self.members - self.scored - self.masked
        return max(0, min((self.keep or self.members) - self.scored, unknown))

    @property
    def ended(self) -> bool:
        """Whether every member has a result."""
        return self.scored + self.masked >= self.members

    def after(self, result: Result) -> GroupProgress:
        """With one more result; a lost one is none, since it is tried anew."""
        if isinstance(result, Scored):
            return replace(self, scored=self.scored + 1)
        return replace(self, masked=self.masked + isinstance(result, Masked))
