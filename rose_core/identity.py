"""Names that every process agrees on: weight versions, slots, grants.

A weight version is (run, incarnation, sequence). The trainer's step is only a label: a trainer
that resumes from an older checkpoint starts a new incarnation, so a later publish of step 10 is
never mistaken for the earlier one.
"""

from __future__ import annotations

import re

import msgspec

from rose_core.uids import GpuUuid as GpuUuid  # noqa: PLC0414  # also from here
from rose_core.uids import LeaseUid as LeaseUid  # noqa: PLC0414  # also from here
from rose_core.uids import PodUid as PodUid  # noqa: PLC0414  # also from here
from rose_core.uids import SlotUid as SlotUid  # noqa: PLC0414  # also from here

_VERSION = re.compile(
    r"^(?P<run>[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)@(?P<incarnation>\d+)\.(?P<sequence>\d+)$"
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
    """One published state of a run's weights; ordered within a run.

    Attributes:
        run: the training run, a DNS label.
        incarnation: how often the run's publisher has started anew; fences older publishers.
        sequence: publishes inside the incarnation, from 0.
    """

    run: str
    incarnation: int
    sequence: int

    def __str__(self) -> str:
        """The label engines carry and replies show, for example ``grpo@1.7``."""
        return f"{self.run}@{self.incarnation}.{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read a label back.

        Raises:
            ValueError: the text is not ``run@incarnation.sequence``.
        """
        match = _VERSION.match(text)
        if match is None:
            message = f"{text!r} is no weight version; expected run@incarnation.sequence"
            raise ValueError(message)
        return cls(match["run"], int(match["incarnation"]), int(match["sequence"]))


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
