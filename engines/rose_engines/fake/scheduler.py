"""The fake's engine loop: continuous batching, permit, iteration boundaries, version spans.

One iteration gives every running request one token, as a real engine's decode step does. Between
iterations the loop waits for its permit, carries out a pending commit and admits queued requests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose_engines.fake.model import Prefix
from rose_engines.weights.adapters import AdapterSlots
from rose_engines.weights.session import WeightSession


class Script(Protocol):
    """What an engine says whatever its weights are."""

    def next_token(self, context: Sequence[int]) -> int:
        """The token after a context; ``END`` of ``server`` ends the answer."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Text of an answer."""
        ...


# How often a stopped engine looks at its permit.
PERMIT_POLL_SECONDS = 0.002


@dataclass
class FakeRequest:
    """One request inside the engine; ``changed`` is set after every token and at the end.

    Attributes:
        finish: SGLang's finish reason, None while running.
        spans: (version, first token, end) in order.
        wants_prompt_logprobs: log-probs of the prompt's tokens are asked for too.
        wants_experts: experts of all tokens are asked for.
        script: what it is answered with; ``None`` = the fake model's own tokens.
        slot: whose adapter it is computed with, where the engine holds several.
    """

    rid: str
    prompt: list[int]
    most: int
    stop_tokens: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict[str, object] | None = None
    wants_prompt_logprobs: bool = False
    wants_experts: bool = False
    script: Script | None = None
    slot: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._prefix = Prefix(self.prompt)
        if self.most <= 0:
            self.end({"type": "length", "length": 0})

    def step(self, version: str) -> None:
        """Generate one token with the weights labelled ``version``."""
        token, logprob = self._prefix.next_token(version)
        if self.script is not None:
            token = self.script.next_token([*self.prompt, *self.output])
        self._prefix.append(token)
        self.output.append(token)
        self.logprobs.append(logprob)
        self._extend_span(version)
        if token in self.stop_tokens:
            self.end({"type": "stop", "matched": token})
        elif len(self.output) >= self.most:
            self.end({"type": "length", "length": len(self.output)})
        self.changed.set()

    def end(self, finish: dict[str, object]) -> None:
        """Finish for this reason, once."""
        self.finish = self.finish or finish
        self.changed.set()

    def _extend_span(self, version: str) -> None:
        count = len(self.output)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], count)
        else:
            self.spans.append((version, count - 1, count))


@dataclass
class Counters:
    """What ``/metrics`` and ``/v1/loads`` tell.

    Attributes:
        arrived: HTTP requests to the generating route, from their arrival on.
        requests: requests that were queued.
        ended: requests that have been answered or given up.
    """

    arrived: int = 0
    requests: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    iterations: int = 0


class FakeScheduler:
    """The engine loop; run ``run()`` as a task.

    Args:
        session: weights and label.
        permit_open: whether the engine may compute now; always true without a permit.
        token_seconds: time of one iteration, whatever its batch.
        prefill_token_seconds: added to the iteration in which a request starts, per prompt token.
        max_running: requests in one batch; others queue.
        broadcast: takes the other ranks past the boundary too.
        script: what every request is answered with; ``None`` = the fake model's own tokens.
        slots: adapters of several runs, of which ``session`` is the first.
    """

    def __init__(
        self,
        session: WeightSession,
        permit_open: Callable[[], bool] = lambda: True,
        token_seconds: float = 0.005,
        prefill_token_seconds: float = 0.0,
        max_running: int = 8,
        *,
        broadcast: Callable[[], None] = lambda: None,
        script: Script | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:
        self.session = session
        self.slots = slots
        self._weights = slots or session
        self._broadcast = broadcast
        self.script = script
        self.counters = Counters()
        self.token_seconds = token_seconds
        self._permit_open = permit_open
        self._prefill_token_seconds = prefill_token_seconds
        self.max_running = max_running
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self._wake = asyncio.Event()
        self._names = itertools.count()

    def new_name(self) -> str:
        """A request id for callers that sent none."""
        return f"fake-{next(self._names):08d}-{time.monotonic_ns():x}"

    def version_of(self, slot: int = 0) -> str:
        """Label of the weights, or of one adapter of several."""
        return (self.slots[slot] if self.slots is not None else self.session).version

    def end_slot(self, slot: int) -> int:
        """End what is computed with one adapter; how many requests still are."""
        requests = [one for one in (*self.waiting, *self.running) if one.slot == slot]
        for request in requests:
            request.end({"type": "abort", "message": "Aborted"})
        return 0

    def submit(self, request: FakeRequest) -> None:
        """Queue a request."""
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self.waiting.append(request)
        self._wake.set()

    def wake(self) -> None:
        """Pass an iteration boundary soon, also when idle."""
        self._wake.set()

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """Finish requests whose id *starts with* ``rid``, as SGLang does."""
        for request in (*self.waiting, *self.running):
            if everything or request.rid.startswith(rid):
                self.counters.aborted += 1
                request.end({"type": "abort", "message": "Aborted"})

    async def run(self) -> None:
        """Iterate for ever."""
        while True:
            self._weights.on_rest()
            while not self._permit_open() or self._weights.broken:
                await asyncio.sleep(PERMIT_POLL_SECONDS)
                self._weights.on_rest()
            self._weights.on_boundary()
            self._broadcast()
            if self._weights.dormant:
                await asyncio.sleep(PERMIT_POLL_SECONDS)
                continue
            if not self._admit():
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self._iteration_seconds())
            self._step()

    def _admit(self) -> bool:
        """Drop what has ended, start what fits; whether anything runs."""
        self.running = [request for request in self.running if request.finish is None]
        self.waiting = [request for request in self.waiting if request.finish is None]
        room = max(0, self.max_running - len(self.running))
        self.running += self.waiting[:room]
        del self.waiting[:room]
        return bool(self.running)

    def _iteration_seconds(self) -> float:
        new = sum(len(request.prompt) for request in self.running if not request.output)
        return self.token_seconds + new * self._prefill_token_seconds

    def _step(self) -> None:
        self.counters.iterations += 1
        for request in self.running:
            if request.finish is None:
                request.step(self.version_of(request.slot))
                self.counters.generated_tokens += 1
