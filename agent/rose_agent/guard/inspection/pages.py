"""Pages that show what the guard knows: ``/trace`` (flight recorder) and ``/report`` (harm, state).

``/report`` gives, per replica, TTFT and TPOT in lent and withheld cycles as the tap measured
them, with ratio and interval above the sample floor, and its GPUs with the sum of their memory; per
slot the gate and the totals.

On ``agent.sock``, which only the node's root can open, both are there for every caller; on the
network for those who bring the installation's token. Next step:
``rose_agent.guard.inspection.node_verbs`` reads them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rose_agent.guard.flight.perfetto import perfetto
from rose_agent.guard.replicas.pools import PoolState
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.slots.slot import GuardedSlot
from rose_core.guard.crossover import SAMPLE_FLOOR, Meter, Ratio
from rose_core.guard.trial import added
from rose_core.wire.sync import PoolPolicy
from rose_wire.observability import Page

if TYPE_CHECKING:
    from rose_agent.guard.loop import Guard

QUANTILES = (0.5, 0.9, 0.99)


def inspection(guard: Guard, protect: Callable[[Page], Page] | None = None) -> list[web.RouteDef]:
    """Routes for the agent's web application.

    Args:
        guard: whose knowledge is shown.
        protect: asks callers who they are; none where the listener itself does.
    """
    protect = protect or (lambda page: page)

    async def trace(request: web.Request) -> web.Response:
        dump = guard.recorder.dump()
        return web.json_response(perfetto(dump) if "perfetto" in request.query else dump)

    async def report(_request: web.Request) -> web.Response:
        return web.json_response(describe(guard))

    return [web.get("/trace", protect(trace)), web.get("/report", protect(report))]


def describe(guard: Guard) -> dict[str, Any]:
    """The report as JSON."""
    now_ns = time.monotonic_ns()
    return {
        "node": guard.settings.node,
        "crossoverSeconds": guard.settings.crossover_seconds,
        "sampleFloor": SAMPLE_FLOOR,
        "pools": [_pool(p, guard, now_ns) for p in guard.policies],
        "replicas": [_replica(r, now_ns) for r in guard.replicas.values()],
        "slots": [_slot(s) for s in guard.slots.values()],
    }


def _pool(policy: PoolPolicy, guard: Guard, now_ns: int) -> dict[str, Any]:
    state = guard.pools.state(policy.pool)
    burn = state.burn.burn(policy.percentile, state.limits.long_ns, now_ns)
    return {
        "pool": policy.pool,
        "errorBudget": dataclasses.asdict(burn),
        "breakerOpen": state.breaker.open(now_ns),
        "breakerCause": state.breaker.cause,
        "relativeLimitJudgedAgainst": state.judged,
        "certificate": _certificate(policy, state),
        "added": dataclasses.asdict(harm) if (harm := added(state.trial)) is not None else None,
    }


def _certificate(policy: PoolPolicy, state: PoolState) -> dict[str, Any] | None:
    """What the next request on an empty replica is promised; None: the pool names no TTFT."""
    if not policy.ttft_milliseconds:
        return None
    certificate = state.lessons.envelope.certificate(
        policy.ttft_milliseconds / 1000,
        policy.percentile,
        policy.ttft_alone_milliseconds / 1000,
    )
    return {
        "holds": certificate.holds,
        "text": certificate.text,
        "level": certificate.level,
        "ceilingSeconds": certificate.ceiling_s,
        **dataclasses.asdict(state.lessons.certified),
    }


def _replica(replica: GuardedReplica, now_ns: int) -> dict[str, Any]:
    signal = replica.signal(now_ns)
    outcomes, meter = replica.outcomes, replica.outcomes.meter
    return {
        "pod": replica.pod.name,
        "pool": replica.pod.pool,
        "running": signal.running,
        "source": signal.source,
        "doubt": signal.doubt,
        "verified": replica.verification.verified,
        "idleShare": replica.book.idle_share(now_ns),
        "usableIdleShare": replica.gaps.share(now_ns),
        "coolDownSeconds": replica.gaps.cool_down_ns / 1e9,
        "margin": outcomes.margin.value,
        "slowdown": outcomes.predictor.slowdown(),
        "slowdownInGaps": outcomes.experience.slowdown,
        "finished": outcomes.counters.finished,
        "slow": outcomes.counters.slow,
        "devices": _devices(replica),
        **_harm(meter, outcomes.pool.unlent),
    }


def _devices(replica: GuardedReplica) -> dict[str, Any]:
    """Which GPUs it has on whose word, what may be lent of each, and why none of it is."""
    claim, view = replica.pod.claim, replica.view
    return {
        "gpus": claim.gpus,
        "proof": claim.proof,
        "class": view.device_class if view is not None else "",
        "refusal": view.refusal if view is not None else "",
        "message": view.message if view is not None else "",
        "lendableBytes": view.lendable.bytes if view is not None else None,
        "lendable": view.lendable.message if view is not None else "",
        "pressure": view is not None and view.budget.pressure,
    }


def _harm(meter: Meter, unlent: Meter) -> dict[str, Any]:
    """Latencies by kind of cycle, and their ratios to withheld cycles and un-lent replicas."""
    lent, withheld = meter.samples(withheld=False), meter.samples(withheld=True)
    return {
        "ttftSeconds": {"lent": lent[0], "withheld": withheld[0]},
        "tpotSeconds": {"lent": lent[1], "withheld": withheld[1]},
        "ratios": _plain(meter.ratios(QUANTILES)),
        "ratiosToUnlent": _plain(meter.ratios(QUANTILES, unlent)),
    }


def _plain(ratios: dict[str, list[Ratio]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [dataclasses.asdict(one) for one in found] for name, found in ratios.items()}


def _slot(slot: GuardedSlot) -> dict[str, Any]:
    totals = slot.totals
    return {
        "slot": slot.name,
        "uid": slot.uid,
        "phase": slot.machine.phase,
        "rung": slot.machine.rung.name,
        "gateOpen": slot.gate_open,
        "reason": slot.verdict.reason,
        "duty": slot.verdict.duty,
        "message": slot.message,
        "lentSeconds": totals.lent_ns / 1e9,
        "openSeconds": totals.open_ns / 1e9,
        "reservedSeconds": totals.reserved_ns / 1e9,
        "harvestedTokens": totals.tokens,
        "reclaims": totals.reclaims,
    }
