"""The routes that the router, the host and the probe speak, on vLLM's own HTTP server.

vLLM adds them to its application (entry point ``vllm.endpoint_plugins``). They are SGLang's words,
so that an engine of either kind takes any turn: ids in, ids and log-probs out, version spans in
every event, new tokens only.

POST /generate         one turn, plain or streamed
POST /abort_request    by id prefix, or everything
GET  /ready            200 as soon as turns are taken
GET  /model_info       as far as anybody asks

Next step: ``sampling`` reads a turn.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from rose_core.rollouts.requests.logprobs import SCALE, LogitScale
from rose_core.unreadable import UNREADABLE
from rose_engines.errors import EngineRefused
from rose_engines.process.exposed_routes import RouteFilter
from rose_engines.vllm.sampling import VllmTurn, read_turn

_EVENTS = "text/event-stream"


class TurnRoutes:
    """An endpoint plugin of vLLM.

    Attributes:
        key: see ``rose_engines.process.exposed_routes``; set before the application is made.
    """

    name = "rose"
    required_tasks = ("generate",)
    key = ""

    def __init__(self) -> None:
        self._engine: Any = None
        self._live: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def attach_router(self, app: Any) -> None:  # noqa: ANN401
        """Phase one: routes."""
        if self.key:
            app.add_middleware(RouteFilter, key=self.key)
        app.add_route("/generate", self.generate, methods=["POST"])
        app.add_route("/abort_request", self.abort, methods=["POST"])
        app.add_route("/ready", self.ready, methods=["GET"])
        app.add_route("/model_info", self.model_info, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ANN401, ARG002
        """Phase two: the engine."""
        self._engine = engine_client

    async def generate(self, request: Any) -> Any:  # noqa: ANN401
        """One turn."""
        from starlette.responses import StreamingResponse  # noqa: PLC0415  # only inside engines

        try:
            asked = read_turn(msgspec.json.decode(await request.body(), type=dict[str, Any]))
        except EngineRefused as refused:
            return _answer(_error(str(refused), refused.status), refused.status)
        except (*UNREADABLE, TypeError, ValueError) as error:
            return _answer(_error(f"bad request: {error}", 400), 400)
        if asked.stream:
            return StreamingResponse(self._events(asked), media_type=_EVENTS)
        whole: dict[str, Any] = {}
        async for event in self._turn(asked):
            if "error" in event:
                return _answer(event, event["error"]["code"])
            whole = _joined(whole, event)
        return _answer(whole)

    async def _events(self, asked: VllmTurn) -> AsyncIterator[bytes]:
        async for event in self._turn(asked):
            yield b"data: %b\n\n" % msgspec.json.encode(event)
        yield b"data: [DONE]\n\n"

    async def _turn(self, asked: VllmTurn) -> AsyncIterator[dict[str, Any]]:
        """The events of one turn; the last one has a finish reason, or is an error."""
        from vllm import SamplingParams  # noqa: PLC0415  # only inside engines
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        rid = asked.rid or f"rose-{next(self._numbers)}"
        prompt: dict[str, Any] = {"prompt_token_ids": asked.ids}
        if asked.key:
            prompt["cache_salt"] = asked.key
        self._live[rid] = self._live.get(rid, 0) + 1
        try:
            sampling = SamplingParams(**asked.sampling, output_kind=RequestOutputKind.DELTA)
            total = 0
            async for output in self._engine.generate(prompt, sampling, rid):
                total += len(output.outputs[0].token_ids)
                yield _event(output, rid, total, asked)
        except (VLLMClientError, ValueError, TypeError) as error:  # of the request's own making
            yield _error(str(error), 400)
        finally:
            self._live[rid] -= 1
            if not self._live[rid]:
                del self._live[rid]

    async def abort(self, request: Any) -> Any:  # noqa: ANN401
        """End turns by the beginning of their names, or all of them."""
        body = msgspec.json.decode(await request.body(), type=dict[str, Any])
        beginning = str(body.get("rid") or "")
        if beginning or body.get("abort_all"):
            named = [rid for rid in self._live if rid.startswith(beginning)]
            await self._engine.abort(named)
        return _answer({})

    async def ready(self, _request: Any) -> Any:  # noqa: ANN401
        """Whether turns are taken."""
        await self._engine.check_health()
        return _answer({})

    async def model_info(self, _request: Any) -> Any:  # noqa: ANN401
        """What runs here."""
        model = self._engine.model_config.model
        return _answer({"model_path": model, "is_generation": True})


def _event(output: Any, rid: str, total: int, asked: VllmTurn) -> dict[str, Any]:  # noqa: ANN401
    """One output of vLLM as an event of SGLang's incremental stream."""
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    spans = [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in answer.weight_versions or ()
    ]
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish(answer, total),
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": total,
        "cached_tokens": output.num_cached_tokens or 0,
        "weight_version": spans[-1]["version"] if spans else "",
        "weight_versions": spans,
        SCALE: LogitScale.TEMPERATURE.value,
    }
    if "logprobs" in asked.sampling:
        given = list(answer.logprobs or ())
        meta["output_token_logprobs"] = [
            [found[one].logprob, one, None] for one, found in zip(ids, given, strict=True)
        ]
        meta["output_token_logprobs_length"] = total
        if most := asked.sampling["logprobs"]:
            meta["output_top_logprobs"] = [_best(found, most) for found in given]
    if output.prompt_logprobs:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        meta["input_token_logprobs"] = [
            [found[one].logprob if found else None, one, None] for one, found in pairs
        ]
    return {"text": answer.text, "output_ids": ids, "meta_info": meta}


def _best(found: Mapping[int, Any], most: int) -> list[list[Any]]:
    """The likeliest tokens at one place, best first; the sampled one may be none of them."""
    ranked = sorted(found.items(), key=lambda pair: int(pair[1].rank))
    return [[one.logprob, token, None] for token, one in ranked[:most]]


def _finish(answer: Any, total: int) -> dict[str, Any] | None:  # noqa: ANN401
    match answer.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": total}
        case "stop":
            # Without a reason it was the model's own end, which is the last token.
            last = answer.token_ids[-1] if answer.token_ids else None
            matched = last if answer.stop_reason is None else answer.stop_reason
            return {"type": "stop", "matched": matched}
        case "abort":
            return {"type": "abort", "message": "Abort in the scheduler"}
        case other:
            return {"type": "abort", "message": f"vLLM ended it: {other}", "status_code": 500}


def _joined(whole: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """What all events so far say together."""
    if not whole:
        return event
    meta = {**whole["meta_info"], **event["meta_info"]}
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in meta:
            meta[name] = whole["meta_info"][name] + event["meta_info"][name]
    return {
        "text": whole["text"] + event["text"],
        "output_ids": whole["output_ids"] + event["output_ids"],
        "meta_info": meta,
    }


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": code}}


def _answer(body: object, status: int = 200) -> Any:  # noqa: ANN401
    from starlette.responses import Response  # noqa: PLC0415  # only inside engines

    return Response(msgspec.json.encode(body), status, media_type="application/json")
