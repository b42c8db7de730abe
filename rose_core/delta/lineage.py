"""Which manifests lead from the version at hand to the version wanted.

Every version but the first has a base, so versions form a forest: a trainer that resumes from an
older checkpoint branches. A way climbs from the version at hand to the common ancestor (backwards)
and descends to the target. Where there is none, the way starts at the nearest full manifest above
the target. Pure: the store asks, ``merge.compose`` does the work.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rose_core.delta.errors import LineageError
from rose_core.identity import WeightVersion


@dataclass(frozen=True)
class VersionLink:
    """What the store holds about a version.

    Attributes:
        base: the version its delta starts from; None when it has no delta.
        full: a full manifest is there too.
        bytes: size of its delta's blocks.
    """

    base: WeightVersion | None
    full: bool
    bytes: int = 0


@dataclass(frozen=True)
class VersionPath:
    """Versions to go through.

    Attributes:
        back: deltas to take back, nearest first.
        anchor: version whose full manifest the way starts from; None when it starts from a base.
        forward: deltas to apply, in order.
    """

    back: tuple[WeightVersion, ...] = ()
    anchor: WeightVersion | None = None
    forward: tuple[WeightVersion, ...] = ()

    @property
    def hops(self) -> int:
        """Manifests the way goes through."""
        return len(self.back) + (self.anchor is not None) + len(self.forward)


Lineage = Mapping[WeightVersion, VersionLink]


def ancestors(version: WeightVersion, lineage: Lineage) -> list[WeightVersion]:
    """The version, its base, and so on as far as the lineage is kept."""
    found: list[WeightVersion] = []
    at: WeightVersion | None = version
    while at is not None and at in lineage and at not in found:
        found.append(at)
        at = lineage[at].base
    return found


def way(have: WeightVersion, want: WeightVersion, lineage: Lineage) -> VersionPath:
    """From one version to another by deltas.

    Raises:
        LineageError: one of them is not kept, or they have no common ancestor.
    """
    up, down = ancestors(have, lineage), ancestors(want, lineage)
    if not down:
        message = f"version {want} is not kept"
        raise LineageError(message)
    meeting = next((version for version in up if version in down), None)
    if meeting is None:
        message = f"no delta leads from {have} to {want}"
        raise LineageError(message)
    back, forward = up[: up.index(meeting)], down[: down.index(meeting)]
    return VersionPath(back=tuple(back), forward=tuple(reversed(forward)))


def full_way(want: WeightVersion, lineage: Lineage) -> VersionPath:
    """To a version from nothing: the nearest full manifest and the deltas after it.

    Raises:
        LineageError: the version is not kept, or nothing above it is held in full.
    """
    down = ancestors(want, lineage)
    for depth, version in enumerate(down):
        if lineage[version].full:
            return VersionPath(anchor=version, forward=tuple(reversed(down[:depth])))
    message = (
        f"version {want} cannot be had in full: neither it nor a version it descends from has a "
        "full manifest; let the Publisher upload one (anchor=True)"
    )
    raise LineageError(message)


@dataclass(frozen=True)
class Retention:
    """What stays and what must be rewritten for it.

    Attributes:
        keep: versions whose manifests stay; the first versions of their lines are among them.
        rebase: version -> kept ancestor that its delta must start from, because its base goes.
    """

    keep: frozenset[WeightVersion]
    rebase: dict[WeightVersion, WeightVersion]


def _forks(lines: Collection[Sequence[WeightVersion]]) -> set[WeightVersion]:
    """Where lines part: without these versions a way from one line to another would be lost."""
    shared = Counter(version for line in lines for version in line)
    return {
        parent
        for line in lines
        for child, parent in itertools.pairwise(line)
        if shared[parent] > shared[child]
    }


def retain(wanted: set[WeightVersion], lineage: Lineage) -> Retention:
    """Keep the wanted versions reachable from each other and from the first version.

    The first version is what an engine that loads the model from disk holds, and what a full
    transfer starts from, so it always stays; what lies between is folded into one delta.
    """
    lines = {version: ancestors(version, lineage) for version in wanted if version in lineage}
    keep = set(lines) | {line[-1] for line in lines.values()} | _forks(lines.values())
    rebase = {}
    for version in keep:
        line = ancestors(version, lineage)[1:]
        nearest = next((ancestor for ancestor in line if ancestor in keep), None)
        if nearest is not None and nearest != lineage[version].base:
            rebase[version] = nearest
    return Retention(frozenset(keep), rebase)
