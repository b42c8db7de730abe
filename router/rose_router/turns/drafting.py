"""Sends engines the tokens that they draft from, and learns how well they do.

What an engine drafts from is ``rose_core.rollouts.engines.drafts``'; this keeps answers, looks
every ``LOOK_SECONDS`` at which questions each engine answers, and sends a corpus where another is
due. An engine that was sent one ``FRESH_SECONDS`` ago gets it again: its process may be another
one.

A process has one corpus, however many adapters it holds, and one router sends it: the replica that
the engine is attached to, and of the turns that run there. Other replicas keep answers, and send
that engine nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rose_core.rollouts.engines.drafts import (
    CONTEXT,
    MOST_OF_QUESTION,
    Corpus,
    Questions,
    Text,
    decide,
    is_due,
)
from rose_router import metrics
from rose_router.engines.engine_client import Target
from rose_router.engines.fleet import Clock, Engine, Fleet
from rose_router.turns.turn import Turn

LOG = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
FRESH_SECONDS = 60.0
_LEAST_RUNNING = 32  # tokens of an answer that others may repeat
_MOST_TRAJECTORIES = 65_536

Send = Callable[[Target, Sequence[Sequence[int]]], Awaitable[bool]]
"""Sends an engine what it shall draft from; false when it has not taken it."""


@dataclass(frozen=True)
class _Sent:
    corpus: Corpus
    at: float


class _RunningAnswers:
    """What unfinished answers have said so far: made when asked for, and once."""

    def __init__(self) -> None:
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        self._made: dict[str, list[Text]] = {}

    def texts(self, question: str) -> Iterator[Text]:
        """Answers to a question, the turn that began last first; no more than is kept of one."""
        made = self._made.setdefault(question, [])
        yield from made
        left = MOST_OF_QUESTION - sum(map(len, made))
        turns = self.turns.get(question, [])
        while turns and left > 0:
            turn = turns.pop()
            new = turn.newest(left)
            if len(new) >= _LEAST_RUNNING:
                made.append(array("i", (*turn.request.prompt[-CONTEXT:], *new)[-left:]))
                left -= len(made[-1])
                yield made[-1]


class Drafter:
    """Drafts of one router.

    Args:
        fleet: engines; those that say so draft.
        turns: all that live.
        send: reaches an engine.
        clock: monotonic seconds.
    """

    def __init__(
        self, fleet: Fleet, turns: Callable[[], Iterable[Turn]], send: Send, clock: Clock
    ) -> None:
        self._fleet, self._turns, self._send, self._clock = fleet, turns, send, clock
        self._questions = Questions()
        self._asked: OrderedDict[str, str] = OrderedDict()
        """Every trajectory's question; empty: nothing drafted while its first turn lived."""
        self._first: dict[str, Turn] = {}
        self._sent: dict[str, _Sent] = {}
        self.under_way: dict[str, asyncio.Task[None]] = {}

    def begin_turn(self, turn: Turn) -> None:
        """Note that it is its trajectory's first, whose prompt its siblings share.

        It is read when an engine that drafts is there: none may be yet when turns are queued.
        """
        name = turn.request.trajectory
        if name in self._asked:
            self._asked.move_to_end(name)
            return
        self._asked[name], self._first[name] = "", turn
        while len(self._asked) > _MOST_TRAJECTORIES:
            self._first.pop(self._asked.popitem(last=False)[0], None)

    def end_turn(self, turn: Turn) -> None:
        """Keep its answer, and what drafts were worth."""
        name = turn.request.trajectory
        if self._first.get(name) is not turn:
            question = self._question(turn)
        elif self._fleet.bounds().drafts:
            question = self._question(turn)
            del self._first[name]
        else:  # the usual case: nobody drafts, and nobody has asked
            del self._first[name]
            question = self._asked.get(name, "")
        if not question:
            return
        for leg in turn.transcript.legs:
            steps = leg.meta.get("spec_verify_ct") if leg.meta else None
            if isinstance(steps, int) and steps > 0:
                drafted = max(0, len(leg.ids) - 1)  # the first token is the prefill's
                self._questions.note_steps(question, drafted, steps)
                metrics.DRAFTS.labels("accepted").inc(max(0, drafted - steps))
                metrics.DRAFTS.labels("steps").inc(steps)
        self._questions.note_answer(question, turn.request.prompt, turn.transcript.tokens)

    def _question(self, turn: Turn) -> str:
        """What its trajectory is about; empty where that is not known."""
        name = turn.request.trajectory
        first = self._first.get(name)
        if first is not None and not self._asked[name] and self._fleet.bounds().drafts:
            ids = array("i", first.request.prompt).tobytes()
            self._asked[name] = hashlib.blake2b(ids, digest_size=16).hexdigest()
        return self._asked.get(name, "")

    async def run(self) -> None:
        """Look again and again until cancelled; what is under way then is cancelled too."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self.look()
        finally:
            tasks = self.under_way.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Begin to send what is due now; an engine that still takes the last is left alone."""
        for name, task in list(self.under_way.items()):
            if task.done():
                del self.under_way[name]
                task.result()  # what nobody foresaw ends the loop, and the router with it
        drafting = self._drafting()
        self._sent = {name: one for name, one in self._sent.items() if name in drafting}
        free = {name: one for name, one in drafting.items() if name not in self.under_way}
        if not free:
            return
        asked, answers = self._seen(free)
        for name, engines in free.items():
            wanted = decide(asked[name], self._questions.known, answers.texts)
            if self._is_due(name, wanted):
                self.under_way[name] = asyncio.create_task(self._renew(name, engines[0], wanted))

    def _drafting(self) -> dict[str, list[Engine]]:
        """Processes that this router sends their corpus, which all their adapters draft from."""
        found: dict[str, list[Engine]] = defaultdict(list)
        for one in self._fleet:
            if one.update.drafts and one.gate_open and not one.update.relayed:
                found[one.process].append(one)
        return found

    def _seen(
        self, processes: Mapping[str, Sequence[Engine]]
    ) -> tuple[dict[str, set[str]], _RunningAnswers]:
        """Questions by process, and who answers them on any."""
        asked: dict[str, set[str]] = {name: set() for name in processes}
        process = {one.name: name for name, engines in processes.items() for one in engines}
        answers = _RunningAnswers()
        for turn in self._turns():
            if turn.leg is None or not (question := self._question(turn)):
                continue
            answers.turns[question].append(turn)
            if (name := process.get(turn.leg.engine)) is not None:
                asked[name].add(question)
        return asked, answers

    def _is_due(self, name: str, wanted: Corpus) -> bool:
        sent = self._sent.get(name)
        if sent is None:
            return bool(wanted.texts)
        old = self._clock() - sent.at >= FRESH_SECONDS and bool(wanted.texts)
        return old or is_due(wanted, sent.corpus)

    async def _renew(self, name: str, engine: Engine, wanted: Corpus) -> None:
        if await self._send(Target.of(engine.update), [text.tolist() for text in wanted.texts]):
            self._sent[name] = _Sent(wanted, self._clock())
            metrics.DRAFT_CORPORA.labels("sent").inc()
        else:
            self._sent.pop(name, None)
            metrics.DRAFT_CORPORA.labels("refused").inc()
            LOG.info("engine %s took no drafts; it is asked again", name)
