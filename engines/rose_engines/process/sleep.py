"""Ask a serving engine to let go of its memory and to take it back: SGLang's and vLLM's routes.

| | SGLang | vLLM (``VLLM_SERVER_DEV_MODE=1``) |
|---|---|---|
| idle | ``/v1/loads`` | ``/metrics`` |
| release | pause (retract), ``/release_memory_occupation`` | ``/sleep?level=1``, ``/is_sleeping`` |
| resume | ``/resume_memory_occupation``, continue | ``/wake_up``, ``/is_sleeping`` |
| probe | ``/generate``, greedy | ``/v1/completions``, greedy |

Both answer 200 and free nothing where the feature is off, so an answer here proves nothing: the
caller measures. SGLang is paused first because a release beside a request ends it, and gives its
weights only with ``--enable-weights-cpu-backup``: without it they would come back undefined.
Next step: ``rose_agent.sleeper.sleeper``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from rose_core.telemetry.dialects import LOADS, METRICS, Figures
from rose_core.unreadable import UNREADABLE
from rose_engines.errors import EngineUnavailable

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
# A sleeping engine keeps a probe waiting; meanwhile nobody looks at the grant.
_PROBE = aiohttp.ClientTimeout(total=5.0)
_PROBES = frozenset({"/generate", "/v1/completions"})
# Low ids are in every vocabulary; what they mean does not matter.
_PROMPT = [1, 2, 3, 4, 5]
_TOKENS = 8


class SleepRefused(EngineUnavailable):
    """The engine has no such route, or refused: nothing was released."""


class ServingEngine(Protocol):
    """A serving engine that can sleep."""

    async def idle(self) -> bool | None:
        """No request is running or waiting; None = it does not say."""

    async def release(self) -> None:
        """Let go of memory; what became of that has to be measured.

        Raises:
            SleepRefused: it cannot.
            EngineUnavailable: no answer; it may have released.
        """

    async def resume(self) -> None:
        """Take the memory back and serve.

        Raises:
            EngineUnavailable: no good answer.
        """

    async def probe(self) -> str:
        """A short greedy generation; the same every time while the weights are whole.

        Raises:
            EngineUnavailable: no good answer.
        """


class _Http:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a good answer.

        Raises:
            SleepRefused: another status than 200.
            EngineUnavailable: no answer.
        """
        allowed = _PROBE if path in _PROBES else _TIMEOUT
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=allowed
            ) as reply:
                payload = await reply.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{path}: {error or type(error).__name__}") from error
        if reply.status != 200:
            text = payload[:200].decode("utf-8", "replace")
            raise SleepRefused(f"{path} answered {reply.status}: {text}")
        return payload

    async def ask(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        """The answer's JSON, as far as it is of this kind.

        Raises:
            EngineUnavailable: it is not.
        """
        try:
            return msgspec.json.decode(await self.call(method, path, body), type=kind)
        except UNREADABLE as error:
            raise EngineUnavailable(f"{path} answered something else: {error}") from error


class _Info(msgspec.Struct):
    enable_weights_cpu_backup: bool | None = False


class _Tokens(msgspec.Struct):
    output_ids: list[int]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_Model, ...]


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Choice(msgspec.Struct):
    text: str


class _Text(msgspec.Struct):
    choices: tuple[_Choice, ...]


class SGLangServing:
    """A serving SGLang."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._http = _Http(session, url)
        self._tags: list[str] = []

    async def idle(self) -> bool | None:
        """From its load page."""
        path, read = LOADS["SGLang"]
        return _idle(read(await self._http.call("GET", path)))

    async def release(self) -> None:
        """Pause, then release what it can bring back whole."""
        tags = await self._releasable()
        await self._http.call("POST", "/pause_generation", {"mode": "retract"})
        try:
            await self._http.call("POST", "/release_memory_occupation", {"tags": tags})
        except SleepRefused:
            await self._http.call("POST", "/continue_generation", {})
            raise

    async def resume(self) -> None:
        """Resume what was released, then continue."""
        tags = await self._releasable()
        await self._http.call("POST", "/resume_memory_occupation", {"tags": tags})
        await self._http.call("POST", "/continue_generation", {})

    async def probe(self) -> str:
        """The tokens."""
        sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
        body = {"input_ids": _PROMPT, "sampling_params": sampling}
        answer = await self._http.ask("POST", "/generate", _Tokens, body)
        return ",".join(map(str, answer.output_ids))

    async def _releasable(self) -> list[str]:
        if not self._tags:
            info = await self._http.ask("GET", "/server_info", _Info)
            whole = info.enable_weights_cpu_backup
            self._tags = ["kv_cache", "weights"] if whole else ["kv_cache"]
        return self._tags


class VllmServing:
    """A serving vLLM."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._http = _Http(session, url)
        self._model = ""

    async def idle(self) -> bool | None:
        """From its metrics: its load page is zero for ever unless it was started to count."""
        page = await self._http.call("GET", "/metrics")
        return _idle(METRICS["VLLM"](page.decode("utf-8", "replace")))

    async def release(self) -> None:
        """Weights to host memory, KV cache dropped."""
        await self._http.call("POST", "/sleep?level=1")
        if not await self._sleeping():
            raise SleepRefused("/sleep answered 200, and /is_sleeping says that it does not")

    async def resume(self) -> None:
        """Wake up."""
        await self._http.call("POST", "/wake_up")
        if await self._sleeping():
            raise EngineUnavailable("/wake_up answered 200, and /is_sleeping says it sleeps on")

    async def _sleeping(self) -> bool:
        return (await self._http.ask("GET", "/is_sleeping", _Sleeping)).is_sleeping

    async def probe(self) -> str:
        """The text."""
        if not self._model:
            listed = await self._http.ask("GET", "/v1/models", _Models)
            self._model = listed.data[0].id if listed.data else ""
        body = {
            "model": self._model,
            "prompt": _PROMPT,
            "temperature": 0,
            "max_tokens": _TOKENS,
            "ignore_eos": True,
        }
        answer = await self._http.ask("POST", "/v1/completions", _Text, body)
        return "".join(choice.text for choice in answer.choices)


SERVING: dict[str, Callable[[aiohttp.ClientSession, str], ServingEngine]] = {
    "SGLang": SGLangServing,
    "VLLM": VllmServing,
}
"""By the pool's engine kind."""


def _idle(figures: Figures) -> bool | None:
    if figures.running is None:
        return None
    return figures.running == 0 and not figures.waiting
