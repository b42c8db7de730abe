"""Which verification is started a second time (pure): a late one that its group waits for.

These are the hedged requests of Dean and Barroso (The Tail at Scale, CACM 2013): the second copy
goes out once the first has taken longer than 95 of 100 do, so that it costs at most some 5 % more
work, and the first verdict wins. Here they go to members that decide their group (``groups``):
while others are rolled out, wait or run in time, these hide the late one, as RollPacker has it.

| a verification | is hedged |
|---|---|
| whose task has too few correct answers, or that is not late yet | not yet |
| that is late, while its group needs results of others too | not yet |
| that is late, and late ones alone decide its group | once, where a worker is free |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningReward:
    """One verification under way.

    Attributes:
        number: of its arrival.
        age: seconds since it began.
        late_after: seconds after which it is late; None = too little is known of its task.
        group: it is of; None = of none, and it decides for itself.
        left: results until that group is decided; 0 = it is.
        hedged: a second copy of it was started.
        free: a second worker is free for it.
    """

    number: int
    age: float
    late_after: float | None
    group: tuple[str, str] | None = None
    left: int = 1
    hedged: bool = False
    free: bool = True

    @property
    def late_in(self) -> float | None:
        """Seconds until it is late; 0 or less = it is; None = nobody knows when it is."""
        return None if self.late_after is None else self.late_after - self.age


def hedge(running: Sequence[RunningReward]) -> RunningReward | None:
    """The one to start a second time, the latest first; None when there is none."""
    late = [(due, one) for one in running if (due := one.late_in) is not None and due <= 0]
    of_group = Counter(one.group for _, one in late)
    deciding = [
        (due, one)
        for due, one in late
        if one.free
        and not one.hedged
        and (one.group is None or 0 < one.left <= of_group[one.group])
    ]
    found = min(deciding, default=None, key=lambda entry: (entry[0], entry[1].number))
    return None if found is None else found[1]


def next_late(running: Sequence[RunningReward]) -> float | None:
    """Seconds until the next becomes late, which may decide its group; None when none does."""
    soon = [due for one in running if one.left and (due := one.late_in) is not None and due > 0]
    return min(soon, default=None)
