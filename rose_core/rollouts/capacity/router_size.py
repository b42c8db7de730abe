"""How much memory and how many connections a router may have: what its lease can use.

| part | of the memory |
|---|---|
| requests (``PART``) | prompts, and what is sampled beside them up to the lease's context |
| the rest | the process, connections, what nobody foresees |

The same figures say what a request takes (``rose_router.http.admission.memory``) and how large a
router is, so one that is as large as its lease takes all turns that the lease's slots run at full
context. What waits in the queue beyond that is refused with ``Retry-After`` once it does not fit.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
PER_BYTE = 24
"""Bytes of Python objects for a byte of JSON: ``[{},{},...]`` makes a dictionary of three."""
PER_ID = 56
"""A token id: 32 as a number, 8 in the prompt, 8 in the list it came in, and 8 as text."""
PER_TURN = 16 * 1024
"""A turn with its task, its record in the ledger and its reply's beginnings."""
PER_SENT_ID = 16
"""A prompt's id in a leg under way: in the list of its context, and as text."""
PART = 0.5
"""Of the process's memory, what requests may take; the rest is the process and what is sampled."""
LARGE_PART = 0.75
"""Of it, what large requests may take: a few callers with large bodies, which they need not even
send, would else shut out everybody for as long as a body may take to come."""
MOST_BODY = 16 * MIB
"""The largest body that a router takes."""

LEAST_MEMORY = int(MOST_BODY * PER_BYTE / LARGE_PART / PART)
"""1 GiB, so that the largest body fits into every router while nothing else is there."""
MOST_MEMORY = 4 * GIB
"""A lease that needs more asks for replicas, and those its TenantPolicy counts."""
MOST_CONNECTIONS = 20_000
"""What a router of its own accord takes: 10,000 idle ones were flooded within 768 MiB."""
_SPARE_CONNECTIONS = 256
"""Probes, scrapes, pauses, pushes and looks: what calls a router beside turns."""
_PER_TURN_CONNECTIONS = 2
"""A turn has one; clients that keep connections have as many again between their turns."""


@dataclass(frozen=True, order=True)
class RouterSize:
    """What one replica may take.

    Attributes:
        memory_bytes: limit of its container.
        connections: of callers, at one time.
    """

    memory_bytes: int
    connections: int


def size_of(*, context_tokens: int, turns: int, waiting: int, replicas: int) -> RouterSize:
    """The size of one replica of a router, a power of two where no bound is met.

    A change of size ends the pod and its turns, so a lease whose slots follow its load must not
    change it at every step.

    Args:
        context_tokens: longest prompt and answer of a turn.
        turns: that all slots of the lease run at a time.
        waiting: that may wait for them.
        replicas: that share them; the rest carries on when one leaves.
    """
    sharing = max(1, replicas - 1)
    mine, queued = -(-turns // sharing), -(-waiting // sharing)
    requests = mine * (PER_TURN + (PER_ID + PER_SENT_ID) * context_tokens)
    connections = _PER_TURN_CONNECTIONS * (mine + queued) + _SPARE_CONNECTIONS
    return RouterSize(
        min(MOST_MEMORY, max(LEAST_MEMORY, _power_of_two(int(requests / PART)))),
        min(MOST_CONNECTIONS, _power_of_two(connections)),
    )


def kept(before: RouterSize | None, now: RouterSize) -> RouterSize:
    """A router that runs grows with its lease, and does not shrink: that would end its turns."""
    if before is None:
        return now
    return RouterSize(
        max(before.memory_bytes, now.memory_bytes), max(before.connections, now.connections)
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
