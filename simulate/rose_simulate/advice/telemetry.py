"""Recorded load of a pool's replicas, from rows or from an answer of Prometheus.

| column | meaning | needed |
|---|---|---|
| ``t_s`` | time of the sample, seconds | yes |
| ``replica`` | name | yes |
| ``running`` | requests under way at that moment | one of both |
| ``busy_share`` | share of the time since the last sample with a request under way | one of both |
| ``requests``, ``slow`` | finished requests since the start, and those above the SLO | no |
| ``ttft_p99_ms`` | of the requests since the last sample | no |

A Prometheus answer is that of ``/api/v1/query_range`` for one gauge, a series per replica; whether
it counts requests or is a share follows from its name. Unknown stays unknown: a missing sample is
no idle one, and neither is one that Prometheus calls NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rose_simulate.advice.errors import TelemetryError, TooLittle

RUNNING, BUSY = "running", "busy_share"
LEAST_SAMPLES = 20
_COUNTS = ("running", "num_requests", "num_running_reqs", "inflight", "in_flight")
_SHARES = ("busy", "utilization", "utilisation")
# ROSE's agents speak for the replicas of a node, so ``pod`` is then the agent's own.
_NAMES = ("replica", "pod", "instance")


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One replica at one moment.

    Attributes:
        busy: share of time with a request under way; 0 or 1 where only the moment is known.
    """

    t_s: float
    replica: str
    busy: float
    requests: float | None = None
    slow: float | None = None
    ttft_p99_ms: float | None = None


@dataclass(frozen=True)
class LoadTelemetry:
    """All samples.

    Attributes:
        moments: busy is known at moments only, not over the time between them.
        period_s: median time between two samples of a replica.
        coverage: samples there are, of those there would be without a gap.
    """

    samples: tuple[LoadSample, ...]
    replicas: tuple[str, ...]
    moments: bool
    period_s: float
    coverage: float

    @property
    def span_s(self) -> float:
        """From the first sample to the end of the last one's period."""
        return self.samples[-1].t_s - self.samples[0].t_s + self.period_s


def from_rows(rows: Iterable[tuple[int, Mapping[str, str]]], source: str) -> LoadTelemetry:
    """Read rows, each with its line in the file.

    Raises:
        TelemetryError: a column or value is missing, no number, or out of range.
        TooLittle: too few samples.
    """
    samples: list[LoadSample] = []
    moments = False
    for line, row in rows:
        place = f"{source}:{line}"
        if not row.get("replica"):
            raise TelemetryError(f"{place}: replica: is missing; every row names its replica")
        moments = moments or row.get(BUSY) in {None, ""}
        samples.append(
            LoadSample(
                _number(row, "t_s", place),
                row["replica"],
                _busy(row, place),
                _optional(row, "requests", place),
                _optional(row, "slow", place),
                _optional(row, "ttft_p99_ms", place),
            )
        )
    return _telemetry(samples, source, moments=moments)


def from_prometheus(answer: object, source: str, meaning: str = "") -> LoadTelemetry:
    """Read the answer of a range query.

    Args:
        answer: the decoded JSON.
        source: for errors.
        meaning: ``running`` or ``busy_share`` when the metric's name does not say.

    Raises:
        TelemetryError: it is no successful answer with a matrix, or its meaning is unclear.
        TooLittle: too few samples.
    """
    samples: list[LoadSample] = []
    moments = False
    for index, series in enumerate(_matrix(answer, source)):
        place = f"{source}: data.result[{index}]"
        metric = series.get("metric") or {}
        kind = meaning or _meaning(str(metric.get("__name__", "")), place)
        name = next((str(metric[key]) for key in _NAMES if key in metric), "") or str(index)
        moments = moments or kind == RUNNING
        for number, pair in enumerate(series.get("values") or ()):
            where = f"{place}.values[{number}]"
            if not isinstance(pair, list) or len(pair) != 2:
                raise TelemetryError(f"{where}: is no pair of time and value")
            if str(pair[1]) == "NaN":
                continue  # nothing was known then
            row = {"t_s": str(pair[0]), "replica": name, kind: str(pair[1])}
            samples.append(LoadSample(_number(row, "t_s", where), name, _busy(row, where)))
    return _telemetry(samples, source, moments=moments)


def _matrix(answer: object, source: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(answer, dict) or "status" not in answer:
        message = f"{source}: is no answer of Prometheus: it has no field status"
        raise TelemetryError(message)
    if answer["status"] != "success":
        message = f"{source}: Prometheus answered {answer['status']}: {answer.get('error', '')}"
        raise TelemetryError(message)
    data = answer.get("data")
    kind = data.get("resultType") if isinstance(data, dict) else None
    result = data.get("result") if isinstance(data, dict) else None
    if kind != "matrix" or not isinstance(result, list):
        message = f"{source}: data.resultType is {kind}, not matrix; use /api/v1/query_range"
        raise TelemetryError(message)
    return result


def _meaning(name: str, place: str) -> str:
    if any(word in name for word in _SHARES):
        return BUSY
    if any(word in name for word in _COUNTS):
        return RUNNING
    message = (
        f"{place}: {name or 'the expression'} does not say what it is; "
        f"add --meaning {RUNNING} (requests under way) or --meaning {BUSY} (0 to 1)"
    )
    raise TelemetryError(message)


def _busy(row: Mapping[str, str], place: str) -> float:
    if row.get(BUSY) not in {None, ""}:
        share = _number(row, BUSY, place)
        if not 0 <= share <= 1:
            raise TelemetryError(f"{place}: {BUSY}: {share:g} does not lie between 0 and 1")
        return share
    if row.get(RUNNING) in {None, ""}:
        raise TelemetryError(f"{place}: neither {RUNNING} nor {BUSY} is there")
    running = _number(row, RUNNING, place)
    if running < 0:
        raise TelemetryError(f"{place}: {RUNNING}: {running:g} is negative")
    return float(running > 0)


def _number(row: Mapping[str, str], field: str, place: str) -> float:
    text = row.get(field)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TelemetryError(f"{place}: {field}: {text!r} is no number")
    return value


def _optional(row: Mapping[str, str], field: str, place: str) -> float | None:
    return None if row.get(field) in {None, ""} else _number(row, field, place)


def _telemetry(samples: list[LoadSample], source: str, *, moments: bool) -> LoadTelemetry:
    samples.sort(key=lambda one: (one.t_s, one.replica))
    replicas = tuple(sorted({one.replica for one in samples}))
    times: dict[str, list[float]] = {}
    for one in samples:
        times.setdefault(one.replica, []).append(one.t_s)
    for name, row in times.items():
        at = next((a for a, b in pairwise(row) if a == b), None)
        if at is not None:
            message = (
                f"{source}: replica {name} has two samples at {at:.0f} s; "
                "give each replica one series (in a query: sum by (replica) (...))"
            )
            raise TelemetryError(message)
    gaps = [b - a for row in times.values() for a, b in pairwise(row)]
    if len(samples) < LEAST_SAMPLES or not gaps:
        message = f"{source}: {len(samples)} samples; at least {LEAST_SAMPLES} are needed"
        raise TooLittle(message)
    period = statistics.median(gaps)
    expected = sum((row[-1] - row[0]) / period + 1 for row in times.values())
    coverage = min(1.0, len(samples) / expected)
    return LoadTelemetry(tuple(samples), replicas, moments, period, coverage)
