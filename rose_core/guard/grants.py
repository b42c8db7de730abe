"""Which grants are alive: by leader term, and by a deadline on the node's own clock.

The deadline is *the agent's send time* + TTL, so an answer that was delayed extends nothing. Terms
below the highest ever obeyed are refused; the highest survives a restart of the agent.

| reply | effect |
|---|---|
| term < highest | refused: nothing changes |
| complete | its grants replace all; a missing slot has been taken back |
| not complete | its grants renew what is held; nothing starts, nothing is taken back |
| none in time | each grant lapses at its deadline |

Next step: ``slot`` starts and releases engines by what is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose_core.identity import SlotUid
from rose_core.wire.sync import Grant, SyncReply


@dataclass(frozen=True)
class HeldGrant:
    """One grant and its deadline (CLOCK_MONOTONIC seconds)."""

    grant: Grant
    deadline_s: float


@dataclass(frozen=True)
class GrantBook:
    """Every grant of the node by slot uid."""

    highest_term: int = 0
    held: dict[SlotUid, HeldGrant] = field(default_factory=dict)
    refused_terms: int = 0
    complete_replies: int = 0

    def take(self, reply: SyncReply, sent_s: float) -> GrantBook:
        """Apply a reply to a request sent at ``sent_s``."""
        if reply.term < self.highest_term:
            return replace(self, refused_terms=self.refused_terms + 1)
        grants = {g.key.slot.uid: g for g in reply.grants if g.key.term >= self.highest_term}
        if not reply.complete:
            grants = {uid: g for uid, g in grants.items() if uid in self.held}
        held = {} if reply.complete else dict(self.held)
        for uid, grant in grants.items():
            before = self.held.get(uid)
            if before and grant.key.slot.generation < before.grant.key.slot.generation:
                continue
            deadline = sent_s + grant.ttl_seconds
            if before and before.grant.key.slot == grant.key.slot:
                deadline = max(deadline, before.deadline_s)
            held[uid] = HeldGrant(grant, deadline)
        return replace(
            self,
            highest_term=reply.term,
            held=held,
            complete_replies=self.complete_replies + reply.complete,
        )

    def is_alive(self, uid: SlotUid, now_s: float) -> bool:
        """Whether the slot has a grant whose deadline lies ahead."""
        held = self.held.get(uid)
        return held is not None and now_s < held.deadline_s

    def alive(self, now_s: float) -> dict[SlotUid, Grant]:
        """Grants whose deadline lies ahead."""
        return {uid: h.grant for uid, h in self.held.items() if now_s < h.deadline_s}
