"""Settings of a router, from flags; see ``main``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rose_core.rollouts.admission import Queue
from rose_core.rollouts.placement import Policy
from rose_core.rollouts.watch import Patience


@dataclass(frozen=True)
class Settings:
    """Everything that can be set.

    Attributes:
        lease: ``namespace/name``; engines of another lease are refused.
        model: name shown by ``/v1/models``.
        tokenizer: folder or file of a ``tokenizer.json``; without it only token ids are taken.
        attach_token: bearer token of engine owners.
        turn_token: bearer token of callers; empty = none is asked.
        max_body_bytes: largest request.
        interval: tokens per event of engines' streams for callers who do not stream: fewer events
            cost engine and router less; a killed engine takes at most so many unseen tokens along.
        max_losses: engines a turn may lose before it ends with a typed abort.
        forget_seconds: how long an engine whose owner hung up is kept with its gate closed.
        drain_seconds: how long live turns may go on after SIGTERM.
        replay_seconds: how long a finished turn answers its duplicate id.
    """

    lease: str
    model: str = "policy"
    tokenizer: Path | None = None
    attach_token: str = ""
    turn_token: str = ""
    max_body_bytes: int = 16 * 1024 * 1024
    interval: int = 4
    max_losses: int = 10
    forget_seconds: float = 60.0
    drain_seconds: float = 20.0
    replay_seconds: float = 120.0
    policy: Policy = field(default_factory=Policy)
    patience: Patience = field(default_factory=Patience)
    queue: Queue = field(default_factory=Queue)
