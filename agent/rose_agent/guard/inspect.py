"""Pages that show what the guard knows: ``/trace`` (flight recorder) and ``/report`` (harm, state).

``/report`` gives, per replica, TTFT and TPOT in lent and withheld windows as the tap measured
them, with ratio and interval above the sample floor, and per slot the gate and the totals.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rose_agent.guard.recorder import perfetto
from rose_agent.guard.replica import Replica
from rose_agent.guard.slot import Slot
from rose_core.guard.crossover import SAMPLE_FLOOR

if TYPE_CHECKING:
    from rose_agent.guard.loop import Guard

QUANTILES = (0.5, 0.9, 0.99)


def inspection(guard: Guard) -> list[web.RouteDef]:
    """Routes for the agent's web application."""

    async def trace(request: web.Request) -> web.Response:
        dump = guard.recorder.dump()
        return web.json_response(perfetto(dump) if "perfetto" in request.query else dump)

    async def report(_request: web.Request) -> web.Response:
        return web.json_response(describe(guard))

    return [web.get("/trace", trace), web.get("/report", report)]


def describe(guard: Guard) -> dict[str, Any]:
    """The report as JSON."""
    now_ns = time.monotonic_ns()
    return {
        "node": guard.settings.node,
        "crossoverSeconds": guard.settings.crossover_seconds,
        "sampleFloor": SAMPLE_FLOOR,
        "replicas": [_replica(r, now_ns) for r in guard.replicas.values()],
        "slots": [_slot(s) for s in guard.slots.values()],
    }


def _replica(replica: Replica, now_ns: int) -> dict[str, Any]:
    signal = replica.signal(now_ns)
    meter = replica.meter
    return {
        "pod": replica.pod.name,
        "pool": replica.pod.pool,
        "running": signal.running,
        "source": signal.source,
        "doubt": signal.doubt,
        "verified": replica.verification.verified,
        "idleShare": replica.book.idle_share(now_ns),
        "finished": replica.counters.finished,
        "slow": replica.counters.slow,
        "ttftSeconds": {
            "lent": list(meter.ttft.get(False, ())),
            "withheld": list(meter.ttft.get(True, ())),
        },
        "tpotSeconds": {
            "lent": list(meter.tpot.get(False, ())),
            "withheld": list(meter.tpot.get(True, ())),
        },
        "ratios": {
            name: [dataclasses.asdict(ratio) for ratio in ratios]
            for name, ratios in meter.ratios(QUANTILES).items()
        },
    }


def _slot(slot: Slot) -> dict[str, Any]:
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
        "harvestedTokens": totals.tokens,
        "reclaims": totals.reclaims,
    }
