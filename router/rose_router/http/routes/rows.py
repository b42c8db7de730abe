"""``GET /sessions/{key}/rows``: what a trainer learns from a session of an agent's harness.

``GET /sessions`` tells which there are, for trainers whose harnesses told them no key.

A row is a conversation from its first token to a last turn; turns that went on from each other are
one row. Sub-agents, retries and condensed histories are rows of their own. Every sampled token has
mask 1 in one row only, so that none is learnt from twice.

A session may take a sixty-fourth of the router's memory, its JSON several times that, and its rows
have their common beginnings each. So one row at a time is put together, and written in pieces: the
next one is made when the caller has taken the one before. The longest one is counted as memory of
requests; where it does not fit beside these, the answer is 503. The rows are those of the moment in
which they were asked for.
"""

from __future__ import annotations

import asyncio
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from rose_core.rollouts.capacity.router_size import PER_ID
from rose_core.rollouts.conversations.message_tree import (
    MessageTree,
    Routing,
    TrainingRow,
    TurnRange,
)
from rose_router.errors import NotFound
from rose_router.http.admission.bearer import caller_of
from rose_router.http.admission.memory import ROOM
from rose_router.http.dialects.common import Hints
from rose_router.http.replies.parts import spans_json
from rose_router.turns.service import Service

_PIECE = 1 << 14
"""Bytes that are written together, at least."""
_SLICE = 2048
"""Tokens of a list that become JSON at a time: their log-probs are 40 KB."""
_TURNS = 256
"""Turns or spans, about as long."""
_MOST_SESSIONS = 1000
"""Told at a time: more runs than that no trainer has asked for at once, and with the longest keys
they are a megabyte."""
_ROUTED = 3 << 13
"""Bytes of experts; three of them are four of base64."""

Item = TypeVar("Item")

_encode = msgspec.json.Encoder().encode


def routes(tree: MessageTree, service: Service) -> list[web.RouteDef]:
    """The pages over a tree."""

    def job_of(request: web.Request) -> str:
        return caller_of(request).job or Hints({}, request.headers).job

    async def sessions(request: web.Request) -> web.Response:
        found, left_out = tree.sessions(job_of(request), _MOST_SESSIONS)
        told = [
            {"session": one.key, "session_by": one.by or None, "first_turn": one.first}
            | {"turns": one.turns}
            for one in found
        ]
        body = _encode({"sessions": told, "left_out": left_out})
        return web.Response(body=body, content_type="application/json")

    async def rows(request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        job = job_of(request)
        found = tree.rows((job, key))
        if not found:
            message = (
                f"no turn of session {key!r:.80} is kept here: only chats, messages and responses "
                "are, once their turn is over; GET /sessions lists them"
            )
            raise NotFound("UnknownSession", message)
        if (room := request.get(ROOM)) is not None:
            room.resize(found.most_tokens * PER_ID + found.most_routed)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for piece in pieces(key, found, service.labels):
            await response.write(piece)
            await asyncio.sleep(0)  # others' turns go on between two pieces
        await response.write_eof()
        return response

    return [web.get("/sessions", sessions), web.get("/sessions/{key}/rows", rows)]


def pieces(key: str, rows: Iterable[TrainingRow], labels: dict[str, str]) -> Iterator[bytes]:
    """A session's rows as JSON, of which no piece is long.

    Args:
        key: of the session.
        rows: each is asked for when the one before is written.
        labels: the trainer's names of versions.
    """
    waiting = bytearray(b'{"session":%b,"rows":[' % _encode(key))
    for number, row in enumerate(rows):
        waiting += b"," if number else b""
        for part in _parts(row, labels):
            waiting += part
            if len(waiting) >= _PIECE:
                yield bytes(waiting)
                waiting.clear()
    yield bytes(waiting + b"]}")


def _parts(row: TrainingRow, labels: dict[str, str]) -> Iterator[bytes]:
    """A row; ``logprobs`` are null where no token was sampled."""
    yield b'{"ids":'
    yield from _list(row.ids, _SLICE, list)
    yield b',"mask":'
    yield from _list(row.mask, _SLICE, list)
    yield b',"logprobs":'
    yield from _list(row.logprobs, _SLICE, _known)
    yield b',"weight_versions":'
    yield from _list(row.spans, _TURNS, lambda spans: spans_json(spans, labels))
    yield b',"turns":'
    yield from _list(row.turns, _TURNS, lambda turns: [_turn_json(one) for one in turns])
    yield b',"routed_experts":'
    yield from (b"null",) if row.routing is None else _routing(row.routing)
    yield b"}"


def _list(
    items: Sequence[Item], most: int, told: Callable[[Sequence[Item]], Sequence[object]]
) -> Iterator[bytes]:
    """A list, so many of its items at a time."""
    yield b"["
    for start in range(0, len(items), most):
        yield b"," if start else b""
        yield _encode(told(items[start : start + most]))[1:-1]
    yield b"]"


def _known(logprobs: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(one) else one for one in logprobs]


def _turn_json(turn: TurnRange) -> dict[str, object]:
    return {
        "rid": turn.rid,
        "start": turn.start,
        "end": turn.end,
        "finish_reason": turn.finish,
        "logprob_semantics": turn.semantics,
        "altered_at": turn.altered_at,
    }


def _routing(routing: Routing) -> Iterator[bytes]:
    """Rows of experts as SGLang writes them: whole numbers of 32 bits, in base64."""
    yield b'{"data":"'
    for start in range(0, len(routing.rows), _ROUTED):
        yield b64encode(routing.rows[start : start + _ROUTED])
    yield b'","rows":%d,"row_bytes":%d,"recomputed":%d}' % (
        *(routing.ends, routing.width, routing.recomputed),
    )
