"""Latency in lent and withheld windows of one replica, and what of the difference is noise.

Harm is a ratio of quantiles, lent over withheld, on the same replica and core. The control replica
lives through the same windows without ever being lent, so its ratio is the machine's own noise:
harm counts only where the lent replica's ratio exceeds the control's. Every
request is sent twice, in a lent and in a withheld window, and only such pairs are compared. All
intervals are bootstrap intervals over pairs, 95 %, seeded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rose_core import stats
from rose_demo.records import Request, Role, Sample, Window

SAMPLE_FLOOR = 20
"""Pairs of requests below which nothing is claimed."""

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One quantile of one latency, lent against withheld.

    Attributes:
        pairs: requests of the lent replica that were measured in both classes.
        lent_s, withheld_s: their quantile in each class; None without pairs.
        ratio: lent / withheld there; None below the floor.
        control: the same ratio on the never-lent replica.
        excess: ratio / control, what lending added beyond noise; None when either is missing.
    """

    latency: str
    quantile: float
    pairs: int
    lent_s: float | None
    withheld_s: float | None
    ratio: Estimate | None
    control: Estimate | None
    excess: Estimate | None


@dataclass(frozen=True)
class Attainment:
    """How one class of requests met the SLO.

    Attributes:
        met: share of requests within both limits, 0..1; None without requests.
    """

    count: int
    met: float | None
    ttft_s: float | None
    tpot_s: float | None


def class_name(role: Role, window: Window) -> str:
    """What a class of requests is called."""
    return f"{role.value}, {window.value} windows"


LENT_WINDOWS = class_name(Role.LENT, Window.LENT)
WITHHELD_WINDOWS = class_name(Role.LENT, Window.WITHHELD)


def windows(samples: Sequence[Sample]) -> list[tuple[float, float, Window]]:
    """Intervals in which the guard said lent or withheld; unknown stretches are left out."""
    result: list[tuple[float, float, Window]] = []
    for sample, following in itertools.pairwise(samples):
        if sample.withheld is None or following.withheld is None:
            continue
        kind = Window.WITHHELD if sample.withheld else Window.LENT
        if result and result[-1][2] is kind and result[-1][1] == sample.at_s:
            result[-1] = (result[-1][0], following.at_s, kind)
        else:
            result.append((sample.at_s, following.at_s, kind))
    return result


def classify(request: Request, spans: Sequence[tuple[float, float, Window]]) -> Window | None:
    """The window a request lies in whole; None when it straddles two or is outside."""
    for start, end, kind in spans:
        if start <= request.at_s < end:
            return kind if request.end_s <= end else None
    return None


def split(
    requests: Iterable[Request], spans: Sequence[tuple[float, float, Window]], role: Role
) -> dict[Window, list[Request]]:
    """Good requests of one replica by window."""
    result: dict[Window, list[Request]] = {kind: [] for kind in Window}
    for request in requests:
        kind = classify(request, spans) if request.role is role and not request.error else None
        if kind is not None:
            result[kind].append(request)
    return result


def latencies(requests: Iterable[Request], latency: str) -> np.ndarray:
    """``ttft`` or ``tpot`` of requests that have it, seconds."""
    values = (_latency(request, latency) for request in requests)
    return np.array([value for value in values if value is not None])


def _latency(request: Request, latency: str) -> float | None:
    return request.ttft_s if latency == "ttft" else request.tpot_s


def pairs(classes: dict[Window, list[Request]], latency: str) -> tuple[np.ndarray, np.ndarray]:
    """One latency of the requests that have it in both classes: lent and withheld, same order."""
    lent, withheld = (
        {
            request.number: value
            for request in classes[kind]
            if (value := _latency(request, latency)) is not None
        }
        for kind in (Window.LENT, Window.WITHHELD)
    )
    both = sorted(lent.keys() & withheld.keys())
    return np.array([lent[n] for n in both]), np.array([withheld[n] for n in both])


def quantile(values: np.ndarray, q: float) -> float | None:
    """The quantile, or None without values."""
    return stats.quantile(values.tolist(), q) if len(values) else None


def ratio_draws(lent: np.ndarray, withheld: np.ndarray, q: float, seed: int) -> np.ndarray | None:
    """Bootstrap draws of the ratio of quantiles, the point estimate first; None below the floor.

    ``lent`` and ``withheld`` are the same requests in the same order, drawn together.
    """
    if len(lent) < SAMPLE_FLOOR:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(lent), (RESAMPLES, len(lent)))

    def draws(values: np.ndarray) -> np.ndarray:
        return np.append(np.quantile(values, q), np.quantile(values[drawn], q, axis=1))

    ratios: np.ndarray = draws(lent) / np.maximum(draws(withheld), 1e-9)
    return ratios


def estimate(draws: np.ndarray | None) -> Estimate | None:
    """Point estimate and interval of draws whose first is the point estimate."""
    if draws is None:
        return None
    low, high = np.quantile(draws[1:], [0.025, 0.975])
    return Estimate(float(draws[0]), float(low), float(high))


def compare(
    lent: dict[Window, list[Request]],
    control: dict[Window, list[Request]],
    latency: str,
    q: float,
) -> Comparison:
    """Lent against withheld on the lent replica, beside the control."""
    slow, fast = pairs(lent, latency)
    draws = ratio_draws(slow, fast, q, seed=1)
    noise = ratio_draws(*pairs(control, latency), q, seed=2)
    excess = None if draws is None or noise is None else draws / noise
    return Comparison(
        latency,
        q,
        len(slow),
        quantile(slow, q),
        quantile(fast, q),
        estimate(draws),
        estimate(noise),
        estimate(excess),
    )


def attainment(
    requests: Sequence[Request], ttft_slo_s: float, tpot_slo_s: float, percentile: int
) -> Attainment:
    """Share of requests within the SLO, and the latencies at its percentile."""
    good = [
        r
        for r in requests
        if not r.error
        and r.ttft_s is not None
        and r.ttft_s <= ttft_slo_s
        and (r.tpot_s is None or r.tpot_s <= tpot_slo_s)
    ]
    return Attainment(
        len(requests),
        len(good) / len(requests) if requests else None,
        quantile(latencies(requests, "ttft"), percentile / 100),
        quantile(latencies(requests, "tpot"), percentile / 100),
    )


def open_share(samples: Sequence[Sample], *, lent_only: bool = True) -> float | None:
    """Share of known time with the gate open; ``lent_only`` leaves withheld windows out."""
    total = opened = 0.0
    for sample, following in itertools.pairwise(samples):
        if sample.gate_open is None or (lent_only and sample.withheld):
            continue
        total += following.at_s - sample.at_s
        opened += (following.at_s - sample.at_s) * sample.gate_open
    return opened / total if total else None


def growth(samples: Sequence[Sample], name: str) -> int | float | None:
    """How much a total grew over the recording; restarts of its process count from zero."""
    values = [v for v in (getattr(sample, name) for sample in samples) if v is not None]
    if not values:
        return None
    steps = (after - before if after >= before else after for before, after in _pairs(values))
    return sum(steps)


def _pairs(values: Sequence[float]) -> Iterable[tuple[float, float]]:
    return itertools.pairwise(values)
