"""HTTP face of the fake engine: the part of SGLang's API that ROSE and its tests use.

POST /generate         one request, plain or streamed (cumulative), SGLang's shapes
POST /v1/completions   501: text is a real engine's; it has the route, and so it is no 404
POST /abort_request    by id prefix, or everything
POST /slow_down        {"forward_sleep_time": seconds per iteration, null = back to normal}
GET  /model_info  /v1/loads  /metrics  /health  /ready

With a key only the routes of ``rose_engines.process.exposed_routes`` are there, as in SGLang under
the engine host.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler, Middleware

from rose_core.rollouts.requests.logprobs import SCALE, LogitScale
from rose_engines.fake.model import prompt_logprobs
from rose_engines.fake.scheduler import FakeRequest, FakeScheduler
from rose_engines.process import exposed_routes

END = 256
"""Ends an answer that follows a script; no byte, as in ``rose_dev.scripted``."""

# As in SGLang the first counter moves when a request arrives and the second when it ends: what
# compares them with the wire must not take one for the other.
_NUMBERS = itertools.count(1)

_METRICS = """\
# TYPE sglang:http_requests_total counter
sglang:http_requests_total{{endpoint="/generate",method="POST"}} {arrived}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{model_name="fake"}} {ended}
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="fake"}} {prompt_tokens}
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="fake"}} {generated_tokens}
# TYPE sglang:num_aborted_requests_total counter
sglang:num_aborted_requests_total{{model_name="fake"}} {aborted}
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="fake"}} {running}
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{model_name="fake"}} {waiting}
"""


def _at_the_door(key: str) -> Middleware:
    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        status = exposed_routes.refusal(request.method, request.path, given, key)
        return web.Response(status=status) if status else await handler(request)

    return refuse


class FakeServer:
    """Serves a ``FakeScheduler`` over HTTP; ``application()`` goes into any aiohttp runner.

    Args:
        scheduler: whose requests they are.
        model: its name.
        key: see ``rose_engines.process.exposed_routes``.
        scale: what it says of its log-probs (``rose_core.rollouts.requests.logprobs``).
    """

    def __init__(
        self,
        scheduler: FakeScheduler,
        model: str = "fake",
        key: str = "",
        scale: str = LogitScale.TEMPERATURE.value,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._key = key
        self._normal_seconds = scheduler.token_seconds
        self._scale = scale
        self._number = next(_NUMBERS)

    def application(self) -> web.Application:
        """The aiohttp application; the engine loop lives as long as it does."""
        app = web.Application(client_max_size=64 << 20, middlewares=[_at_the_door(self._key)])
        app.cleanup_ctx.append(self._loop)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/abort_request", self._abort),
                web.post("/slow_down", self._slow_down),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.get("/metrics", self._metrics),
                web.get("/health", self._healthy),
                web.get("/ready", self._healthy),
            ]
        )
        return app

    async def _loop(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._scheduler.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        self._scheduler.counters.arrived += 1
        try:
            body = await http.json()
            request = self._parse(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return web.json_response({"error": {"message": f"bad request: {error}"}}, status=400)
        slots = self._scheduler.slots
        if slots is not None:
            slot = slots.slot_for(body.get("extra_key") or "")
            if slot is None:
                message = "this engine holds no adapter of that run now"
                return web.json_response({"error": {"message": message}}, status=503)
            request.slot = slot
        wants_logprobs = bool(body.get("return_logprob"))
        request.wants_experts = bool(body.get("return_routed_experts"))
        self._scheduler.submit(request)
        try:
            if body.get("stream"):
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                with contextlib.suppress(ClientConnectionResetError):  # the caller hung up
                    await self._stream(http, response, request, wants_logprobs)
                return response
            while request.finish is None:
                request.changed.clear()
                await request.changed.wait()
            return web.json_response(self._reply(request, wants_logprobs))
        finally:
            self._scheduler.counters.ended += 1
            if request.finish is None:  # the caller hung up
                self._scheduler.abort(request.rid)

    def _parse(self, body: dict[str, Any]) -> FakeRequest:
        sampling = body.get("sampling_params") or {}
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("exactly one of text and input_ids is needed")
        prompt = list(text.encode()) if text is not None else [int(token) for token in ids or ()]
        if not prompt:
            raise ValueError("the prompt is empty")
        most = int(sampling.get("max_new_tokens", 128))
        if most < 0:
            raise ValueError(f"max_new_tokens is {most}")
        if (body.get("logprob_start_len") or 0) > len(prompt):
            raise ValueError("logprob_start_len lies beyond the prompt")
        return FakeRequest(
            rid=body.get("rid") or self._scheduler.new_name(),
            prompt=prompt,
            most=most,
            stop_tokens=frozenset(sampling.get("stop_token_ids") or ()) | self._ends(),
            script=self._scheduler.script,
            wants_prompt_logprobs=body.get("logprob_start_len") == 0,
        )

    def _ends(self) -> frozenset[int]:
        return frozenset() if self._scheduler.script is None else frozenset({END})

    async def _stream(
        self,
        http: web.Request,
        response: web.StreamResponse,
        request: FakeRequest,
        wants_logprobs: bool,
    ) -> None:
        await response.prepare(http)
        sent = 0
        while True:
            finished = request.finish is not None
            if len(request.output) > sent or finished:
                sent = len(request.output)
                reply = json.dumps(self._reply(request, wants_logprobs))
                await response.write(f"data: {reply}\n\n".encode())
            if finished:
                break
            request.changed.clear()
            await request.changed.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _reply(self, request: FakeRequest, wants_logprobs: bool) -> dict[str, Any]:
        version = (
            request.spans[-1][0] if request.spans else self._scheduler.version_of(request.slot)
        )
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": 0,
            "weight_version": version,
            SCALE: self._scale,
        }
        meta["weight_versions"] = [
            {"version": name, "start": start, "end": end} for name, start, end in request.spans
        ] or [{"version": version, "start": 0, "end": 0}]
        if wants_logprobs:
            pairs = zip(request.logprobs, request.output, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["output_token_logprobs_length"] = len(request.output)
        if wants_logprobs and request.wants_prompt_logprobs:
            found = prompt_logprobs(request.prompt, meta["weight_versions"][0]["version"])
            paired = zip(found, request.prompt, strict=True)
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in paired]
        if request.wants_experts and request.finish is not None:
            meta["routed_experts"] = self._experts([*request.prompt, *request.output])
        if request.script is not None:
            text = request.script.text(request.output)
        else:
            text = bytes(request.output).decode("latin-1")
        return {"text": text, "output_ids": list(request.output), "meta_info": meta}

    def _experts(self, context: list[int]) -> str:
        """Two numbers a token, of every token that was an input: itself, and this engine's."""
        rows = array("i", (n for token in context[:-1] for n in (token, self._number)))
        return base64.b64encode(rows.tobytes()).decode()

    async def _completions(self, _: web.Request) -> web.Response:
        return web.Response(status=501, text="the fake engine answers token ids: POST /generate")

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        self._scheduler.abort(body.get("rid") or "", everything=bool(body.get("abort_all")))
        return web.Response()

    async def _slow_down(self, http: web.Request) -> web.Response:
        seconds = (await http.json()).get("forward_sleep_time")
        self._scheduler.token_seconds = self._normal_seconds if seconds is None else float(seconds)
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model,
                "served_model_name": self._model,
                "is_generation": True,
                "weight_version": self._scheduler.version_of(),
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        scheduler = self._scheduler
        used = sum(len(item.prompt) + len(item.output) for item in scheduler.running)
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "max_total_num_tokens": 16384,
            "max_running_requests": scheduler.max_running,
            "token_usage": used / 16384,
        }
        return web.json_response({"version": "fake", "loads": [load]})

    async def _metrics(self, _: web.Request) -> web.Response:
        counters = self._scheduler.counters
        text = _METRICS.format(
            arrived=counters.arrived,
            ended=counters.ended,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            aborted=counters.aborted,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
        )
        return web.Response(text=text)

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response()
