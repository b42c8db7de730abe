"""``/trajectories``: the trainer says what it trained on and dropped; the bias meter answers.

    POST {"trained": ["key", ...], "dropped": [...], "withdrawn": [...], "rewards": {"key": 1.0}}

Which of those trained on are correct answers, ``correct`` lists; where it is left out, those whose
reward is 1 or more. ``reasoning`` says how many of a trajectory's tokens come before its answers;
none where it is left out. These numbers come into the lease's totals (``DEMAND``), each trajectory
once, with the tokens that were trained on.

What was withdrawn (a run that ends, a member that nobody needed) is neither and is not counted.

Keys are session keys (the request id of a turn without session), of the caller's own job where
several share the lease. Next: ``rose_core.rollouts``'
``inclusion`` says what the figures mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.trajectories.inclusion import Inclusion, InclusionCell, InclusionRow
from rose_core.rollouts.trajectories.prospects import Prospects
from rose_core.stats import Share
from rose_router import metrics
from rose_router.http.admission.bearer import caller_of
from rose_router.http.admission.bodies import read_body
from rose_router.http.dialects.common import Hints
from rose_router.turns.request import named
from rose_router.turns.service import Service

# As ``correctFrom`` of ``rose rewards``.
_CORRECT_FROM = 1.0
_MOST = sys.float_info.max


def routes(service: Service) -> list[web.RouteDef]:
    """The handlers over one router's memory."""
    prospects, tracing = service.prospects, service.tracing

    async def report(request: web.Request) -> web.Response:
        body = await read_body(request)
        job = caller_of(request).job or Hints(body, request.headers).job
        rewards = _numbers(body, "rewards")
        reasoning = _numbers(body, "reasoning")
        correct = _correct(body, rewards)
        unknown: list[str] = []
        for field, trained in (("trained", True), ("dropped", False)):
            for name in _names(body, field):
                reward = rewards.get(name)
                service.end_sandbox(named(job, name))
                if tracing is not None:
                    if reward is not None:
                        tracing.reward(named(job, name), reward)
                    tracing.end_trajectory(named(job, name), field)
                outcome = prospects.conclude(named(job, name), trained=trained, reward=reward)
                if outcome is None:
                    unknown.append(name)
                else:
                    kind = "borrowed" if outcome.borrowed else "dedicated"
                    metrics.CONCLUDED.labels(field, kind).inc()
                    before = int(reasoning.get(name, 0))
                    service.ledger.count_outcome(outcome, correct=name in correct, reasoning=before)
        for name in _names(body, "withdrawn"):
            prospects.forget(named(job, name))
            service.end_sandbox(named(job, name))
            if tracing is not None:
                tracing.end_trajectory(named(job, name), "withdrawn")
        show(prospects)
        return _json({"unknown": unknown})

    async def meter(_request: web.Request) -> web.Response:
        return _json(meter_json(prospects))

    return [web.post("/trajectories", report), web.get("/trajectories", meter)]


def meter_json(prospects: Prospects) -> dict[str, Any]:
    """``GET /trajectories``."""
    return {
        "remembered": len(prospects),
        "forgotten": prospects.forgotten,
        "borrowed_share": {"all": prospects.shares.overall, **prospects.shares.by_stratum()},
        "pool_correlation": prospects.inclusion.correlations(),
        "inclusion": _rows(prospects.inclusion),
        "inferred": {
            "ends": prospects.inferred_ends,
            "mistaken_ends": prospects.mistaken_ends,
            "joined_a_group": prospects.groups.joined,
            "in_time": _rows(prospects.in_time),
        },
    }


def show(prospects: Prospects) -> None:
    """The gaps as metrics; strata of which one pool has seen nothing are left out."""
    for row in prospects.inclusion.rows():
        if not math.isnan(row.gap.value):
            for bound in ("value", "low", "high"):
                labels = (row.dimension, row.stratum, bound)
                metrics.INCLUSION_GAP.labels(*labels).set(getattr(row.gap, bound))


def _rows(meter: Inclusion) -> list[dict[str, Any]]:
    return [_row(row) for row in meter.rows()]


def _row(row: InclusionRow) -> dict[str, Any]:
    return {
        "dimension": row.dimension,
        "stratum": row.stratum,
        "any": _cell(row.any),
        "dedicated": _cell(row.dedicated),
        "gap": _interval(row.gap),
        "judged": row.judged,
        "biased": row.biased,
    }


def _cell(cell: InclusionCell) -> dict[str, Any]:
    counts = {name: getattr(cell, name) for name in ("trained", "dropped", "lost", "groups")}
    return _interval(cell.share()) | counts


def _interval(interval: Share) -> dict[str, Any]:
    value = None if math.isnan(interval.value) else interval.value
    return {"value": value, "low": interval.low, "high": interval.high}


def _names(body: Mapping[str, Any], field: str) -> list[str]:
    names = body.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        message = f"{field}: expected a list of session keys"
        raise InvalidTurn(message)
    return names


def _correct(body: Mapping[str, Any], rewards: Mapping[str, float]) -> frozenset[str]:
    """Session keys of correct answers, as they are listed or as their rewards say."""
    if body.get("correct") is not None:
        return frozenset(_names(body, "correct"))
    return frozenset(name for name, reward in rewards.items() if reward >= _CORRECT_FROM)


def _numbers(body: Mapping[str, Any], field: str) -> dict[str, float]:
    found = body.get(field) or {}
    if not isinstance(found, dict) or not all(
        # Not ``isfinite``, to which a whole number beyond all floats is an error of its own.
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
        for value in found.values()
    ):
        message = f"{field}: expected an object of session keys and numbers"
        raise InvalidTurn(message)
    return found


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
