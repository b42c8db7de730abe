"""Whether a node's driver runs the CUDA that an engine was built for (pure).

A program of CUDA 12 runs on every driver of CUDA 12, and one of CUDA 13 on every driver of CUDA 13
(minor version compatibility). An older driver runs a newer CUDA only through NVIDIA's forward
compatibility package, on data centre GPUs, and from certain branches on:

| engine's CUDA | driver from | with the compatibility package, from branches |
|---|---|---|
| 12.x | 525 | 470 |
| 13.x | 580 | 535, 550, 570 |

SGLang 0.5.23 is CUDA 13. Numbers are NVIDIA's (CUDA Compatibility, tables of minor version and
forward compatibility). Next step: ``rose_agent.host.discovery.capabilities`` asks before anything
is lent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What one major version of CUDA needs.

    Attributes:
        branch: oldest branch of the driver.
        compatible: older branches on which the compatibility package is supported.
    """

    branch: int
    compatible: frozenset[int]


NEEDS: Mapping[int, Needs] = {
    12: Needs(525, frozenset({470})),
    13: Needs(580, frozenset({535, 550, 570})),
}


def refusal(driver: str | None, cuda: tuple[int, int] | None, *, compat: bool) -> str:
    """Why engines of this CUDA cannot run; empty when they can, or when nobody knows.

    Args:
        driver: as NVIDIA numbers it, ``550.163.01``; None = unknown.
        cuda: what the engine was built for; None = unknown, or it is built for no GPU.
        compat: the engine's image holds the compatibility package.
    """
    needs = NEEDS.get(cuda[0]) if cuda is not None else None
    branch = _branch(driver)
    if needs is None or cuda is None or branch is None or branch >= needs.branch:
        return ""
    if compat and branch in needs.compatible:
        return ""
    wanted = f"CUDA {cuda[0]}.{cuda[1]} needs driver {needs.branch} or later"
    if branch in needs.compatible:
        return f"{wanted}, or the package cuda-compat-{cuda[0]} in the engine image; it is {driver}"
    kind = "which the compatibility package does not support either" if compat else "which is older"
    return f"{wanted}; it is {driver}, {kind}"


def _branch(driver: str | None) -> int | None:
    first = (driver or "").partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else None
