"""When the installation's own certificates are made, renewed and dropped: nobody is locked out.

An authority signs leaves (a listener's certificate, a node's). Whoever checks one believes the
authority's *bundle*, which reaches every process within ``SPREAD_SECONDS``: kubelets refresh
mounted Secrets within minutes, whoever has lost a connection reads it anew as he dials, and routers
ask the operator twice in that time.

| the authority has | and | step |
|---|---|---|
| nothing | | ``MAKE`` |
| a signer | a third of its life is left | ``PREPARE``: a successor, which is believed |
| a successor | believed for ``SPREAD_SECONDS`` | ``SWITCH``: it signs; both are believed |
| a former signer | it has ended, with all it signed | ``DROP`` |

A leaf is issued anew when there is none, when another signer took over, when its names are others,
or when a third of its life is left. ``rose_operator.own_secrets`` carries it out; certificates
themselves come from ``rose_wire.certificates``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SPREAD_SECONDS = 86_400.0
"""A day: longer than any kubelet's delay, and twice what routers wait until they ask again."""

_LAST_PART = 1 / 3
"""Of a life: what is left when a successor is made; the same share as in cert-manager."""


@dataclass(frozen=True)
class ValidityWindow:
    """From when to when a certificate is good, Unix seconds."""

    begins: float
    ends: float

    def is_old(self, now: float) -> bool:
        """Whether the last third of its life has begun."""
        return now >= self.ends - _LAST_PART * (self.ends - self.begins)


@dataclass(frozen=True)
class HeldAuthority:
    """What an authority has: who signs, who will, and who is still believed.

    Attributes:
        prepared_at: since when the successor has been in the bundle, Unix seconds.
    """

    signer: ValidityWindow | None = None
    successor: ValidityWindow | None = None
    prepared_at: float = 0.0
    former: tuple[ValidityWindow, ...] = ()


@dataclass(frozen=True)
class HeldLeaf:
    """A certificate: its window, and whether signer and names are still those that are wanted."""

    window: ValidityWindow
    by_signer: bool
    names_wanted: bool


class RotationStep(StrEnum):
    """What is to be done with an authority now."""

    MAKE = "Make"
    PREPARE = "Prepare"
    SWITCH = "Switch"
    DROP = "Drop"
    NONE = "None"


def decide(held: HeldAuthority, now: float) -> RotationStep:
    """The next step of the module's table."""
    if held.signer is None or now >= held.signer.ends:
        return RotationStep.MAKE
    if any(now >= former.ends for former in held.former):
        return RotationStep.DROP
    if held.successor is None:
        return RotationStep.PREPARE if held.signer.is_old(now) else RotationStep.NONE
    if now >= held.prepared_at + SPREAD_SECONDS:
        return RotationStep.SWITCH
    return RotationStep.NONE


def is_due(leaf: HeldLeaf | None, now: float) -> bool:
    """Whether a leaf has to be issued anew."""
    return leaf is None or not leaf.by_signer or not leaf.names_wanted or leaf.window.is_old(now)
