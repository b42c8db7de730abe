"""Async client of an engine's own HTTP server: turns, aborts and figures.

It knows SGLang's shapes, which ROSE's plugin teaches vLLM (``vllm.turns``), and nothing of ROSE's
policies: weight-sync's probe, the benchmarks and the tests build on it. The fake engine answers it
the same way (contract tests in ``tests/engines``). Streams may be cumulative on the wire; here
every event carries what is new beside the totals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from rose_core.unreadable import UNREADABLE
from rose_engines.errors import EngineRefused, EngineUnavailable


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens ``start <= i < end`` were sampled with the weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    """The state of one request, after an event or at its end.

    Attributes:
        output_ids: all output tokens so far.
        logprobs: their log-probabilities; empty when they were not asked for.
        finish_reason: SGLang's object (``type`` is ``stop``, ``length`` or ``abort``), None while
            the request runs.
        spans: version spans; complete in the last event, absent before it.
        meta: SGLang's ``meta_info`` as it came.
    """

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: dict[str, Any] | None = None
    spans: tuple[VersionSpan, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """The request has ended."""
        return self.finish_reason is not None


def parse_generation(body: dict[str, Any], before: Generation | None = None) -> Generation:
    """Read a reply or a stream event of ``/generate``, cumulative or of new tokens only.

    Args:
        body: the JSON object.
        before: what the same stream has brought so far.

    Raises:
        EngineRefused: the object is an error, or no reply at all.
    """
    meta = body.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineRefused(_error_text(body), int(body.get("code") or 0))
    ids = tuple(body.get("output_ids") or ())
    logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    text = body.get("text") or ""
    seen = before.output_ids if before else ()
    if before and ids[: len(seen)] != seen:
        fresh = max(0, int(meta.get("completion_tokens", 0)) - len(seen))
        repeats = len(ids) > fresh  # an abort: its last token and the whole text
        text = text[(len(text) - len(before.text)) // 2 :] if repeats else before.text + text
        ids, logprobs = seen + ids[:fresh], before.logprobs + logprobs[:fresh]
    return Generation(
        text=text,
        output_ids=ids,
        logprobs=logprobs,
        finish_reason=meta.get("finish_reason"),
        spans=tuple(
            VersionSpan(span["version"], span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
        ),
        meta=meta,
    )


def _error_text(body: dict[str, Any]) -> str:
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message"))
    return str(body.get("message") or error or body)[:500]


class TurnClient:
    """One engine; ``async with TurnClient(url) as engine``.

    Args:
        url: base URL.
        token: bearer token, for engines behind an authorised proxy.
        session: a shared session; one is made (and closed) otherwise.
        connect_seconds: most time for a connection.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        session: aiohttp.ClientSession | None = None,
        connect_seconds: float = 5.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = session
        self._own = session is None
        # No total time limit: a stopped engine answers when its permit opens again.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)

    async def __aenter__(self) -> Self:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._own and self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        **more: Any,  # noqa: ANN401  # further fields of the request, as SGLang takes them
    ) -> Generation:
        """One whole turn.

        Raises:
            EngineRefused, EngineUnavailable: no turn was generated.
        """
        last = Generation("", ())
        async for event in self.stream(input_ids, sampling, rid=rid, logprobs=logprobs, **more):
            last = event
        return last

    async def stream(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        **more: Any,  # noqa: ANN401  # further fields of the request, as SGLang takes them
    ) -> AsyncIterator[Generation]:
        """One turn, event by event; the last one is ``finished``.

        Raises:
            EngineRefused: the engine answered with an error.
            EngineUnavailable: it does not answer, or hung up before the end; what came until then
                was yielded.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": logprobs,
            **({"rid": rid} if rid else {}),
            **more,
        }
        last = Generation("", ())
        async for event in self._events("/generate", body):
            last = parse_generation(event, last)
            yield last
        if not last.finished:
            raise EngineUnavailable(f"{self._url} hung up after {len(last.output_ids)} tokens")

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The ``data:`` objects of a server-sent stream, up to ``[DONE]``."""
        try:
            async with self._open("POST", path, body) as response:
                await self._check(response)
                async for line in _lines(response.content):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield msgspec.json.decode(data, type=dict[str, Any])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnavailable(f"{self._url}: {error}") from error
        except UNREADABLE as error:
            raise EngineRefused(f"{self._url}: an event is no JSON object: {error}") from error

    async def prompt_logprobs(
        self, input_ids: Sequence[int], cache_key: str = ""
    ) -> tuple[str, tuple[float, ...]]:
        """The version that computed it, and the log-prob of every token but the first.

        Args:
            input_ids: the prompt.
            cache_key: the version that is meant, where the engine holds adapters of several runs.

        Raises:
            EngineRefused: the engine answered with an error, or without them.
            EngineUnavailable: it does not answer, or hung up before the end.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1}
        more: dict[str, Any] = {"extra_key": cache_key} if cache_key else {}
        reply = await self.generate(input_ids, sampling, logprob_start_len=0, **more)
        pairs = reply.meta.get("input_token_logprobs") or ()
        found = tuple(float(entry[0]) for entry in pairs if entry[0] is not None)
        if len(found) != len(input_ids) - 1 or not reply.spans:
            what = f"{len(found)} log-probs for a prompt of {len(input_ids)} tokens"
            raise EngineRefused(f"{self._url}: {what}, {len(reply.spans)} version spans")
        return reply.spans[-1].version, found

    async def abort(self, rid: str) -> None:
        """End a request; unknown ids are ignored. SGLang matches ids by *prefix*.

        Raises:
            EngineRefused, EngineUnavailable: the engine did not take it.
        """
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request.

        Raises:
            EngineRefused, EngineUnavailable: the engine did not take it.
        """
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def slow_down(self, seconds: float | None) -> None:
        """Sleep this long in every forward pass (tests); None = no more.

        Raises:
            EngineRefused, EngineUnavailable: the engine did not take it.
        """
        await self._call("POST", "/slow_down", {"forward_sleep_time": seconds})

    async def model_info(self) -> dict[str, Any]:
        """``/model_info``. Its weight version is the HTTP server's, not the scheduler's.

        Raises:
            EngineRefused, EngineUnavailable: no answer.
        """
        return msgspec.json.decode(await self._call("GET", "/model_info"), type=dict[str, Any])

    async def loads(self) -> dict[str, Any]:
        """The first entry of ``/v1/loads``: requests running and waiting, tokens in use.

        Raises:
            EngineRefused, EngineUnavailable: no answer, or none with loads.
        """
        body = msgspec.json.decode(await self._call("GET", "/v1/loads"), type=dict[str, Any])
        loads: list[dict[str, Any]] = body.get("loads") or []
        if not loads:
            raise EngineRefused(f"{self._url}/v1/loads names no load")
        return loads[0]

    async def metrics(self) -> str:
        """Prometheus text.

        Raises:
            EngineRefused, EngineUnavailable: no answer.
        """
        return (await self._call("GET", "/metrics")).decode()

    async def ready(self) -> bool:
        """Whether the engine takes requests; False also when it does not answer."""
        try:
            await self._call("GET", "/ready")
        except (EngineRefused, EngineUnavailable):
            return False
        return True

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            async with self._open(method, path, body) as response:
                await self._check(response)
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnavailable(f"{self._url}{path}: {error}") from error

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise EngineUnavailable("use the client inside `async with`")
        return self._session.request(
            method, self._url + path, json=body, headers=self._headers, timeout=self._timeout
        )

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        data = await response.read()
        try:
            text = _error_text(msgspec.json.decode(data, type=dict[str, Any]))
        except UNREADABLE:
            text = data[:500].decode(errors="replace")
        raise EngineRefused(f"{response.url}: {response.status} {text}", response.status)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: cumulative events outgrow the reader's own line limit."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
