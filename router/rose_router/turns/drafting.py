"""Sends engines the tokens that they draft from, and learns how well they do.

What an engine drafts from is ``rose_core.rollouts.drafts``'; this keeps answers, looks every
``LOOK_SECONDS`` at which questions each engine answers, and sends a corpus where another is due.
An engine that was sent one ``FRESH_SECONDS`` ago gets it again: its process may be another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rose_core.rollouts.drafts import CONTEXT, Corpus, Questions, decide, is_due
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
        self._sent: dict[str, _Sent] = {}

    def begin_turn(self, turn: Turn) -> None:
        """Note what a trajectory is about: its first prompt, which its siblings share."""
        if not self._fleet.bounds().drafts:
            return
        name = turn.request.trajectory
        if name in self._asked:
            self._asked.move_to_end(name)
            return
        ids = array("i", turn.request.prompt).tobytes()
        self._asked[name] = hashlib.blake2b(ids, digest_size=16).hexdigest()
        while len(self._asked) > _MOST_TRAJECTORIES:
            self._asked.popitem(last=False)

    def end_turn(self, turn: Turn) -> None:
        """Keep its answer, and what drafts were worth."""
        question = self._asked.get(turn.request.trajectory)
        if question is None:
            return
        for leg in turn.transcript.legs:
            steps = leg.meta.get("spec_verify_ct") if leg.meta else None
            if isinstance(steps, int) and steps > 0:
                drafted = max(0, len(leg.ids) - 1)  # the first token is the prefill's
                self._questions.note_steps(question, drafted, steps)
                metrics.DRAFTS.labels("accepted").inc(max(0, drafted - steps))
                metrics.DRAFTS.labels("steps").inc(steps)
        self._questions.note_answer(question, turn.request.prompt, turn.transcript.tokens)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Send what is due now."""
        drafting = self._drafting()
        self._sent = {name: one for name, one in self._sent.items() if name in drafting}
        if drafting:
            asked, running = self._seen()
            due = [
                (engine, wanted)
                for name, engine in drafting.items()
                if self._is_due(name, wanted := self._wanted(asked[name], running))
            ]
            await asyncio.gather(*(self._renew(*one) for one in due))

    def _drafting(self) -> dict[str, Engine]:
        return {one.name: one for one in self._fleet if one.update.drafts and one.gate_open}

    def _seen(self) -> tuple[dict[str, set[str]], dict[str, list[tuple[int, ...]]]]:
        """Questions by engine, and what unfinished answers have said so far."""
        asked: dict[str, set[str]] = defaultdict(set)
        running: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for turn in self._turns():
            question = self._asked.get(turn.request.trajectory)
            if question is None or turn.leg is None:
                continue
            asked[turn.leg.engine].add(question)
            said = turn.shown().tokens
            if len(said) >= _LEAST_RUNNING:
                running[question].append((*turn.request.prompt[-CONTEXT:], *said))
        return asked, running

    def _wanted(self, asked: set[str], running: dict[str, list[tuple[int, ...]]]) -> Corpus:
        return decide(asked, self._questions.known, running)

    def _is_due(self, name: str, wanted: Corpus) -> bool:
        sent = self._sent.get(name)
        if sent is None:
            return bool(wanted.texts)
        old = self._clock() - sent.at >= FRESH_SECONDS and bool(wanted.texts)
        return old or is_due(wanted, sent.corpus)

    async def _renew(self, engine: Engine, wanted: Corpus) -> None:
        if await self._send(Target.of(engine.update), wanted.texts):
            self._sent[engine.name] = _Sent(wanted, self._clock())
            metrics.DRAFT_CORPORA.labels("sent").inc()
        else:
            self._sent.pop(engine.name, None)
            metrics.DRAFT_CORPORA.labels("refused").inc()
            LOG.info("engine %s took no drafts; it is asked again", engine.name)
