"""An engine that computes nothing: ``python -m bench.router.stub --token-seconds S``.

Its events hold new tokens only, as those of ROSE's own rollout engines do; with ``--cumulative``
all tokens so far, as SGLang's do by default.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import logging
import ssl
import sys
import tempfile
import time
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from rose_wire.certificates import fingerprint, make_own

VERSION = "bench@1.0"


def event(rid: str, prompt: int, count: int, most: int, start: int = 0) -> bytes:
    """The event of token ``count``, with those from ``start``, as SGLang with ROSE's plugin."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": most} if count == most else None,
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": VERSION,
        "weight_versions": [{"version": VERSION, "start": 0, "end": count}],
        "output_token_logprobs": [[-0.5, token, None] for token in range(start, count)],
    }
    ids = list(range(start, count))
    body = {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def application(token_seconds: float, *, cumulative: bool = False) -> web.Application:
    """The stub."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        most = body["sampling_params"]["max_new_tokens"]
        rid, prompt = body.get("rid", "x"), len(body["input_ids"])
        if not body.get("stream"):
            await asyncio.sleep(token_seconds * most)
            frame = event(rid, prompt, most, most)[len(b"data: ") :]
            return web.Response(body=frame, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if token_seconds <= 0:
            await response.write(event(rid, prompt, most, most) + b"data: [DONE]\n\n")
            return response
        began = time.monotonic()
        for count in range(1, most + 1):
            # By a timetable: an engine's next step does not wait for whoever reads the last one.
            await asyncio.sleep(max(0.0, began + count * token_seconds - time.monotonic()))
            start = 0 if cumulative else count - 1
            await response.write(event(rid, prompt, count, most, start))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def fine(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "stub", "served_model_name": "stub"})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", fine)
    for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/v1/models"):
        app.router.add_get(path, fine)
    return app


def _certificate() -> tuple[ssl.SSLContext, str]:
    """A certificate of its own, as an engine host makes it, and its SHA-256."""
    now = dt.datetime.now(dt.UTC)
    key, certificate = make_own("bench", dt.timedelta(hours=1), now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, fingerprint(certificate)


async def serve(flags: argparse.Namespace) -> None:
    """Run until killed; prints its URL."""
    # sglang-router asks for HTTP/2 first; that is no error here.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = application(flags.token_seconds, cumulative=flags.cumulative)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls, pin = None, ""
    if flags.tls:
        tls, pin = _certificate()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    scheme = "https" if flags.tls else "http"
    sys.stdout.write(f"{scheme}://127.0.0.1:{runner.addresses[0][1]} {pin}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--cumulative", action="store_true")
    parser.add_argument("--tls", action="store_true", help="as engine hosts speak by default")
    # The less the stub needs, the less of what is measured is its own.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args()))
