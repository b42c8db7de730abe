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
from typing import Self

from rose_core.rewards.results import Masked, Result, Scored


@dataclass(frozen=True)
class GroupProgress:
    """One group.

    Attributes:
        members: trajectories that were begun for it.
        keep: scored ones that its trainer trains on; 0 = all members.
        scored, masked: results that it has.
        taken: rewards that were taken and have no result yet.
        complete: when so many had been taken that no other is needed to decide it; None = others
            are to come, or it is decided.
        first: when its first was taken; None = none was.
    """

    members: int
    keep: int = 0
    scored: int = 0
    masked: int = 0
    taken: int = 0
    complete: float | None = None
    first: float | None = None

    @property
    def left(self) -> int:
        """Results until it is decided, at the earliest; 1 = the next may decide it, 0 = none."""
        unknown = self.members - self.scored - self.masked
        return max(0, min((self.keep or self.members) - self.scored, unknown))

    @property
    def to_come(self) -> int:
        """Rewards that it needs and that were not taken yet: trajectories still rolled out."""
        return max(0, self.left - self.taken)

    @property
    def ended(self) -> bool:
        """Whether every member has a result."""
        return self.scored + self.masked >= self.members

    def taking(self, now: float) -> Self:
        """With one more reward that was taken."""
        first = now if self.first is None else self.first
        more = replace(self, taken=self.taken + 1, first=first)
        if self.complete is None and 0 < more.left <= more.taken:
            return replace(more, complete=now)
        return more

    def after(self, result: Result) -> Self:
        """With one more result; a lost one is none, since it is tried anew."""
        more = replace(
            self,
            scored=self.scored + isinstance(result, Scored),
            masked=self.masked + isinstance(result, Masked),
            taken=max(0, self.taken - 1),
        )
        return more if 0 < more.left <= more.taken else replace(more, complete=None)
