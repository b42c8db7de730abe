"""Which receivers serve which version, by their own attestation: what ``wait(quorum=...)`` asks.

With it comes what they computed for the fixed prompt, to be compared (``rose_core.delta.probe``).
Held in memory: receivers say it again every minute, so after a restart of the store the picture is
complete soon. Who has not said anything for ``REPORT_SECONDS`` is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_core.delta import quorum
from rose_core.delta.probe import PROMPT, Answer
from rose_core.identity import WeightVersion
from rose_weights.messages import AttestedReply, AttestedRequest, AwaitReply, AwaitRequest
from rose_weights.store.store import Store

REPORT_SECONDS = 180.0
"""Three reports of a receiver may be lost before it no longer counts."""

ANSWERED_VERSIONS = 64
"""Versions whose answers to the fixed prompt are remembered."""

LONGEST_SECONDS = 30.0
"""A caller that waits longer asks again."""


@dataclass
class _Said:
    """Answers to the fixed prompt at one version; whoever may only read is never the trainer."""

    trainer: Answer = ()
    engines: dict[str, Answer] = field(default_factory=dict)


class Attestations:
    """Attestations of all runs of one store.

    Args:
        store: what digests attestations are compared with.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[float, WeightVersion]] = {}
        self._answers: dict[WeightVersion, _Said] = {}
        self._moved = asyncio.Event()

    async def record(self, request: AttestedRequest) -> AttestedReply:
        """Note what a receiver serves, if it is what was published."""
        state = await asyncio.to_thread(self._store.state, request.version.run)
        kept = state.kept(request.version)
        if kept is None or kept.digest != request.digest:
            return AttestedReply(known=False)
        reply = self._answered(request)
        if request.trainer:
            return reply
        self._held[request.version.run, request.holder] = (self._clock(), request.version)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        return reply

    def _answered(self, request: AttestedRequest) -> AttestedReply:
        """Remember an answer to the fixed prompt; say what others answered."""
        said = self._answers.get(request.version, _Said())
        if request.answer:
            said = self._answers.setdefault(request.version, said)
            self._remember(said, request)
        others = (answer for by, answer in said.engines.items() if by != request.holder)
        return AttestedReply(True, said.trainer, tuple(others))

    def _remember(self, said: _Said, request: AttestedRequest) -> None:
        answer = request.answer[: len(PROMPT)]
        if request.trainer:
            said.trainer = answer
        else:
            said.engines[request.holder] = answer
        while len(self._answers) > ANSWERED_VERSIONS:
            del self._answers[next(iter(self._answers))]

    async def reached(self, request: AwaitRequest) -> AwaitReply:
        """Answer when the quorum is met, or when time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.seconds, LONGEST_SECONDS)
        while True:
            moved = self._moved
            found = quorum.reach(request.version, self._of(request.version.run))
            met = found.meets(request.quorum)
            left = deadline - loop.time()
            if met or left <= 0:
                return AwaitReply(met, found.serving, found.behind)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await moved.wait()

    def _of(self, run: str) -> dict[str, WeightVersion]:
        oldest = self._clock() - REPORT_SECONDS
        self._held = {key: value for key, value in self._held.items() if value[0] > oldest}
        return {holder: version for (of, holder), (_, version) in self._held.items() if of == run}
