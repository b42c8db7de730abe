"""Lendable GPU time and the requests it touches, from recorded load, with intervals.

With ``i(t)`` the share of replicas that are idle and ``m`` replicas lent of ``n``:

    lendable(m)  = m * mean(i) * gpus * 24 h          GPU-hours a day; any m
    overhead(m)  = m * rate * reopen * gpus * 24 h    every request keeps its gate shut for longer
    exposed(m)   = m / n * mean over requests of i    requests that find a rollout to stop

An arrival sees the idle share of its moment (arrivals do not know of it), so exposure needs no
trace of single requests. An exposed request that finds nobody before it waits at most ``stop_s``
longer for its first token, and violates the SLO by that only if its time to first token lies within
``stop_s`` of the limit. Where the 99th percentile is recorded and lies further away, that is 1 % of
the exposed at most; where it is not recorded, nothing is known but that it is at most all of them.
This is an estimate and no bound: requests queued behind an exposed one get late too.

Intervals: blocks of time are drawn anew with replacement (all replicas of a block together, since
load is correlated between replicas and in time), 95 % of the results lie between the ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rose_simulate.advice.errors import TooLittle
from rose_simulate.advice.telemetry import LoadSample, LoadTelemetry

_DAY_S, _HOUR_S = 86_400.0, 3_600.0
_ROUNDS = 400
_LEAST_BLOCKS = 8
_NEAR = 0.01  # share of requests beyond their 99th percentile


@dataclass(frozen=True)
class Assumed:
    """What the telemetry does not say.

    Attributes:
        gpus: of one replica.
        stop_s: from a request's arrival to rollouts that stand still, 99th percentile.
        reopen_s: from the last answer to a rollout that computes again.
        ttft_ms: the owner's limit; 0 = none.
    """

    gpus: int = 1
    stop_s: float = 0.075
    reopen_s: float = 0.06
    ttft_ms: float = 0.0


@dataclass(frozen=True)
class EstimateInterval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Option:
    """What lending so much would mean.

    Attributes:
        lent: replicas.
        gpu_hours: lendable per day, overhead taken off.
        exposed: share of all requests of the pool that find a rollout to stop.
        at_risk: share of all requests that may newly miss the SLO, about; None = not known.
    """

    percent: int
    lent: int
    gpu_hours: EstimateInterval
    exposed: EstimateInterval
    at_risk: EstimateInterval | None


@dataclass(frozen=True)
class LendingEstimate:
    """Everything.

    Attributes:
        idle: idle share over all replicas.
        by_hour: idle share by hour of the day (UTC); empty below a day of telemetry.
        slow_share: of the finished requests, above the SLO as it is; None = not recorded.
        caveats: what stands between these figures and the truth, in words.
    """

    span_s: float
    replicas: int
    idle: EstimateInterval
    options: tuple[Option, ...]
    by_hour: tuple[tuple[int, EstimateInterval], ...] = ()
    slow_share: float | None = None
    caveats: tuple[str, ...] = field(default=())


@dataclass
class _Block:
    """Sums over one stretch of time."""

    samples: float = 0.0
    idle: float = 0.0
    requests: float = 0.0
    met_idle: float = 0.0
    near: float = 0.0
    seconds: float = 0.0

    def add(self, other: _Block) -> None:
        self.samples += other.samples
        self.idle += other.idle
        self.requests += other.requests
        self.met_idle += other.met_idle
        self.near += other.near
        self.seconds += other.seconds


def estimate(
    telemetry: LoadTelemetry, assumed: Assumed, percents: Sequence[int], *, seed: int = 0
) -> LendingEstimate:
    """Every option.

    Raises:
        TooLittle: less than eight blocks of time.
    """
    counted = all(one.requests is not None for one in telemetry.samples)
    latency = bool(assumed.ttft_ms) and any(
        one.ttft_p99_ms is not None for one in telemetry.samples
    )
    blocks = _blocks(telemetry, assumed, _block_s(telemetry))
    if len(blocks) < _LEAST_BLOCKS:
        message = f"{telemetry.span_s:.0f} s of telemetry make {len(blocks)} blocks; 8 are needed"
        raise TooLittle(message)
    reopen = assumed.reopen_s if counted else 0.0
    draws = _draws(blocks, seed)
    whole = _total(blocks)
    size = len(telemetry.replicas)
    options = []
    for percent in percents:
        lent = size * percent // 100
        part = lent / size
        options.append(
            Option(
                percent,
                lent,
                _interval(whole, draws, partial(_hours, lent, assumed.gpus, reopen)),
                _interval(whole, draws, partial(_met, part)),
                _interval(whole, draws, partial(_near, part)) if latency else None,
            )
        )
    return LendingEstimate(
        telemetry.span_s,
        size,
        _interval(whole, draws, _idle),
        tuple(options),
        _by_hour(telemetry),
        _slow_share(telemetry),
        _caveats(telemetry, assumed, counted=counted, latency=latency),
    )


def _block_s(telemetry: LoadTelemetry) -> float:
    """An hour, or a twentieth of a short recording."""
    return min(_HOUR_S, telemetry.span_s / 20)


def _blocks(telemetry: LoadTelemetry, assumed: Assumed, length_s: float) -> list[_Block]:
    found: dict[int, _Block] = {}
    last: dict[str, LoadSample] = {}
    start = telemetry.samples[0].t_s
    for one in telemetry.samples:
        block = found.setdefault(int((one.t_s - start) / length_s), _Block())
        before = last.get(one.replica)
        last[one.replica] = one
        idle = 1.0 - one.busy
        requests = _gain(before, one)
        block.samples += 1
        block.idle += idle
        block.seconds += telemetry.period_s
        # Without a count every moment weighs the same: more than it should where idle.
        weight = 1.0 if requests is None else requests
        block.requests += weight
        block.met_idle += weight * idle
        block.near += weight * idle * _near_share(one, assumed)
    return list(found.values())


def _near_share(one: LoadSample, assumed: Assumed) -> float:
    if one.ttft_p99_ms is None or not assumed.ttft_ms:
        return 1.0
    return _NEAR if one.ttft_p99_ms + 1e3 * assumed.stop_s <= assumed.ttft_ms else 1.0


def _gain(before: LoadSample | None, one: LoadSample) -> float | None:
    """Requests since the sample before; a counter that fell was started anew."""
    if one.requests is None:
        return None
    if before is None or before.requests is None:
        return 0.0
    grown = one.requests - before.requests
    return grown if grown >= 0 else one.requests


def _draws(blocks: Sequence[_Block], seed: int) -> list[_Block]:
    draw = random.Random(seed)  # noqa: S311  # resampling, nothing secret
    return [_total(draw.choices(blocks, k=len(blocks))) for _ in range(_ROUNDS)]


def _total(blocks: Sequence[_Block]) -> _Block:
    total = _Block()
    for block in blocks:
        total.add(block)
    return total


def _interval(
    whole: _Block, draws: Sequence[_Block], figure: Callable[[_Block], float]
) -> EstimateInterval:
    values = sorted(figure(block) for block in draws)
    cut = len(values) // 40
    return EstimateInterval(figure(whole), values[cut], values[-1 - cut])


def _idle(block: _Block) -> float:
    return block.idle / max(1.0, block.samples)


def _met(part: float, block: _Block) -> float:
    return part * block.met_idle / block.requests if block.requests else 0.0


def _near(part: float, block: _Block) -> float:
    return part * block.near / block.requests if block.requests else 0.0


def _hours(lent: int, gpus: int, reopen_s: float, block: _Block) -> float:
    overhead = reopen_s * block.requests / max(1e-9, block.seconds)
    return lent * gpus * 24.0 * max(0.0, _idle(block) - overhead)


def _by_hour(telemetry: LoadTelemetry) -> tuple[tuple[int, EstimateInterval], ...]:
    if telemetry.span_s < _DAY_S:
        return ()
    hours: dict[int, list[float]] = {}
    for one in telemetry.samples:
        hours.setdefault(int(one.t_s % _DAY_S // _HOUR_S), []).append(1.0 - one.busy)
    found = []
    for hour, values in sorted(hours.items()):
        blocks = [_Block(samples=1.0, idle=value) for value in values]
        chunk = max(1, len(blocks) // 12)
        joined = [_total(blocks[at : at + chunk]) for at in range(0, len(blocks), chunk)]
        found.append((hour, _interval(_total(joined), _draws(joined, hour), _idle)))
    return tuple(found)


def _slow_share(telemetry: LoadTelemetry) -> float | None:
    requests = slow = 0.0
    last: dict[str, LoadSample] = {}
    for one in telemetry.samples:
        if one.requests is None or one.slow is None:
            return None
        before = last.get(one.replica)
        if before is not None and before.slow is not None:
            requests += _gain(before, one) or 0.0
            slow += max(0.0, one.slow - before.slow)
        last[one.replica] = one
    return slow / requests if requests else None


def _caveats(
    telemetry: LoadTelemetry, assumed: Assumed, *, counted: bool, latency: bool
) -> tuple[str, ...]:
    found = []
    if telemetry.span_s < _DAY_S:
        found.append("the busier hours there may be: less than a day was recorded")
    elif telemetry.span_s < 7 * _DAY_S:
        found.append("the busier days there may be: less than a week was recorded")
    if telemetry.moments:
        found.append(
            "how long an idle gap lasts: load is known at moments "
            f"{telemetry.period_s:.0f} s apart, which is enough for the idle share"
        )
    if not counted:
        found.append(
            "how many requests there were (column requests): every moment weighs alike, so too "
            "many seem to stop a rollout, and the time that each costs them is not taken off"
        )
    if not latency:
        lacks = "a recorded time to first token (column ttft_p99_ms)"
        lacks = lacks if assumed.ttft_ms else "a limit to compare with (--ttft)"
        found.append(f"how many requests would newly miss the SLO: that needs {lacks}")
    if telemetry.coverage < 0.95:
        found.append(
            f"what happened in the {1 - telemetry.coverage:.0%} of the samples that are missing"
        )
    return tuple(found)
