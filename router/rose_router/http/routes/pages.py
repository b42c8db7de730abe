"""State for people, dashboards and the start-up checks of trainers."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from rose_core.rollouts import versions
from rose_router.engines.fleet import Engine
from rose_router.http.admission.bearer import caller_of
from rose_router.http.dialects.common import Hints
from rose_router.turns.ledger import summary
from rose_router.turns.request import named
from rose_router.turns.service import Service


def routes(service: Service) -> list[web.RouteDef]:
    """The pages of a service."""

    async def health(_request: web.Request) -> web.Response:
        return web.Response()  # turns are taken and queued, with or without engines

    async def ready(_request: web.Request) -> web.Response:
        reason = service.unready()
        return web.Response(text=(reason or "ok") + "\n", status=503 if reason else 200)

    def model_json() -> dict[str, Any]:
        model = {"id": service.settings.model, "object": "model", "owned_by": "rose"}
        # Trainers size their batches by it; vLLM's word for prompt and answer together.
        length = {"max_model_len": context} if (context := service.bounds().context) else {}
        return model | length

    async def models(_request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [model_json()]})

    async def model(request: web.Request) -> web.Response:
        # A lease has one model, and harnesses ask for it by names of their own.
        return _json(model_json() | {"id": request.match_info["id"]})

    async def weight_version(_request: web.Request) -> web.Response:
        head = service.fleet.head
        shown = service.labels.get(str(head), str(head)) if head else None
        return _json({"weight_version": shown})

    async def finished(request: web.Request) -> web.Response:
        job = caller_of(request).job or Hints({}, request.headers).job
        service.end_trajectory(named(job, request.query.get("session_id", "")))
        return _json({"status": "ok"})

    async def engines(_request: web.Request) -> web.Response:
        return _json(engines_json(service))

    async def turns(_request: web.Request) -> web.Response:
        return _json(turns_json(service))

    return [
        web.get("/health", health),
        web.get("/health_generate", health),
        web.get("/ready", ready),
        web.get("/v1/models", models),
        web.get("/v1/models/{id:.+}", model),
        web.get("/get_weight_version", weight_version),
        web.get("/ping", health),
        web.get("/liveness", health),
        web.get("/readiness", ready),
        web.post("/finish_session", finished),
        web.get("/engines", engines),
        web.get("/turns", turns),
    ]


def engines_json(service: Service) -> dict[str, Any]:
    """``/engines``."""
    head = service.fleet.head
    return {
        "lease": service.settings.lease,
        "head": str(head) if head else None,
        "unready": service.unready(),
        "queued": len(service.queue),
        "engines": [_engine(service, engine) for engine in service.fleet],
    }


def _engine(service: Service, engine: Engine) -> dict[str, Any]:
    head, now = engine.head or service.fleet.head, service.clock()
    lag = versions.lag(engine.version, head) if engine.version and head else None
    return {
        "engine": engine.name,
        "kind": engine.kind.value,
        "pool": engine.update.pool,
        "device_class": engine.update.device_class,
        "url": engine.update.url,
        "attached": engine.detached_at is None,
        "leaving": engine.update.leaving,
        "gate": "open" if engine.gate_open else "closed",
        "gate_seconds": round(now - engine.gate_since, 3),
        "cap": engine.cap,
        "live": len(engine.legs),
        "version": engine.update.version,
        "lag": lag,
        "turns": engine.turns,
        "tokens": engine.tokens,
        "step_milliseconds": round(engine.speed.step_seconds * 1000, 3) if engine.speed else None,
        "prefill_milliseconds_per_token": (
            round(engine.speed.prefill_seconds_per_token * 1000, 4) if engine.speed else None
        ),
        "open_share": round(engine.hazard.open_share, 4),
        "serving_slowdown": engine.update.slowdown or None,
        "reclaims_per_minute": round(engine.hazard.per_second * 60, 3),
        "pending_aborts": len(engine.fences),
        "backing_off_seconds": round(max(0.0, engine.backing_off_until - now), 3),
    }


def turns_json(service: Service) -> dict[str, Any]:
    """``/turns``: sums since the start, live turns, the last that ended."""
    return {
        "totals": dataclasses.asdict(service.ledger.totals),
        "live": [summary(turn) for turn in service.ledger],
        "recent": [one | {"seconds": round(one["seconds"], 4)} for one in service.ledger.recent],
    }


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
