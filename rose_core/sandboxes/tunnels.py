"""How many connections may lead into a sandbox, and when one ends that nobody has ended.

A tunnel holds a socket, two buffers and a task of its host. So each sandbox has so many, and one
through which nothing passes gives its place back. None outlives its sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_TUNNELS = 64
"""Of one sandbox: what a browser keeps open to ten servers, and more than any harness does."""
IDLE_SECONDS = 900.0
"""Longer than any wait for a model that does not suspend the sandbox, which ends tunnels too."""


@dataclass(frozen=True)
class TunnelLimits:
    """How many tunnels a host keeps open, and for how long without traffic.

    Attributes:
        most: open ones of a sandbox.
        idle_seconds: without a byte either way, after which one ends.
    """

    most: int = MOST_TUNNELS
    idle_seconds: float = IDLE_SECONDS


class End(StrEnum):
    """Why a tunnel ended."""

    CLOSED = "closed"
    """By its caller, or by the server in the sandbox."""
    IDLE = "idle"
    """Nothing passed for too long."""
    SANDBOX = "sandbox"
    """Its sandbox ended, was given back anew, or belongs to another host now."""


def may_open(limits: TunnelLimits, there_are: int) -> bool:
    """Whether a sandbox with so many tunnels may have another one."""
    return there_are < limits.most


def end_of(
    limits: TunnelLimits, *, moved: float, now: float, closed: bool, gone: bool
) -> End | None:
    """Why a tunnel ends now; None: it stays.

    Args:
        limits: of its host.
        moved: when a byte passed last, on the caller's clock.
        now: on the same clock.
        closed: one of its sides has ended.
        gone: its sandbox has ended.
    """
    if gone:
        return End.SANDBOX  # the sockets of a sandbox that ends close too, which says less
    if closed:
        return End.CLOSED
    return End.IDLE if now - moved >= limits.idle_seconds else None
