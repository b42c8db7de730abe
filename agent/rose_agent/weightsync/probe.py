"""The fixed-prompt probe: after each commit, ask the engine and compare its answer.

A task per commit asks the engine over its own HTTP server, while its permit is open, tells the
store the answer with the attestation, and judges it by the answers of others at the same version
(``rose_core.delta.probe``). It compares again every minute, because the others may come later.
The follower asks for the complaint and takes an engine that computes wrong out of use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rose_agent.weightsync import metrics
from rose_agent.weightsync.plugin import Gate
from rose_core.delta.probe import LIMIT, PROMPT, Answer, ProbeOutcome, ProbeVerdict, judge
from rose_core.identity import WeightVersion
from rose_engines.errors import EngineError, EngineRefused, EngineUnavailable
from rose_engines.node.rundir import EngineFile, SlotDir, read_json
from rose_engines.process.client import TurnClient
from rose_weights.errors import WeightsError
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import WireError

_log = logging.getLogger(__name__)

# Open time that one answer may take.
_ANSWER_SECONDS = 30.0
_AGAIN_SECONDS = 60.0
_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class ProbedCommit:
    """What is probed: a version as one commit of this process brought it.

    Attributes:
        commit: counts commits, so that the same version is probed again when it came again.
    """

    version: WeightVersion
    digest: str
    commit: int


class TruthMeter:
    """Probes one engine process.

    Args:
        slot: where the engine's address is.
        gate: whether it may compute.
        on_complaint: called when there is something to complain about.
        limit: largest mean difference that is none; 0 = no probes.
        run: whose adapter is asked, where the engine holds those of several.
    """

    def __init__(
        self,
        slot: SlotDir,
        gate: Gate,
        on_complaint: Callable[[], None],
        limit: float = LIMIT,
        *,
        run: str = "",
    ) -> None:
        self._run = run
        self._label = f"{slot.uid}/{run}" if run else slot.uid
        self._slot = slot
        self._gate = gate
        self._on_complaint = on_complaint
        self._limit = limit
        self._subject: ProbedCommit | None = None
        self._complaint = ""
        self._task: asyncio.Task[None] | None = None

    def follow(self, store: WeightsClient, subject: ProbedCommit | None) -> None:
        """Probe this from now on; None = nothing that is served."""
        if subject == self._subject or not self._limit:
            return
        self._end()
        self._subject, self._complaint = subject, ""
        if subject is not None:
            self._task = asyncio.create_task(self._probe(store, subject))

    def complaint(self) -> str:
        """Why the engine must not be used, once; empty when there is no reason."""
        complaint, self._complaint = self._complaint, ""
        return complaint

    async def close(self) -> None:
        """End the probe."""
        task = self._task
        self._end()
        if task is not None:
            await asyncio.wait({task})
        with contextlib.suppress(KeyError):  # an engine that is gone differs from nobody
            metrics.PROBE_DIFFERENCE.remove(self._label)

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _probe(self, store: WeightsClient, subject: ProbedCommit) -> None:
        answer: Answer = ()
        while True:
            try:
                answer = answer or await self._ask(str(subject.version))
                compared = await store.compare(subject.version, subject.digest, answer)
            except (EngineError, WeightsError, WireError) as error:
                _log.debug("%s: %s was not probed: %s", self._slot.uid, subject.version, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if self._is_settled(
                subject, judge(answer, compared.trainer, compared.others, self._limit)
            ):
                return
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _ask(self, version: str) -> Answer:
        record = read_json(self._slot.engine, EngineFile)
        if record is None or not record.url:
            raise EngineUnavailable("the engine's address is not known")
        async with TurnClient(record.url) as engine:
            await self._gate.wait_open()
            asked = engine.prompt_logprobs(PROMPT, version if self._run else "")
            by, answer = await self._gate.patiently(asked, _ANSWER_SECONDS)
        if by != version:
            raise EngineRefused(f"it answered with {by}, {version} was asked for")
        return answer

    def _is_settled(self, subject: ProbedCommit, verdict: ProbeVerdict) -> bool:
        """Whether it is settled."""
        metrics.PROBES.labels(outcome=verdict.outcome).inc()
        if verdict.difference is not None:
            metrics.PROBE_DIFFERENCE.labels(slot=self._label).set(verdict.difference)
        if verdict.outcome is ProbeOutcome.DISPUTED:
            _log.warning(
                "%s: engines disagree about %s: %s", self._slot.uid, subject.version, verdict
            )
        if verdict.outcome is not ProbeOutcome.WRONG:
            return False
        self._complaint = (
            f"log-probs of the fixed prompt at {subject.version} are {verdict.difference:.3g} nats "
            f"off on average, compared with {verdict.against}; {self._limit} are allowed"
        )
        self._on_complaint()
        return True
