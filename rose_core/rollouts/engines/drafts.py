"""Which tokens an engine's drafts are made from, and when that is not worth it.

Siblings of a group say much the same, a trajectory repeats itself, and the next epoch asks the same
prompts. So what was sampled is a guess at what will be: the router sends it to engines that verify
guesses (``EngineSpec.drafts``), and each token keeps the probability that the model gives it. A
wrong guess costs time and changes nothing.

All that begins with one prompt is one *question*, whatever its group is called: siblings and past
epochs have the same prompt. SGLang shares its budget of drafts among corpora and not by length of
match, so an engine has one corpus, made of the questions that it answers now. It is replaced as a
whole; a question that nobody answers there any more is not in the next one.

| a question's texts are sent | when |
|---|---|
| yes | the engine answers it, and it has texts |
| no | its drafts were tried for ``TRIED_STEPS`` and gave less than ``LEAST_GAIN`` a step |
| no | the engine's corpus is full: questions with more tokens a step go first |

Of a text that is longer than what is left its newest tokens are sent.

Pure; ``rose_router.turns.drafting`` gathers and sends.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

MOST_TOKENS = 65_536
"""Of one engine's corpus: some 20 MB on its host, built anew in a tenth of a second."""
MOST_KEPT = 2_000_000
"""Of all questions, in the router's memory: 8 MB, and some 150 bytes for each answer."""
MOST_QUESTIONS = 20_000
"""That the router keeps; each takes some 500 bytes, also without an answer."""
MOST_OF_QUESTION = 16_384
CONTEXT = 18
"""Tokens of the prompt in front of an answer: as many as SGLang looks back for a match."""
TRIED_STEPS = 256
LEAST_GAIN = 1.05
"""Tokens a step. A step that verifies drafts is never shorter than one that has none."""
NEW_TOKENS = 128
"""Fewer tokens more are no reason to build a corpus anew."""

Text: TypeAlias = "array[int]"
"""Token ids, four bytes each: a tuple takes nine times as much."""
Running = Callable[[str], Iterable[Text]]
"""What unfinished answers to a question have said so far, the newest first; made as it is read."""

_MOST_NODES = 8
_SHORTEST_CHUNK = 4  # a quarter: the smallest part of a chunk that a permit asks for
_FORGET = 0.97  # of what was seen, per leg: what a policy says changes as it learns


def verified_tokens(max_running: int, chunk: int) -> int:
    """Nodes of each request's tree: its last token, and the drafts after it. 0 = no drafts.

    A permit that closes waits for the step that is under way. So a step never verifies more tokens
    than the shortest prefill chunk that a permit asks for has (``guard.certificate``).
    """
    nodes = min(_MOST_NODES, chunk // _SHORTEST_CHUNK // max_running)
    return nodes if nodes > 1 else 0


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens that steps gave; older ones count less.

    Attributes:
        steps: that verified drafts.
    """

    tokens: float = 0.0
    steps: float = 0.0

    def observe(self, tokens: int, steps: int) -> Gain:
        """Count a leg that took so many steps for its tokens."""
        return Gain(self.tokens * _FORGET + tokens, self.steps * _FORGET + steps)

    @property
    def per_step(self) -> float:
        """Tokens a step; what has not been tried counts as if it gained."""
        return self.tokens / self.steps if self.steps >= TRIED_STEPS else max(2.0, LEAST_GAIN)

    @property
    def loses(self) -> bool:
        """Whether its drafts were tried and are not worth their time."""
        return self.per_step < LEAST_GAIN


@dataclass(frozen=True, slots=True)
class DraftQuestion:
    """What was answered to one prompt.

    Attributes:
        texts: finished answers, oldest first.
    """

    texts: tuple[Text, ...] = ()
    gain: Gain = Gain()

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(map(len, self.texts))

    def with_text(self, text: Text) -> DraftQuestion:
        """With one answer more, its end if it is long; the oldest go where they are too many."""
        texts = (*self.texts, text[-MOST_OF_QUESTION:])
        while len(texts) > 1 and sum(map(len, texts)) > MOST_OF_QUESTION:
            texts = texts[1:]
        return DraftQuestion(texts, self.gain)


@dataclass(frozen=True)
class Corpus:
    """What one engine drafts from.

    Attributes:
        texts: the newest last.
        questions: whose they are.
    """

    texts: tuple[Text, ...] = ()
    questions: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(map(len, self.texts))


def decide(
    asked: Iterable[str],
    known: Mapping[str, DraftQuestion],
    running: Running,
    most: int = MOST_TOKENS,
) -> Corpus:
    """What an engine shall draft from.

    Args:
        asked: questions that it answers now.
        known: questions with finished answers.
        running: on all engines; asked for only while there is room.
        most: tokens.
    """
    nothing = DraftQuestion()
    worth = [
        (-known.get(name, nothing).gain.per_step, name)
        for name in set(asked)
        if not known.get(name, nothing).gain.loses
    ]
    chosen: list[Text] = []
    questions = set()
    left = most
    for _, name in sorted(worth):
        if not left:
            break
        for text in chain(running(name), reversed(known.get(name, nothing).texts)):
            kept = text[-left:]
            chosen.append(kept)
            questions.add(name)
            left -= len(kept)
            if not left:
                break
    # The newest of all matches is drafted first, so the best question goes last.
    return Corpus(tuple(reversed(chosen)), frozenset(questions))


def is_due(wanted: Corpus, has: Corpus) -> bool:
    """Whether an engine's corpus shall be replaced; one that is full waits for other questions."""
    if wanted.questions != has.questions:
        return True
    return wanted.size >= has.size + NEW_TOKENS or wanted.size < has.size


@dataclass
class Questions:
    """Finished answers, the questions asked last kept longest; single-threaded."""

    most: int = MOST_KEPT
    known: OrderedDict[str, DraftQuestion] = field(default_factory=OrderedDict)
    size: int = 0

    def note_answer(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """An answer is finished."""
        if not answer:
            return
        before = self.known.pop(name, DraftQuestion())
        after = before.with_text(array("i", (*prompt[-CONTEXT:], *answer[-MOST_OF_QUESTION:])))
        self._put(name, before, after)

    def note_steps(self, name: str, tokens: int, steps: int) -> None:
        """A leg has verified drafts in so many steps, and had so many tokens of them."""
        before = self.known.pop(name, DraftQuestion())
        self._put(name, before, DraftQuestion(before.texts, before.gain.observe(tokens, steps)))

    def _put(self, name: str, before: DraftQuestion, after: DraftQuestion) -> None:
        self.known[name] = after
        self.size += after.size - before.size
        while self.size > self.most or len(self.known) > MOST_QUESTIONS:
            _, oldest = self.known.popitem(last=False)
            self.size -= oldest.size
