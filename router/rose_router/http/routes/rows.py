"""``GET /sessions/{key}/rows``: what a trainer learns from a session of an agent's harness.

A row is a conversation from its first token to a last turn; turns that went on from each other are
one row. Sub-agents, retries and condensed histories are rows of their own. Every sampled token has
mask 1 in one row only, so that none is learnt from twice.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from rose_core.rollouts.conversations.message_tree import MessageTree, Routing, TrainingRow
from rose_router.errors import NotFound
from rose_router.http.admission.bearer import caller_of
from rose_router.http.dialects.common import Hints
from rose_router.http.replies.parts import spans_json
from rose_router.turns.service import Service


def routes(tree: MessageTree, service: Service) -> list[web.RouteDef]:
    """The page over a tree."""

    async def rows(request: web.Request) -> web.Response:
        key = request.match_info["key"]
        job = caller_of(request).job or Hints({}, request.headers).job
        found = tree.rows((job, key))
        if not found:
            message = (
                f"no turn of session {key!r:.80} is kept here: only chats, messages and responses "
                "are, once their turn is over; GET /turns shows sessions"
            )
            raise NotFound("UnknownSession", message)
        body = {"session": key, "rows": [row_json(row, service.labels) for row in found]}
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    return [web.get("/sessions/{key}/rows", rows)]


def row_json(row: TrainingRow, labels: dict[str, str]) -> dict[str, Any]:
    """A row; ``logprobs`` are null where no token was sampled."""
    return {
        "ids": row.ids,
        "mask": list(row.mask),
        "logprobs": [None if math.isnan(one) else one for one in row.logprobs],
        "weight_versions": spans_json(row.spans, labels),
        "turns": [
            {
                "rid": one.rid,
                "start": one.start,
                "end": one.end,
                "finish_reason": one.finish,
                "logprob_semantics": one.semantics,
                "altered_at": one.altered_at,
            }
            for one in row.turns
        ],
        "routed_experts": None if row.routing is None else _routing_json(row.routing),
    }


def _routing_json(routing: Routing) -> dict[str, Any]:
    """Rows of experts as SGLang writes them: whole numbers of 32 bits, in base64."""
    return {
        "data": routing.rows,  # msgspec writes bytes so
        "rows": routing.ends,
        "row_bytes": routing.width,
        "recomputed": routing.recomputed,
    }
