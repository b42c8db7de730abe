"""A small world for the router under virtual time: engines without sockets, and their owners.

The engines' next token is a hash of the whole prefix and of the version (``rose_engines.fake``), so
a lost, doubled or wrongly labelled token is a different token, and ``judge`` finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from rose_core.adapters import run_of
from rose_core.rollouts.transcripts.spans import covers
from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_core.wire.routing import AdapterVersion, EngineKind, EngineUpdate
from rose_engines.fake.model import Prefix, continuation
from rose_router.config import Settings
from rose_router.engines.engine_client import LegBody, Take, Target
from rose_router.errors import EngineRefused, LegLost
from rose_router.turns.request import TurnRequest
from rose_router.turns.service import Service
from rose_router.turns.turn import Turn, TurnState

LEASE = "team/grpo"
V = "run@1.{}".format


@dataclass
class Run:
    """One request inside a simulated engine."""

    prefix: Prefix
    most: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    shown: int = 0

    def step(self, version: str) -> None:
        token, logprob = self.prefix.next_token(version)
        self.prefix.append(token)
        self.ids.append(token)
        self.logprobs.append(logprob)
        last = self.spans[-1] if self.spans else None
        if last and last[0] == version:
            self.spans[-1] = (version, last[1], len(self.ids))
        else:
            self.spans.append((version, len(self.ids) - 1, len(self.ids)))
        if len(self.ids) >= self.most:
            self.finish = {"type": "length", "length": self.most}


@dataclass
class SimEngine:
    """An engine that can be frozen, killed and given new weights between two tokens.

    Attributes:
        spans_always: versions in every event, as our plugin makes SGLang say them.
        incremental: events hold only what is new.
        reuses_kv: it may begin a leg on keys of older weights.
        stop_at: tokens after which it finishes with a stop token; 0 = never.
        dies_of: a token in the prompt that ends its process as it is prefilled; -1 = none.
        fails_at: a token in the prompt that it answers with an error of its own; -1 = none.
        linger: seconds for which the connection stays open after the last event.
        seen: every request it was sent.
        refuses: parameters that it answers with an error, and says so beforehand.
        meta: what it says of a prompt.
        adapters: run -> version that it holds of it; requests say which they mean, as on engines
            with adapters of several runs.
    """

    name: str
    kind: EngineKind = EngineKind.BORROWED
    version: str = V(0)
    cap: int = 4
    gate_open: bool = True
    leaving: bool = False
    frozen: bool = False
    alive: bool = True
    token_seconds: float = 0.05
    spans_always: bool = True
    incremental: bool = False
    reuses_kv: bool = False
    stop_at: int = 0
    vocabulary: int = 0
    dies_of: int = -1
    fails_at: int = -1
    linger: float = 0.0
    seen: list[Mapping[str, Any]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    tokens_made: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(
        default_factory=lambda: {"prompt_tokens": 0, "cached_tokens": 0}
    )

    def version_for(self, body: Mapping[str, Any]) -> str:
        """What computes this request now."""
        return self.adapters[run_of(body["extra_key"])] if self.adapters else self.version

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse a request, or fail at it, before its first token."""
        if named := sorted({*self.refuses} & {*body, *body["sampling_params"]}):
            raise EngineRefused(f"{named[0]}: not here")
        if self.fails_at in body["input_ids"]:
            raise LegLost("HTTP 500", refused=True, doubtful=True)

    def update(self, head: str = "") -> EngineUpdate:
        return EngineUpdate(
            engine=self.name,
            kind=self.kind,
            lease=LEASE,
            url=f"sim://{self.name}",
            gate_open=self.gate_open,
            cap=self.cap,
            version=self.version,
            digest="d",
            head=head,
            reuses_kv=self.reuses_kv,
            vocabulary=self.vocabulary,
            leaving=self.leaving,
            refuses=self.refuses,
            adapters=tuple(AdapterVersion(run, own, "d") for run, own in self.adapters.items()),
        )

    async def stay(self) -> None:
        """Stay on a connection behind the last event; who dies meanwhile resets it."""
        await asyncio.sleep(self.linger)
        if self.linger and not self.alive:
            raise LegLost("connection reset")

    def event(self, run: Run) -> StreamEvent:
        count = len(run.ids)
        start = run.shown if self.incremental else 0
        run.shown = count
        finished = run.finish is not None
        return StreamEvent(
            ids=run.ids[start:],
            count=count,
            per_token={
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(run.logprobs[start:], run.ids[start:], strict=True)
                ]
            },
            text="".join(map(chr, run.ids[start:])),
            finish=run.finish,
            spans=list(run.spans) if finished or self.spans_always else None,
            label=self.version,
            meta={**self.meta, "completion_tokens": count},
        )


class SimClient:
    """``EngineClient`` over simulated engines."""

    def __init__(self, engines: dict[str, SimEngine]) -> None:
        self._engines = engines

    async def stream(self, target: Target, body: LegBody, take: Take) -> None:
        asked = msgspec.json.decode(body) if isinstance(body, bytes) else body
        async with contextlib.aclosing(self._events(target, asked)) as events:
            async for event in events:
                if not take([event]):
                    return

    async def _events(
        self, target: Target, body: Mapping[str, Any]
    ) -> AsyncGenerator[StreamEvent, None]:
        engine = self._engines[target.url.removeprefix("sim://")]
        if not engine.alive:
            raise LegLost("connection refused", unsent=True)
        engine.seen.append(body)
        engine.check(body)
        run = Run(Prefix(body["input_ids"]), body["sampling_params"]["max_new_tokens"])
        assert body["rid"] not in engine.runs
        engine.runs[body["rid"]] = run
        if engine.adapters and run_of(body["extra_key"]) not in engine.adapters:
            run.finish = {"type": "abort", "message": "no such adapter", "status_code": 503}
            yield engine.event(run)
            return
        while run.finish is None:
            await asyncio.sleep(engine.token_seconds)
            if engine.dies_of in body["input_ids"]:
                engine.alive = False
            if not engine.alive:
                raise LegLost("connection reset")
            if engine.frozen:
                continue
            if run.finish is None:
                run.step(engine.version_for(body))
                engine.tokens_made += 1
                if len(run.ids) == engine.stop_at:
                    run.finish = {"type": "stop", "matched": run.ids[-1]}
            yield engine.event(run)
        await engine.stay()

    async def abort(self, target: Target, rid: str) -> bool:
        engine = self._engines[target.url.removeprefix("sim://")]
        if not engine.alive:
            return True
        if engine.frozen:
            await asyncio.sleep(2)
            return False
        engine.aborted.append(rid)
        run = engine.runs.get(rid)
        if run is not None and run.finish is None:
            run.finish = {"type": "abort", "message": "Aborted"}
        return True


class World:
    """Engines, their owners, and a service that knows them."""

    def __init__(self, service: Service, engines: dict[str, SimEngine]) -> None:
        self.service = service
        self.engines = engines
        self._streams = itertools.count(1)
        self._stream_of: dict[str, int] = {}
        self._turns = itertools.count()
        self._callers: list[asyncio.Task[None]] = []

    def attach(self, *engines: SimEngine) -> None:
        for engine in engines:
            self.engines[engine.name] = engine
            self._stream_of[engine.name] = next(self._streams)
            self.update_engine(engine)

    def update_engine(self, engine: SimEngine, head: str = "") -> None:
        self.service.fleet.apply(engine.update(head), self._stream_of[engine.name])

    def detach(self, engine: SimEngine) -> None:
        self.service.fleet.detach(self._stream_of[engine.name])

    def gate(self, engine: SimEngine, *, is_open: bool) -> None:
        """As the guard does: the engine stops with its gate, the router is told."""
        engine.frozen, engine.gate_open = not is_open, is_open
        self.update_engine(engine)

    def kill(self, engine: SimEngine) -> None:
        engine.alive, engine.gate_open, engine.version = False, False, ""
        engine.runs.clear()
        self.update_engine(engine)

    def revive(self, engine: SimEngine, version: str) -> None:
        engine.alive, engine.frozen, engine.gate_open, engine.version = True, False, True, version
        self.update_engine(engine)

    def commit(self, engine: SimEngine, version: str) -> None:
        engine.version = version
        self.update_engine(engine)

    def ask(self, most: int = 20, *, prompt: tuple[int, ...] = (), **fields: Any) -> Turn:  # noqa: ANN401  # of TurnRequest
        number, interval = next(self._turns), fields.pop("interval", 1)
        request = TurnRequest(
            rid=fields.pop("rid", f"turn-{number}"),
            prompt=prompt or (number % 200, 7, 9),
            sampling={"max_new_tokens": most, **fields.pop("sampling", {})},
            passed={"return_logprob": True},
            **fields,
        )
        # Every second one runs in its caller's task, which nobody may notice.
        turn = self.service.submit(request, interval=interval, alone=number % 2 == 1)
        if turn.task is None:
            self._callers.append(asyncio.create_task(self.service.until_ended(turn)))
        return turn


async def until(condition: Callable[[], bool]) -> None:
    """Let time pass until something holds."""
    while not condition():  # noqa: ASYNC110  # anything may change it
        await asyncio.sleep(0.01)


async def over(turn: Turn) -> Turn:
    """Wait until the turn has ended, and all that follows from it is done."""
    await turn.ended_event.wait()
    return turn


def judge(turn: Turn) -> None:
    """Every token is what the version of its span makes of the prefix, and has its log-prob."""
    held = turn.transcript
    assert covers(held.spans, len(held.tokens))
    entries = held.per_token.get("output_token_logprobs", [])
    assert [entry[1] for entry in entries] == held.tokens
    prefix = Prefix(held.prompt)
    for span in held.spans:
        for index in range(span.start, span.end):
            token, logprob = prefix.next_token(span.version)
            assert (token, logprob) == (held.tokens[index], entries[index][0]), (index, span)
            prefix.append(token)


def judge_whole(turn: Turn) -> None:
    """The turn is done, has all its tokens, and each of them is right."""
    assert turn.state is TurnState.DONE, turn.error
    assert turn.finish == {"type": "length", "length": turn.request.most_tokens}
    assert len(turn.transcript.tokens) == turn.request.most_tokens
    judge(turn)


@contextlib.asynccontextmanager
async def world(*engines: SimEngine, **settings: Any) -> AsyncIterator[World]:  # noqa: ANN401  # of Settings
    """A running service with these engines attached."""
    known: dict[str, SimEngine] = {}
    loop = asyncio.get_running_loop()
    rids = (f"{number:032x}" for number in itertools.count())
    service = Service(
        Settings(lease=LEASE, **settings),
        SimClient(known),
        clock=loop.time,
        new_rid=lambda: next(rids),
    )
    made = World(service, known)
    made.attach(*engines)
    await service.start()
    try:
        yield made
    finally:
        await service.close()


def two(**fields: object) -> tuple[SimEngine, SimEngine]:
    first = SimEngine("a", **fields)  # type: ignore[arg-type]
    return first, replace(first, name="b", seen=[], runs={}, aborted=[])


async def started(turn: Turn, tokens: int = 5) -> None:
    await until(lambda: turn.leg is not None and len(turn.leg.ids) >= tokens)


def where(w: World, turn: Turn) -> SimEngine:
    assert turn.leg is not None
    return w.engines[turn.leg.engine]


def greedy(turn: Turn, version: str = V(0)) -> list[int]:
    return continuation(turn.request.prompt, turn.request.most_tokens, version)
