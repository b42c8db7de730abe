"""The environment: answer with tokens of the family that the last sign names, twice.

A task shows a topic token and a sign; the policy answers with ``ANSWER_TOKENS`` tokens, the
environment replies with whether most were right and the next sign, and the policy answers again.
Token ids fall into ``FAMILIES`` families (id modulo ``FAMILIES``), so the reward of a turn, the
share of its tokens in the right family, is verifiable without a judge, starts at
1 / ``FAMILIES`` for any fresh model and can only rise when the policy reads the sign.

Tasks are token ids from end to end: nothing is tokenized twice, so trainer and engine cannot
disagree about a boundary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FAMILIES = 4
TURNS = 2
ANSWER_TOKENS = 8
TOPICS = 4

# Special ids sit just above the byte tokens of a byte-level tokenizer.
_TOPIC_BASE = 16
_SIGN_BASE = 32
_RIGHT, _WRONG = 48, 49
HIGHEST_ID = _WRONG


@dataclass(frozen=True, order=True)
class Task:
    """One problem: a topic and the sign of each turn.

    Attributes:
        topic: 0 .. ``TOPICS`` - 1; makes prompts differ, means nothing.
        signs: the family demanded in each turn.
    """

    topic: int
    signs: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.signs) != TURNS or not all(0 <= sign < FAMILIES for sign in self.signs):
            message = f"a task needs {TURNS} signs of 0..{FAMILIES - 1}, got {self.signs}"
            raise ValueError(message)

    def opening(self) -> list[int]:
        """Prompt of the first turn."""
        return [_TOPIC_BASE + self.topic, _SIGN_BASE + self.signs[0]]

    def observation(self, turn: int, answer: Sequence[int]) -> list[int]:
        """What the environment says after ``answer`` in ``turn`` (0-based, not the last)."""
        verdict = _RIGHT if right(self.reward(turn, answer)) else _WRONG
        return [verdict, _SIGN_BASE + self.signs[turn + 1]]

    def reward(self, turn: int, answer: Sequence[int]) -> float:
        """Share of the turn's tokens in the demanded family, 0..1; 0 for no tokens."""
        right = sum(token % FAMILIES == self.signs[turn] for token in answer)
        return right / max(len(answer), 1)


def right(reward: float) -> bool:
    """Whether a turn of that reward was right: most of its tokens were of the demanded family."""
    return reward > 1 / 2


def draw(random_source: random.Random) -> Task:
    """One training task."""
    signs = tuple(random_source.randrange(FAMILIES) for _ in range(TURNS))
    return Task(random_source.randrange(TOPICS), signs)


def evaluation_tasks() -> list[Task]:
    """The fixed evaluation prompts: every combination of topic and signs, once."""
    return [
        Task(topic, (first, second))
        for topic in range(TOPICS)
        for first in range(FAMILIES)
        for second in range(FAMILIES)
    ]
