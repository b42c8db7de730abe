"""Trajectories as OpenTelemetry traces; imported only by a router that exports them.

    rl.sample (the trajectory)             from its first turn to its end; ids follow from its name
      chat MODEL (a turn)                  gen_ai.*; events: rose.move, rl.sync (a commit inside it)
        generate ENGINE (a leg)            its engine gets the ``traceparent`` of this span
      rose.checkpoint                      its sandbox's host saves the world while a turn runs
      rose.sandbox ready, ended            and hears of the turn's and the session's end
      rl.reward                            when the trainer says what it was worth

A caller that sends a ``traceparent`` has its turns in its own trace, and no ``rl.sample`` is made.
Ids of other traces follow from lease and trajectory, so that turns that another replica ran, or
this one after a restart, stand in the same trace, and nothing has to be remembered for it.

Names are those of the conventions for generative AI (``gen_ai.*``), of the proposal for
reinforcement learning (``rl.*``) and, for what neither knows, ``rose.*``.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rose_core.rollouts.transcripts.transcript import Leg
from rose_router.turns.turn import Turn, TurnMove, TurnState

MOST_TRAJECTORIES = 4096
"""Remembered until their ends; of one that is forgotten the trace lacks its first span's end."""

_PROPAGATOR = TraceContextTextMapPropagator()


class _Ids(RandomIdGenerator):
    """Random ids, except for the next span where they are given."""

    given: SpanContext | None = None

    def generate_trace_id(self) -> int:
        """Of the next span without a parent."""
        return super().generate_trace_id() if self.given is None else self.given.trace_id

    def generate_span_id(self) -> int:
        """Give the next span the identity set for it, else a random one."""
        return super().generate_span_id() if self.given is None else self.given.span_id


@dataclass
class _Trajectory:
    """What is remembered of a trajectory until its end.

    Attributes:
        parent: of its spans.
        own: the parent is ours: nobody else makes that span.
    """

    parent: Context
    own: bool
    group: str
    began_ns: int
    ended_ns: int
    turns: int = 0
    tokens: int = 0


class Tracing:
    """Makes and exports the spans of one router.

    Args:
        lease: ``namespace/name``.
        model: its name.
        exporter: where spans go.
    """

    def __init__(self, lease: str, model: str, exporter: SpanExporter) -> None:
        self._lease, self._model = lease, model
        self._ids = _Ids()
        named = {"service.name": "rose-router", "rose.lease": lease}
        resource = Resource.create(named)
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rose_router")
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()

    def begin_turn(self, turn: Turn) -> None:
        """A turn has been taken."""
        request = turn.request
        found = self._trajectory(request.trajectory, request.hint.group, request.traceparent)
        found.turns += 1
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "rose",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": request.most_tokens,
            "gen_ai.conversation.id": request.trajectory,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "rl.trajectory.id": request.trajectory,
            "rl.turn.number": request.hint.turn or found.turns,
        }
        if request.hint.group:
            attributes["rl.group.id"] = request.hint.group
        span = self._tracer.start_span(
            f"{request.operation} {self._model}",
            found.parent,
            SpanKind.SERVER,
            attributes=attributes,
        )
        turn.trace = TurnSpans(self, span)

    def end_turn(self, turn: Turn) -> None:
        """Its last token is held, or none will come."""
        known = self._trajectories.get(turn.request.trajectory)
        if known is not None:
            known.ended_ns, known.tokens = time.time_ns(), known.tokens + turn.held

    def begin_step(self, trajectory: str, step: str) -> Span:
        """The host of its sandbox is told a step; at a ``turn`` it saves what the world is."""
        known = self._trajectories.get(trajectory)
        parent = self._context(trajectory) if known is None else known.parent
        attributes = {"rl.trajectory.id": trajectory, "rose.sandbox.step": step}
        name = "rose.checkpoint" if step == "turn" else f"rose.sandbox {step}"
        return self._tracer.start_span(name, parent, SpanKind.CLIENT, attributes=attributes)

    def reward(self, trajectory: str, value: float) -> None:
        """The trainer says what a trajectory was worth."""
        known = self._trajectories.get(trajectory)
        parent = self._context(trajectory) if known is None else known.parent
        attributes: dict[str, str | float] = {
            "rl.trajectory.id": trajectory,
            "rl.reward.value": value,
        }
        self._tracer.start_span("rl.reward", parent, attributes=attributes).end()

    def end_trajectory(self, trajectory: str, outcome: str = "") -> None:
        """No further turn of it comes.

        Args:
            trajectory: its name.
            outcome: ``trained``, ``dropped`` or ``withdrawn``; empty = nobody has said.
        """
        known = self._trajectories.pop(trajectory, None)
        if known is None or not known.own:
            return
        attributes: dict[str, str | int] = {
            "rl.trajectory.id": trajectory,
            "rl.trajectory.turns": known.turns,
            "gen_ai.usage.output_tokens": known.tokens,
        }
        if known.group:
            attributes["rl.group.id"] = known.group
        if outcome:
            attributes["rl.trajectory.outcome"] = outcome
        self._ids.given = self._own(trajectory)
        try:
            span = self._tracer.start_span(
                "rl.sample", Context(), attributes=attributes, start_time=known.began_ns
            )
        finally:
            self._ids.given = None
        span.end(max(known.ended_ns, known.began_ns))

    def close(self) -> None:
        """Export what is left; takes as long as the collector does, ten seconds at most."""
        for trajectory in list(self._trajectories):
            self.end_trajectory(trajectory)
        self._provider.shutdown()

    def begin_leg(self, parent: Span, leg: Leg, number: int) -> Span:
        """A request goes to an engine."""
        attributes: dict[str, str | int] = {
            "rose.engine.name": leg.engine,
            "rose.engine.kind": str(leg.kind),
            "rose.leg.number": number,
            "rose.leg.id": leg.rid,
            "rl.policy.version": leg.version,
        }
        context = set_span_in_context(parent)
        name = f"generate {leg.engine}"
        return self._tracer.start_span(name, context, SpanKind.CLIENT, attributes=attributes)

    def _trajectory(self, name: str, group: str, traceparent: str) -> _Trajectory:
        known = self._trajectories.get(name)
        if known is None:
            given = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
            parent = given or self._context(name)
            now = time.time_ns()
            known = _Trajectory(parent, not given, group, now, now)
            while len(self._trajectories) >= MOST_TRAJECTORIES:
                self.end_trajectory(next(iter(self._trajectories)))
            self._trajectories[name] = known
        elif traceparent:
            given = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
            # ``own`` stays as it is: turns before this one are below our span.
            known.parent = given or known.parent
        return known

    def _context(self, trajectory: str) -> Context:
        return set_span_in_context(NonRecordingSpan(self._own(trajectory)), Context())

    def _own(self, trajectory: str) -> SpanContext:
        """The trajectory's span; the same wherever it is asked for."""
        named = f"{self._lease}\n{trajectory}".encode()
        digest = hashlib.blake2b(named, digest_size=24).digest()
        trace, span = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class TurnSpans:
    """The spans of one turn (``turn.TurnTrace``).

    Args:
        tracing: makes them.
        span: the turn's.
    """

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        self._leg: Span | None = None
        self._legs = 0
        self._version = ""

    @property
    def traceparent(self) -> str:
        """Of the leg that runs, else of the turn: whoever gets it makes spans below."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._leg or self._span))
        return carrier.get("traceparent", "")

    def begin_leg(self, leg: Leg) -> None:
        """A request goes to an engine."""
        self._legs += 1
        self._leg = self._tracing.begin_leg(self._span, leg, self._legs)

    def see_version(self, version: str) -> None:
        """Tokens have come that this version sampled."""
        if self._version and version != self._version:
            self._span.add_event("rl.sync", {"rl.policy.version": version})
        self._version = version

    def end_leg(self, leg: Leg) -> None:
        """It has ended, by itself or not."""
        if self._leg is not None:
            self._leg.set_attribute("gen_ai.usage.output_tokens", leg.placed)
            self._leg.set_attribute("rose.leg.whole", leg.complete)
            self._leg.end()
            self._leg = None

    def move(self, move: TurnMove) -> None:
        """The turn has left an engine."""
        attributes: Mapping[str, str | int] = {
            "rose.move.reason": str(move.reason),
            "rose.engine.name": move.engine,
            "rose.move.at_token": move.at_token,
        }
        self._span.add_event("rose.move", attributes)

    def end(self, turn: Turn) -> None:
        """The turn has ended."""
        span, finish = self._span, str((turn.finish or {}).get("type", "error"))
        span.set_attribute("gen_ai.usage.output_tokens", turn.held)
        span.set_attribute("gen_ai.response.id", turn.request.rid)
        span.set_attribute("gen_ai.response.finish_reasons", [finish])
        span.set_attribute("rose.queue_seconds", turn.queue_seconds)
        span.set_attribute("rose.moves", len(turn.moves))
        versions = list(dict.fromkeys(one.version for one in turn.transcript.spans))
        span.set_attribute("rl.policy.versions", versions)
        if turn.state is TurnState.FAILED:
            span.set_status(Status(StatusCode.ERROR, str(turn.error)))
        span.end()
        self._tracing.end_turn(turn)


def exporting(lease: str, model: str, endpoint: str) -> Tracing:
    """Traces that go to an OTLP receiver over gRPC.

    Args:
        lease: ``namespace/name``.
        model: its name.
        endpoint: ``http://host:port``, or ``https``; OpenTelemetry's own variables say the rest
            (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_TRACES_SAMPLER``, ...).
    """
    return Tracing(lease, model, OTLPSpanExporter(endpoint))
