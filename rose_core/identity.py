"""Names that every process agrees on: weight versions, slots, grants.

A weight version is (run, incarnation, sequence). The trainer's step is only a label: a trainer
that resumes from an older checkpoint starts a new incarnation, so a later publish of step 10 is
never mistaken for the earlier one.

Before the first publish an engine runs the checkpoint that it was started from: *version 0*. It has
no publisher that could number it, so its digest does: ``grpo@base.3f9a2c1d04b7``. It is older than
everything that is published, and two different checkpoints are two versions.
"""

from __future__ import annotations

import re

import msgspec

from rose_core.uids import GpuUuid as GpuUuid  # noqa: PLC0414  # also from here
from rose_core.uids import LeaseUid as LeaseUid  # noqa: PLC0414  # also from here
from rose_core.uids import PodUid as PodUid  # noqa: PLC0414  # also from here
from rose_core.uids import SlotUid as SlotUid  # noqa: PLC0414  # also from here

BASE_LABEL = "base"
"""What an engine itself calls its weights before the first commit."""
FROZEN_RUN = "frozen"
"""The run in the version of engines that follow none: ``frozen@base.3f9a2c1d04b7``."""
_BASE_INCARNATION = -1
"""Below every publisher's, so that the order of versions needs no case of its own."""
_BASE_DIGITS = 12
"""Of the digest's 32: 48 bits, which a JSON number holds exactly. A lease has a handful of
checkpoints at most, so that two of them agree by accident once in 10^13 leases."""

_VERSION = re.compile(
    r"^(?P<run>[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)@"
    rf"((?P<incarnation>\d+)\.(?P<sequence>\d+)|{BASE_LABEL}\.(?P<base>[0-9a-f]{{{_BASE_DIGITS}}}))$"
)


def run_name(text: str) -> str:
    """The text, when it can name a run.

    Raises:
        ValueError: it cannot; says what can.
    """
    if _VERSION.match(f"{text}@0.0") is None:
        message = f"{text!r} is no run name: lower-case letters, digits, '-' and '.', at most 63"
        raise ValueError(message)
    return text


class WeightVersion(msgspec.Struct, frozen=True, order=True):
    """One state of a run's weights, published or the one before; ordered within a run.

    Attributes:
        run: the training run, a DNS label.
        incarnation: how often the run's publisher has started anew; fences older publishers.
            Negative for version 0, see ``of_base``.
        sequence: publishes inside the incarnation, from 0; of version 0 the digest's beginning.
    """

    run: str
    incarnation: int
    sequence: int

    def __str__(self) -> str:
        """The label engines carry and replies show, for example ``grpo@1.7``."""
        if self.is_base:
            return f"{self.run}@{BASE_LABEL}.{self.sequence:0{_BASE_DIGITS}x}"
        return f"{self.run}@{self.incarnation}.{self.sequence}"

    @property
    def is_base(self) -> bool:
        """Whether it is version 0: nobody has published it."""
        return self.incarnation == _BASE_INCARNATION

    @classmethod
    def of_base(cls, run: str, digest: str) -> WeightVersion:
        """Version 0 of a run on engines whose own checkpoint has this digest.

        Args:
            run: that the engines follow.
            digest: 32 hexadecimal digits.

        Raises:
            ValueError: one of them is something else.
        """
        return cls.parse(f"{run}@{BASE_LABEL}.{digest[:_BASE_DIGITS]}")

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read a label back.

        Raises:
            ValueError: the text is neither ``run@incarnation.sequence`` nor a version 0.
        """
        match = _VERSION.match(text)
        if match is None:
            message = f"{text!r} is no weight version; expected run@incarnation.sequence"
            raise ValueError(message)
        if match["base"] is not None:
            return cls(match["run"], _BASE_INCARNATION, int(match["base"], 16))
        return cls(match["run"], int(match["incarnation"]), int(match["sequence"]))


def published(label: str) -> WeightVersion | None:
    """The version that a trainer has published under this label.

    An engine has an attested version before its trainer has published anything. Who asks whether
    a publish has arrived asks this, and not whether there is a version.

    Returns:
        None for version 0, and for what is no label of ours.
    """
    version = _version(label)
    return None if version is None or version.is_base else version


def is_base(label: str) -> bool:
    """Whether the label is of version 0, an engine's own checkpoint; False for what is no label."""
    version = _version(label)
    return version is not None and version.is_base


def _version(label: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(label)
    except ValueError:
        return None


class SlotKey(msgspec.Struct, frozen=True, order=True):
    """A RolloutSlot and its generation; an older generation never acts for a newer one."""

    uid: SlotUid
    generation: int


class GrantKey(msgspec.Struct, frozen=True, order=True):
    """What makes a grant unique: the planner's leader term and the slot's key.

    An agent refuses terms lower than the highest it has seen, so a planner that was replaced
    cannot grant or renew anything.
    """

    term: int
    slot: SlotKey
