"""The lease as one engine whose weights are pushed: slime, AReaL and prime-rl by configuration.

| SGLang's words | vLLM's (prime-rl) | here |
|---|---|---|
| ``POST /pause_generation`` | ``POST /pause?mode=`` | hold turns; end, keep or await what runs |
| ``POST /update_weights_from_disk`` | ``POST /update_weights`` | ingest, then the quorum |
| ``POST /continue_generation`` | ``POST /resume`` | begin turns again |
| ``POST /pull_weights`` (slime) | | the folder that the next update means |
| ``GET/POST /flush_cache`` | ``POST /reset_prefix_cache`` | nothing: caches are apart by version |
| | ``/get_world_size``, ``/init_weight_transfer_engine`` (SkyRL) | a fixed size; nothing to join |
| | ``/start_weight_update``, ``/update_weights {update_info}`` | the folder that the finish means |
| | ``/finish_weight_update`` | ingest, then the quorum |
| | ``/shutdown_weight_transfer_engine`` | nothing: nothing was joined |

vLLM's own sequence, and what an update may be in it:

    Idle --start--> Started --update: a folder--> Sent --finish: published--> Idle
    Started or Sent --start--> Started            (a trainer that died begins again)

The trainer may delete its folder as soon as it has its answer. Ways of pushing that need a place in
a group of GPUs are refused by name (501). Next: ``barrier``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rose_core.identity import WeightVersion
from rose_router.errors import BadRequest, NotHere
from rose_router.http.admission.bodies import read_body
from rose_router.http.dialects.common import Whole, read_as
from rose_router.turns.barrier import Barrier
from rose_router.turns.service import Service

_ENDS = frozenset({"abort"})
_AWAITS = frozenset({"wait"})
_GOES_ON = frozenset({"keep", "in_place", "retract"})

_MOST_PULLED = 8

# Transports that reach into an engine's own process or GPUs.
_REFUSED = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)


PostLabel = Callable[[web.Request, dict[str, str]], Awaitable[None]]


def routes(
    service: Service, barrier: Barrier, post_label: PostLabel | None = None
) -> list[web.RouteDef]:
    """The handlers of one lease; ``post_label`` passes names of versions on to other replicas."""
    calls = _Calls(service, barrier, post_label)
    served = [
        web.post("/pause_generation", calls.pause),
        web.post("/pause", calls.pause),
        web.post("/continue_generation", calls.resume),
        web.post("/resume", calls.resume),
        web.get("/is_paused", calls.is_paused),
        web.get("/flush_cache", _flushed),
        web.post("/flush_cache", _flushed),
        web.post("/reset_prefix_cache", _nothing),
        web.post("/init_weight_transfer_engine", _agreed),
        web.get("/get_world_size", calls.world_size),
        web.post("/update_weights_from_disk", calls.update),
        web.post("/update_weights", calls.update_weights),
        web.post("/start_weight_update", calls.start_native),
        web.post("/finish_weight_update", calls.finish_native),
        web.post("/shutdown_weight_transfer_engine", _nothing_joined),
        web.post("/pull_weights", calls.pull),
        web.post("/labels", calls.label),
    ]
    return served + [web.post(path, _refused) for path in _REFUSED]


class _Calls:
    def __init__(self, service: Service, barrier: Barrier, post_label: PostLabel | None) -> None:
        self._service = service
        self._barrier = barrier
        self._post_label = post_label
        self._pulled: dict[str, str] = {}
        self._native: _NativeUpdate | None = None

    async def _post(self, request: web.Request, version: WeightVersion, label: str) -> None:
        if self._post_label is not None:
            await self._post_label(request, {"version": str(version), "label": label})

    async def pause(self, request: web.Request) -> web.Response:
        """Hold turns; the mode says what becomes of those that run."""
        body = await _body(request)
        mode = str(request.query.get("mode") or body.get("mode") or "abort")
        if mode not in _ENDS | _AWAITS | _GOES_ON:
            message = f"mode: expected abort, wait, keep, in_place or retract, got {mode!r:.40}"
            raise BadRequest("InvalidMode", message)
        self._barrier.hold()
        if mode in _ENDS:
            self._service.abort_all()
        if mode in _ENDS | _AWAITS:
            await self._service.until_idle()
        return _json({"status": "ok", "message": f"held, {mode}"})

    async def resume(self, _request: web.Request) -> web.Response:
        """Begin turns again."""
        self._barrier.release()
        return _json({"status": "ok", "message": "turns begin again"})

    async def world_size(self, _request: web.Request) -> web.Response:
        """SkyRL's question; a number that does not move while engines come and go."""
        return _json({"world_size": self._service.settings.reported_gpus})

    async def is_paused(self, _request: web.Request) -> web.Response:
        """VLLM's question."""
        return _json({"is_paused": self._barrier.held})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Two callers' word: prime-rl pushes a folder, vLLM's client sends in its sequence."""
        body = await _body(request)
        if "update_info" not in body:
            return await self._update(request, body)
        info = body["update_info"]
        folder = info.get("weight_dir") if isinstance(info, dict) else None
        if not isinstance(folder, str) or not folder:
            # Names, shapes and handles of tensors that lie in a GPU or come over a group of them.
            return await _refused(request)
        if self._native is None:
            message = "update_weights: expected start_weight_update before it"
            raise BadRequest("NotStarted", message)
        self._native.folder = folder
        return _json({"message": "the finish takes this folder"})

    async def start_native(self, _request: web.Request) -> web.Response:
        """VLLM's sequence begins."""
        self._native = _NativeUpdate()
        return _json({"message": "send update_info.weight_dir, then finish_weight_update"})

    async def finish_native(self, request: web.Request) -> web.Response:
        """VLLM's sequence ends: answers when the folder is safe and the quorum runs it."""
        label = (await _body(request)).get("weight_version")
        ours = self._native
        if ours is None or not ours.folder:
            message = "finish_weight_update: expected start_weight_update and an update before it"
            raise BadRequest("NothingSent", message)
        answer = await self._take(request, ours.folder, str(label or ""))
        if self._native is ours:  # a trainer that did not wait for the quorum may have begun again
            self._native = None
        return _json(answer)

    async def update(self, request: web.Request) -> web.Response:
        """Take a checkpoint; answers when it is safe and the quorum runs it."""
        return await self._update(request, await _body(request))

    async def _update(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        path = body.get("model_path") or body.get("weight_dir")
        if not isinstance(path, str):
            message = "model_path (or weight_dir): expected the folder of a safetensors checkpoint"
            raise BadRequest("NoPath", message)
        path = self._pulled.get(path, path)
        if body.get("abort_all_requests") or body.get("abort_all_request"):
            self._service.abort_all()
        return _json(await self._take(request, path, str(body.get("weight_version") or "")))

    async def _take(self, request: web.Request, path: str, label: str) -> dict[str, Any]:
        version = await self._barrier.update(path, label)
        await self._post(request, version, label)
        answer: dict[str, Any] = {"success": True, "message": f"published as {version}"}
        return answer | {"num_paused_requests": 0, "weight_version": str(version)}

    async def pull(self, request: web.Request) -> web.Response:
        """Slime's copy to an engine's own disk: nothing is copied here.

        The update that follows names the engine's folder and means the one pulled from, which
        ``rose ingest`` reads where it lies.
        """
        body = await _body(request)
        local, source = body.get("local_checkpoint_dir"), body.get("source_dir")
        if not isinstance(local, str) or not isinstance(source, str):
            message = "local_checkpoint_dir, source_dir: expected the names of two folders"
            raise BadRequest("NoPath", message)
        number = read_as(body, _Pulled).target_version or 0
        self._pulled.pop(local, None)
        self._pulled[local] = folder = f"{source.rstrip('/')}/weight_v{number:06d}"
        while len(self._pulled) > _MOST_PULLED:
            self._pulled.pop(next(iter(self._pulled)))
        return _json({"success": True, "message": f"the next update takes {folder}"})

    async def label(self, request: web.Request) -> web.Response:
        """Another replica took a push: the version, and the trainer's own name of it."""
        body = await read_body(request)
        try:
            version = WeightVersion.parse(str(body.get("version")))
        except ValueError as error:
            raise BadRequest("InvalidVersion", str(error)) from error
        self._barrier.name(version, str(body.get("label") or ""))
        return _json({"status": "ok"})


@dataclass(eq=False)
class _NativeUpdate:
    """VLLM's sequence from its start to its finish; ``folder`` is empty until one was sent."""

    folder: str = ""


class _Pulled(msgspec.Struct):
    """Which of the folders."""

    target_version: Whole | None = None


async def _body(request: web.Request) -> dict[str, Any]:
    return await read_body(request) if request.body_exists else {}


async def _flushed(_request: web.Request) -> web.Response:
    return web.Response(text="Nothing to flush: prefix caches are kept apart by weight version.\n")


async def _nothing(_request: web.Request) -> web.Response:
    """VLLM's answer is empty, and so must ours be: SkyRL reads JSON where there is a body."""
    return web.Response()


async def _nothing_joined(_request: web.Request) -> web.Response:
    return _json({"message": "nothing was joined"})


async def _agreed(request: web.Request) -> web.Response:
    """A backend named ``rose`` has nothing to agree on; every other one joins a group of GPUs."""
    info = (await _body(request)).get("init_info")
    if isinstance(info, dict) and info.get("backend") == "rose":
        return _json({"status": "ok"})
    return await _refused(request)


async def _refused(request: web.Request) -> web.Response:
    message = (
        f"{request.path}: this is a lease, not one engine; engines come and go. Push weights as a "
        "checkpoint on disk (/update_weights_from_disk) or with rose_trainer.Publisher"
    )
    raise NotHere("NotHere", message)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
