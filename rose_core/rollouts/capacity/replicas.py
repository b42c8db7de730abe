"""Several routers of one lease, without a shared database.

A trajectory belongs to one replica, found by rendezvous hashing of its key (highest random weight;
Thaler and Ravishankar, 1998): every replica comes to
the same answer from the list of replicas alone, and a replica that comes or goes moves only its own
share. Each replica uses its part of every engine's cap, so that together they never exceed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence


def home_of(key: str, replicas: Collection[str]) -> str:
    """The replica that a trajectory belongs to; empty when there is none."""
    return max(replicas, key=lambda name: (_weight(key, name), name), default="")


def part_of_cap(cap: int, me: str, replicas: Sequence[str]) -> int:
    """This replica's part of an engine's cap; the parts of all add up to it.

    Args:
        cap: most turns in flight on the engine.
        me: this replica.
        replicas: all, in any order; without ``me`` it counts as being alone.
    """
    ordered = sorted(replicas)
    if me not in ordered:
        return cap
    return cap // len(ordered) + (ordered.index(me) < cap % len(ordered))


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
