"""The lease as one SGLang server and as one sglang-router, for the start-up checks of trainers.

Trainers size themselves by what they read here and send their aborts to the workers listed here, so
the answers are about the router, never about an engine behind it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rose_core.unreadable import UNREADABLE
from rose_core.wire.routing import EngineKind
from rose_router.errors import BadRequest
from rose_router.http.admission.bearer import caller_of
from rose_router.turns.service import Service


def routes(service: Service) -> list[web.RouteDef]:
    """The pages of a service."""

    async def model_info(_request: web.Request) -> web.Response:
        return _json(model_info_json(service))

    async def server_info(_request: web.Request) -> web.Response:
        return _json(server_info_json(service))

    async def workers(request: web.Request) -> web.Response:
        return _json(workers_json(service, own_url(request)))

    async def loads(request: web.Request) -> web.Response:
        return _json(loads_json(service, caller_of(request).job))

    async def list_workers(request: web.Request) -> web.Response:
        return _json({"urls": [own_url(request)]})

    async def register(request: web.Request) -> web.Response:
        return _registered(await request.read(), own_url(request))

    return [
        web.get("/model_info", model_info),
        web.get("/get_model_info", model_info),
        web.get("/server_info", server_info),
        web.get("/get_server_info", server_info),
        web.get("/workers", workers),
        web.post("/workers", register),
        web.get("/list_workers", list_workers),
        web.get("/v1/loads", loads),
    ]


def own_url(request: web.Request) -> str:
    """The URL that the caller knows this router by."""
    return f"{request.scheme}://{request.host}"


def model_info_json(service: Service) -> dict[str, Any]:
    """``/model_info``: the lease as one SGLang server."""
    head = service.fleet.head
    model = service.settings.model
    return {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": str(service.settings.tokenizer or ""),
        "is_generation": True,
        "weight_version": str(head) if head else None,
    }


def server_info_json(service: Service) -> dict[str, Any]:
    """``/server_info``: sizes that do not move while engines come and go.

    Trainers take concurrency and GPU counts from here, once, at start-up; what happens to be
    borrowed at that moment must not be in it.
    """
    places = sum(
        engine.update.cap for engine in service.fleet if engine.kind is EngineKind.DEDICATED
    )
    return {
        **model_info_json(service),
        "status": "ready",
        "version": "rose",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "num_gpus": service.settings.reported_gpus,
        "enable_memory_saver": False,
        "enable_return_routed_experts": service.settings.routed_experts,
        "max_running_requests": max(places, service.settings.queue.most),
        "internal_states": [],
    }


def workers_json(service: Service, url: str) -> dict[str, Any]:
    """``/workers``: one worker, the router itself.

    Trainers send their aborts to the workers they read here. An engine would end the legs of turns
    that the router then continues elsewhere; the router ends the turns.
    """
    ready = not service.unready()
    worker = {
        "id": service.settings.lease,
        "url": url,
        "model_id": service.settings.model,
        "worker_type": "regular",
        "connection_mode": "http",
        "is_healthy": ready,
        "load": sum(engine.reserved for engine in service.fleet),
        "priority": 50,
        "cost": 1.0,
        "metadata": {},
    }
    stats = {"prefill_count": 0, "decode_count": 0, "regular_count": 1}
    return {"workers": [worker], "total": 1, "stats": stats}


def loads_json(service: Service, job: str = "") -> dict[str, Any]:
    """``/v1/loads``: turns under way, of the caller's job where it names one.

    Who has aborted everything asks until nothing is left. Turns whose abort is on its way do not
    count: they take nothing more, and asking again costs a trainer seconds.
    """
    live = [
        turn for turn in service.ledger if job in {"", turn.request.job} and not turn.abort_message
    ]
    running = sum(turn.leg is not None for turn in live)
    load = {
        "dp_rank": 0,
        "num_reqs": len(live),
        "num_running_reqs": running,
        "num_waiting_reqs": len(live) - running,
    }
    return {"loads": [load]}


def _registered(raw: bytes, url: str) -> web.Response:
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE:
        body = None
    asked = body.get("url") if isinstance(body, dict) else None
    if isinstance(asked, str) and asked.rstrip("/") == url:
        # A trainer for which this router is engine and router at once registers the one at the
        # other; there is nothing to add.
        return _json({"status": "accepted", "worker_id": url, "location": "/workers"}, 202)
    message = (
        f"url: {asked!r} cannot be registered; an engine joins by ATTACH with an attested weight "
        "version (docs/router.md), this route only takes the router's own URL"
    )
    raise BadRequest("NotAWorker", message)


def _json(body: object, status: int = 200) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, content_type="application/json")
