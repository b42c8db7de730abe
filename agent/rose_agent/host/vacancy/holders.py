"""Which rollout engines may hold a GPU: what a serving pod asks before it starts.

Serving engines size their memory from what is free when they start, so a rollout engine that is
still there would silently make them smaller. ``GET /vacated?gpu=UUID`` on the host's pages answers
``{"free": true, "holders": []}`` once no engine of this host can hold any of the named GPUs;
without names every GPU of the node is meant. An engine holds its GPUs until its cgroup is empty,
which is when its last device file is closed; a dormant one holds them too. The page tells nothing
but slots and states, and changes nothing. Next step: ``rose_agent.host.vacancy.vacate`` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from rose_core.wire.host import EngineState


class GpuHolder(msgspec.Struct, frozen=True):
    """An engine that may hold a GPU.

    Attributes:
        gpu_uuids: empty when it is not known which.
    """

    slot: str
    state: str
    gpu_uuids: tuple[str, ...] = ()


class Vacancy(msgspec.Struct, frozen=True):
    """The answer of the page."""

    free: bool
    holders: tuple[GpuHolder, ...] = ()


def judge(holdings: Iterable[GpuHolder], wanted: frozenset[str]) -> Vacancy:
    """Whether the wanted GPUs are free; an engine without known GPUs holds all of them."""
    held = tuple(
        holder
        for holder in holdings
        if holder.state != EngineState.GONE
        and (not wanted or not holder.gpu_uuids or wanted & set(holder.gpu_uuids))
    )
    return Vacancy(not held, held)


def page(holdings: Callable[[], Iterable[GpuHolder]]) -> web.RouteDef:
    """The route; ``holdings`` lists every engine of the host."""

    async def vacated(request: web.Request) -> web.Response:
        wanted = frozenset(filter(None, request.query.getall("gpu", [])))
        answer = judge(holdings(), wanted)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    return web.get("/vacated", vacated)
