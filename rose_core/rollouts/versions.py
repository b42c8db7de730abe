"""Staleness in publishes, and pins of a request to versions.

The reference is the newest version anybody has told the router of: an engine's attested version or
the head of the weight plane. Versions of another run, or of an older incarnation, are out of every
bound: after a restart of the trainer its earlier publishes may belong to an abandoned branch.

Version 0, the engines' own checkpoint, is sampled by while nothing newer is known, and by no turn
that begins later, whatever the bound: nobody has said that the publisher began with it. Engines
with different checkpoints have different versions 0, of which one at a time is the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.errors import InvalidTurn, UnknownVersion, VersionGone


class Pin(msgspec.Struct, frozen=True):
    """Versions a turn may be sampled by, beside the lease's staleness bound.

    Attributes:
        run: whose versions, where a lease follows several; empty = those of its first.
        minimum: no version older than this.
        exact: only this version; the turn ends with a typed abort when it is gone.
    """

    minimum: WeightVersion | None = None
    exact: WeightVersion | None = None
    run: str = ""


NO_PIN = Pin()

NO_RUNS: frozenset[str] = frozenset()

FIRST_INCARNATION = 1
"""The store counts publishers of a run from here."""


@lru_cache(4096)
def parse(label: str) -> WeightVersion | None:
    """A label as version; ``None`` for what is no label of ours (then nothing is known)."""
    try:
        return WeightVersion.parse(label)
    except ValueError:
        return None


def read_pin(minimum: object, exact: object, run: str = "") -> Pin:
    """The pins of a request; a version that it names is of the run that it means.

    Raises:
        InvalidTurn: a pin is no ``run@incarnation.sequence``, or they mean several runs.
    """
    if minimum is None and exact is None and not run:
        return NO_PIN
    pin = Pin(_pinned("min_version", minimum), _pinned("version", exact))
    named = {one.run for one in (pin.minimum, pin.exact) if one is not None} | ({run} - {""})
    if len(named) > 1:
        message = f"rose: a turn is of one run, these fields name {', '.join(sorted(named))}"
        raise InvalidTurn(message)
    return Pin(pin.minimum, pin.exact, *named) if named else NO_PIN


def _pinned(field: str, value: object) -> WeightVersion | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        message = f"rose.{field}: expected text such as grpo@1.7, got {type(value).__name__}"
        raise InvalidTurn(message)
    try:
        return WeightVersion.parse(value)
    except ValueError as error:
        message = f"rose.{field}: {error}"
        raise InvalidTurn(message) from error


def newest(versions: Iterable[WeightVersion]) -> WeightVersion | None:
    """The newest of them; a lease follows one run, so run names are not weighed."""
    return max(versions, key=lambda v: (v.incarnation, v.sequence), default=None)


def next_head(
    head: WeightVersion | None,
    named: Iterable[WeightVersion | None],
    live: Iterable[WeightVersion],
) -> WeightVersion | None:
    """The newest version, now that more were named.

    Checkpoints have no order. While nothing is published, the version 0 that was the newest stays
    it for as long as an engine has it; then it is the one that most engines have.

    Args:
        head: newest before.
        named: by engines' updates or a publisher.
        live: of the engines that stay attached.
    """
    known = [version for version in (head, *named) if version is not None]
    published = newest(version for version in known if not version.is_base)
    if published is not None:
        return published
    counts = Counter(version for version in live if version.is_base)
    if head in counts or not counts:
        return head
    return max(counts, key=lambda version: (counts[version], version))


def lag(version: WeightVersion, head: WeightVersion) -> int | None:
    """How many publishes ``version`` is behind ``head``; ``None`` when they do not compare."""
    if version is head:
        return 0  # the usual case, asked several times a turn
    if (version.run, version.incarnation) != (head.run, head.incarnation):
        return None
    if head.is_base:
        return 0 if version == head else None
    return max(0, head.sequence - version.sequence)


def age(began_with: WeightVersion, head: WeightVersion) -> int | None:
    """Publishes since a trajectory began with a version; ``None`` when that cannot be told.

    The same as ``lag``, but for version 0: however its weights relate to those of the first
    publisher, that one's first publish came one publish later. Before it there was none.
    """
    if began_with is head:
        return 0  # the usual case
    if not began_with.is_base:
        return lag(began_with, head)
    if began_with.run != head.run:
        return None
    if head.is_base:
        return 0
    return head.sequence + 1 if head.incarnation == FIRST_INCARNATION else None


def fresh(version: WeightVersion, head: WeightVersion, bound: int) -> bool:
    """Whether the version is inside the staleness bound."""
    behind = lag(version, head)
    return behind is not None and behind <= bound


def older(version: WeightVersion, other: WeightVersion) -> bool:
    """Whether the version came before the other; run names are not weighed.

    Two versions 0 have no order: neither came before the other.
    """
    if version is other:
        return False
    if version.is_base and other.is_base:
        return False
    return (version.incarnation, version.sequence) < (other.incarnation, other.sequence)


def satisfies(version: WeightVersion, pin: Pin) -> bool:
    """Whether a turn with this pin may be sampled by the version."""
    if pin.run and version.run != pin.run:
        return False
    if pin.exact is not None:
        return version == pin.exact
    if pin.minimum is None:
        return True
    if version.is_base:
        return version == pin.minimum  # another checkpoint is not newer, and nothing is older
    return version.run == pin.minimum.run and not older(version, pin.minimum)


def _may_come(wanted: WeightVersion, head: WeightVersion | None) -> bool:
    """Whether a version that nobody has may still be published."""
    if head is None:
        return True
    if wanted.is_base:
        return False
    return head.is_base or (wanted.run == head.run and not older(wanted, head))


def check_pin(
    pin: Pin, head: WeightVersion | None, live: Iterable[WeightVersion], *, held: Set[str] = NO_RUNS
) -> None:
    """Refuse a pin that cannot be met by waiting a moment.

    Args:
        pin: the request's.
        head: newest version known.
        live: versions that the engines attached attest, or attested last where they attest none.
        held: runs that they hold adapters of, attested at the moment or not; such runs come and go.

    Raises:
        UnknownVersion: nobody has announced such a version yet.
        VersionGone: nobody will: it runs nowhere any more, or is another run's than the only one.
    """
    live = tuple(live)
    _check_run(pin, head, live, held)
    wanted = pin.exact or pin.minimum
    refusal = UnknownVersion if wanted is None or _may_come(wanted, head) else VersionGone
    known = f"the newest version known here is {head}" if head else "no version is known here yet"
    if pin.exact is not None and pin.exact != head and pin.exact not in set(live):
        message = f"no engine has version {pin.exact}; {known}"
        raise refusal(message)
    if pin.minimum is not None and (head is None or not satisfies(head, Pin(pin.minimum))):
        message = f"version {pin.minimum} or newer is not known here; {known}"
        raise refusal(message)


def _check_run(
    pin: Pin, head: WeightVersion | None, live: Sequence[WeightVersion], held: Set[str]
) -> None:
    """Refuse a run that no engine has, where one may get it; arguments as of ``check_pin``."""
    runs = {version.run for version in live}
    if head is not None and (head.run in held or pin.exact == head):
        runs.add(head.run)  # what had its newest version attests it again in a moment
    # Where engines have one run, a version of another is gone for good: nobody ought to ask again.
    may_come = bool(held) or (pin.exact is None and pin.minimum is None)
    if pin.run and runs and may_come and pin.run not in runs:
        message = f"no engine has run {pin.run} yet; there are {', '.join(sorted(runs))}"
        raise UnknownVersion(message)
