"""Spans of routers as the demo keeps them, and the one trajectory that its report shows. Pure.

``span_receiver`` takes them as an OTLP collector does; ``waterfall`` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

TRAJECTORY, REWARD, MOVE, SYNC = "rl.sample", "rl.reward", "rose.move", "rl.sync"


class SpanEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened inside a span."""

    name: str
    at_s: float
    attributes: dict[str, Any] = {}


class SpanRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One span.

    Attributes:
        trace, span, parent: ids in hex; without a parent it is empty.
        began_s, ended_s: seconds since the epoch, in a recording since its start.
    """

    trace: str
    span: str
    name: str
    began_s: float
    ended_s: float
    parent: str = ""
    attributes: dict[str, Any] = {}
    events: tuple[SpanEvent, ...] = ()


def read(request: ExportTraceServiceRequest) -> list[SpanRecord]:
    """The spans of an export."""
    return [
        SpanRecord(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.name,
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            span.parent_span_id.hex(),
            _values(span.attributes),
            tuple(
                SpanEvent(one.name, one.time_unix_nano / 1e9, _values(one.attributes))
                for one in span.events
            ),
        )
        for of_resource in request.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: _plain(one.value) for one in attributes}


def _plain(value: AnyValue) -> Any:  # noqa: ANN401  # of any kind
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def most_eventful(spans: Iterable[SpanRecord]) -> tuple[SpanRecord, ...]:
    """The spans of the trajectory that shows most: whole, moved, with commits, a reward, turns.

    Returns:
        In order of beginning; empty where no trajectory has ended.
    """
    traces: dict[str, list[SpanRecord]] = {}
    for one in spans:
        traces.setdefault(one.trace, []).append(one)
    whole = [found for found in traces.values() if any(one.name == TRAJECTORY for one in found)]
    best = max(whole, key=_worth, default=[])
    return tuple(sorted(best, key=lambda one: (one.began_s, -one.ended_s)))


def _worth(spans: Sequence[SpanRecord]) -> tuple[bool, bool, bool, int]:
    events = {event.name for one in spans for event in one.events}
    rewarded = any(one.name == REWARD for one in spans)
    return MOVE in events, rewarded, SYNC in events, len(spans)


def since(spans: Iterable[SpanRecord], origin_s: float) -> tuple[SpanRecord, ...]:
    """The same spans on a clock that begins at ``origin_s`` of the epoch."""
    return tuple(
        msgspec.structs.replace(
            one,
            began_s=one.began_s - origin_s,
            ended_s=one.ended_s - origin_s,
            events=tuple(
                msgspec.structs.replace(event, at_s=event.at_s - origin_s) for event in one.events
            ),
        )
        for one in spans
    )
