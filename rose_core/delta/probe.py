"""Does an engine compute what its version should? Log-probs of a fixed prompt, compared.

A digest proves the weights' bits, not what becomes of them: a kernel that went wrong, a setting of
the model or a map of the layout that is wrong in the same way twice show only in what the engine
computes. Keys cached for earlier requests are not among it: the prompt is always computed anew.
So every engine is asked after each commit for the log-probs of the same few tokens, and its answer
is compared with the trainer's at that version, else with those of other engines.

| known of this version | far from it | outcome |
|---|---|---|
| the trainer's answer | no / yes | right / wrong |
| other engines' | from fewer than half of them | right |
| other engines' | from more, and most of all engines agree with each other | wrong |
| other engines' | from more, and they do not agree either | disputed |
| nothing | | alone |

Next step: ``rose_agent.weightsync.probe`` asks, ``rose_weights.serve.service`` remembers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

PROMPT: tuple[int, ...] = tuple((73 * place + 41) % 251 for place in range(24))
"""Token ids that every vocabulary has; what they mean does not matter."""

LIMIT = 0.25
"""Mean difference, in nats, that rounding in 16 bits cannot make; ``docs/decisions`` 0016."""

NOTICE = 0.1
"""Mean difference, in nats, from which people are told (``helm/rose/files/alerts.yaml``)."""

Answer = tuple[float, ...]


class ProbeOutcome(StrEnum):
    """What a comparison says about an engine."""

    RIGHT = "Right"
    WRONG = "Wrong"
    DISPUTED = "Disputed"
    ALONE = "Alone"


@dataclass(frozen=True)
class ProbeVerdict:
    """A comparison.

    Attributes:
        difference: mean difference from the trainer's answer, else from the nearest other engine's.
        against: what it was compared with, for people.
    """

    outcome: ProbeOutcome
    difference: float | None = None
    against: str = ""


def distance(one: Answer, other: Answer) -> float:
    """Mean absolute difference; infinite where one has no such value."""
    if len(one) != len(other) or not one or not all(map(math.isfinite, (*one, *other))):
        return math.inf
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def judge(
    mine: Answer, trainer: Answer, others: Sequence[Answer], limit: float = LIMIT
) -> ProbeVerdict:
    """One row of the module's table.

    Args:
        mine: the engine's answer.
        trainer: the trainer's at the same version; empty = it gave none.
        others: other engines' at the same version.
        limit: largest mean difference that is none.
    """
    if trainer:
        difference = distance(mine, trainer)
        outcome = ProbeOutcome.RIGHT if difference <= limit else ProbeOutcome.WRONG
        return ProbeVerdict(outcome, difference, "the trainer")
    if not others:
        return ProbeVerdict(ProbeOutcome.ALONE)
    differences = [distance(mine, other) for other in others]
    near = sum(difference <= limit for difference in differences)
    against = f"{len(others)} other engines, {near} of them near"
    return ProbeVerdict(_by_majority(near, others, limit), min(differences), against)


def _by_majority(near: int, others: Sequence[Answer], limit: float) -> ProbeOutcome:
    if 2 * near >= len(others):
        return ProbeOutcome.RIGHT
    agreeing = max(sum(distance(one, other) <= limit for other in others) for one in others)
    return ProbeOutcome.WRONG if agreeing > (len(others) + 1) / 2 else ProbeOutcome.DISPUTED
