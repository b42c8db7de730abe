"""The lease's totals: sums of counters that agents report, kept through restarts of anybody.

``status.totals`` holds the sums *and* how much each living slot has contributed, in one object
and therefore in one write: a crash between two writes can neither lose nor double anything.
Figures move all the time, so they are written at most once a minute or with a real transition.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_core.api import RolloutLease, RolloutSlot
from rose_core.api.rolloutlease import SlotTotals, Totals
from rose_operator.world import World


def totals(lease: RolloutLease, slots: Sequence[RolloutSlot], world: World) -> Totals:
    """Totals with the newest reports added."""
    old = lease.status.totals
    before = {entry.uid: entry for entry in old.slots}
    lent, opened, tokens = old.lent_milliseconds, old.open_milliseconds, old.harvested_tokens
    entries = []
    for slot in sorted(slots, key=lambda slot: slot.metadata.uid):
        counted = before.get(slot.metadata.uid, SlotTotals(uid=slot.metadata.uid))
        report = world.telemetry.slot(slot.metadata.uid, slot.spec.member.node)
        if report is not None:
            lent += _gain(counted.lent_milliseconds, report.lent_milliseconds)
            opened += _gain(counted.open_milliseconds, report.open_milliseconds)
            tokens += _gain(counted.harvested_tokens, report.harvested_tokens)
            counted = SlotTotals(
                uid=counted.uid,
                lent_milliseconds=report.lent_milliseconds,
                open_milliseconds=report.open_milliseconds,
                harvested_tokens=report.harvested_tokens,
            )
        entries.append(counted)
    return Totals(
        lent_milliseconds=lent,
        open_milliseconds=opened,
        harvested_tokens=tokens,
        slots=tuple(entries),
    )


def _gain(counted: int, reported: int) -> int:
    """Growth of a counter; one that fell was started anew."""
    return reported - counted if reported >= counted else reported
