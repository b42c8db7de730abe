"""ROSE's plugin inside SGLang: permit, weight session and cache keys at iteration boundaries.

SGLang calls ``register`` in every engine process (entry point ``sglang.srt.plugins``). It hooks two
methods of the scheduler, by the framework's own registry:

- before ``Scheduler.ingest_requests``, the first step of every iteration: wait for the permit, then
  carry out a pending commit. Only rank 0 decides: with several ranks the others wait for the
  request broadcast that follows, so all stop at the same iteration; that they change their weights
  at the same one is the work of ``rose_engines.weights.multi_rank``. Requests and aborts
  that arrived during a stop are taken in before the next token is computed. While the engine waits,
  it can let go of its memory (``memory``); it then waits until it was activated again.
- before ``Scheduler.handle_generate_request``: put version and commit count into the request's
  prefix-cache key, so that no request reuses KV that older weights computed.

A third hook puts the version spans of unfinished requests into every event, a fourth says what the
log-probs are of. With adapters of several runs a request is computed with its run's (``slot_for``),
and has the label and the cache key of that run's version alone.

Whatever is not as expected ends the process with a clear reason: an engine whose stop or weights
cannot be trusted must not run. Next step: ``gate``, ``parameters``,
``rose_engines.weights.session``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rose_core.adapters import engine_name, run_of
from rose_core.rollouts.requests.logprobs import SCALE, LogitScale
from rose_core.wire.sync import AdapterSpec
from rose_engines.errors import BrokenWeights, UnsupportedEngine
from rose_engines.kv import policy as kv_policy
from rose_engines.node.gate import POLL_SECONDS, PermitGate
from rose_engines.node.permit import BadPermit
from rose_engines.process.device import torch_device
from rose_engines.process.hooks import exists, refuse, require
from rose_engines.process.launch import KV_VARIABLE, PERMIT_VARIABLE, SOCKET_VARIABLE
from rose_engines.sglang import drafts, kv_store, loading, memory, ranks, retraction
from rose_engines.sglang.arguments import ADAPTER_VARIABLE, DRAFTS_VARIABLE, FALLBACK_VARIABLE
from rose_engines.sglang.checkpoints import BEGINNING, PIECES, WEIGHTS, Checkpoints
from rose_engines.sglang.ranks import rank_of
from rose_engines.weights.adapters import AdapterSession, AdapterSlots
from rose_engines.weights.control import ControlServer
from rose_engines.weights.multi_rank import LeaderSession, MemberSession
from rose_engines.weights.parts import socket_of
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import OwnProcess

log = logging.getLogger(__name__)

BOUNDARY = "sglang.srt.managers.scheduler.Scheduler.ingest_requests"
ADMISSION = "sglang.srt.managers.scheduler.Scheduler.handle_generate_request"
REPLY_VERSIONS = "sglang.srt.utils.weight_versions.add_weight_versions_to_meta_info"
STREAM_ACCEPT = (
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
)
MAKE_ABORT = "sglang.srt.managers.scheduler._make_abort_req"
ORIGINAL_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
# Called, not hooked: the label that spans are made of, and the requests that carry it.
_NEEDED = (
    BOUNDARY,
    ADMISSION,
    STREAM_ACCEPT,
    REPLY_VERSIONS,
    "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
    "sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs",
    *memory.NEEDED,
)

# The same where requests of several runs have labels of their own.
_NEEDED_BY_SEVERAL = (
    MAKE_ABORT,
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
    "sglang.srt.utils.weight_versions.record_weight_version_events",
)

# zmq.POLLIN; an eventfd is always writable, so the default mask would never sleep.
_READABLE = 1

_registered: list[SchedulerPlugin] = []

_FACTORIES = ("tensor", "empty", "zeros", "full", "empty_like")


def registered() -> bool:
    """Whether SGLang has called ``register`` in this process and hooks were placed."""
    return bool(_registered)


def register() -> None:
    """Place the hooks; SGLang calls it in every process, without a scheduler they never run.

    Raises:
        SystemExit: this build of SGLang lacks a function that the plugin needs.
    """
    permit, control = os.environ.get(PERMIT_VARIABLE), os.environ.get(SOCKET_VARIABLE)
    if not permit and not control:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    drafting, stores = bool(os.environ.get(DRAFTS_VARIABLE)), kv_store.is_enabled()
    cpu = bool(os.environ.get("SGLANG_USE_CPU_ENGINE"))
    checkpoints = Checkpoints.from_environment()
    hooks = SchedulerPlugin(
        Path(permit) if permit else None, Path(control) if control else None, checkpoints
    )
    needed = (
        *_NEEDED,
        *(drafts.NEEDED if drafting else ()),
        *(kv_store.NEEDED if stores else ()),
        *(_NEEDED_BY_SEVERAL if hooks.adapters > 1 else ()),
    )
    require(needed, "SGLang", "0.5.23")
    HookRegistry.register(BOUNDARY, hooks.before_iteration, HookType.BEFORE)
    _place_turn_hooks(HookRegistry, HookType, hooks)
    HookRegistry.register(REPLY_VERSIONS, LogprobHook().before_versions, HookType.BEFORE)
    if checkpoints.enabled:
        HookRegistry.register(BEGINNING, checkpoints.begin, HookType.BEFORE)
        HookRegistry.register(WEIGHTS, checkpoints.around_weights, HookType.AROUND)
        for piece in filter(exists, PIECES):
            HookRegistry.register(piece, checkpoints.pass_by, HookType.BEFORE)
    if drafting:
        drafts.place_hooks(HookRegistry, HookType, cpu=cpu)
    if stores:
        kv_store.place_hooks(HookRegistry, HookType, hooks.shares, hooks.forget_weights, cpu=cpu)
    if cpu:
        HookRegistry.register(ranks.CUDA_ONLY, ranks.NoCommunicator, HookType.REPLACE)
        if os.environ.get(ADAPTER_VARIABLE) or stores:
            unpin_memory()
    _registered.append(hooks)


def _place_turn_hooks(registry: Any, kinds: Any, hooks: SchedulerPlugin) -> None:  # noqa: ANN401  # SGLang's
    """What sees each turn begin, stream and end: more where versions are adapters."""
    if hooks.adapters:
        registry.register(ADMISSION, hooks.around_request, kinds.AROUND)
    else:
        registry.register(ADMISSION, hooks.before_request, kinds.BEFORE)
    registry.register(retraction.ABORT, hooks.before_abort, kinds.BEFORE)
    if hooks.adapters > 1:
        labels = OwnLabels(hooks.label_of)
        registry.register(STREAM_ACCEPT, labels.around_accept, kinds.AROUND)
        registry.register(MAKE_ABORT, labels.around_abort, kinds.AROUND)
    else:
        registry.register(STREAM_ACCEPT, around_accept, kinds.AROUND)


class SchedulerPlugin:
    """The hooks of one scheduler process; everything is built at its first iteration.

    Args:
        permit: permit file, None = compute always.
        control: control socket, None = weights stay as they are.
        checkpoints: reports what this process does to those who might freeze it.
    """

    def __init__(self, permit: Path | None, control: Path | None, checkpoints: Checkpoints) -> None:
        self._permit_path = permit
        self._control_path = control
        self._checkpoints = checkpoints
        self._gate: PermitGate | None = None
        self._session: WeightSession | AdapterSlots | None = None
        self._started = False
        self._leader = True
        self._kv = retraction.RetractingPolicy()
        self._own_chunk = 0
        self._wake = -1
        adapter = os.environ.get(ADAPTER_VARIABLE)
        self._adapter = msgspec.json.decode(adapter, type=AdapterSpec) if adapter else None
        self._stores = kv_store.is_enabled()
        self._labels: dict[str, str] = {}  # of each adapter, by SGLang's name of it

    @property
    def adapters(self) -> int:
        """Adapters that the engine holds at a time."""
        return self._adapter.slots if self._adapter is not None else 0

    def before_iteration(self, scheduler: Any, *_: object, **__: object) -> None:  # noqa: ANN401
        """Hook: start of an iteration; nothing of the one before is under way any more."""
        if not self._started:
            self._start(scheduler)
        session = self._session
        if self._kv.holding:
            self._kv.put_back(scheduler, retraction.SPREAD_TOKENS)
            if self._leader and self._kv.holding:
                os.eventfd_write(self._wake, 1)  # an idle scheduler must come by again
        if session is None or not self._leader:
            self._pass_without_orders(session)
            self._size_chunks(scheduler)
            return
        self._drain()  # before it looks for orders: a later wake-up counts for the next time
        self._pass(session)
        while session.dormant or not (session.broken or self._is_open()):
            time.sleep(POLL_SECONDS)
            self._pass(session)
        if session.broken:
            raise BrokenWeights("an undo failed; this engine ends so that it starts afresh")
        self._size_chunks(scheduler)

    def _pass_without_orders(self, session: WeightSession | AdapterSlots | None) -> None:
        """The boundary of an engine without control socket, and of any rank but the first."""
        if session is not None:
            session.on_boundary()
            if session.broken:
                raise BrokenWeights("an undo failed; this engine ends so that it starts afresh")
        elif self._leader and self._gate is not None:
            self._gate.wait(resting=self._report)
        self._checkpoints.mark_iterating()

    def _size_chunks(self, scheduler: Any) -> None:  # noqa: ANN401
        """This iteration prefills no more tokens than the permit allows."""
        if self._gate is None or not self._own_chunk:
            return
        align = getattr(scheduler, "truncation_align_size", None) or 1
        step = math.lcm(int(scheduler.page_size), int(align))
        size = self._own_chunk // self._gate.chunk_divisor // step * step
        scheduler.chunked_prefill_size = max(size, step)

    def _report(self, resting: bool) -> None:
        """Report to its freezers; where it looks after orders it may work in the driver."""
        (self._checkpoints.mark_resting if resting else self._checkpoints.mark_iterating)()

    def _pass(self, session: WeightSession | AdapterSlots) -> None:
        """Rest while the permit is closed; behind it, a boundary."""
        session.on_rest()
        if self._gate is not None:
            self._gate.wait(session.on_rest, resting=self._report)
        self._checkpoints.mark_iterating()
        session.on_boundary()

    def _is_open(self) -> bool:
        """Asked behind a boundary, which may have taken long: an activation loads all weights."""
        return self._gate is None or self._gate.is_open()

    def before_request(self, _: object, request: Any, *__: object, **___: object) -> None:  # noqa: ANN401
        """Hook: a request enters the scheduler; its prefix-cache key names the weights."""
        if isinstance(self._session, WeightSession):
            request.extra_key = self._cache_key(request.extra_key, self._session)

    def around_request(
        self,
        original: Callable[..., None],
        scheduler: Any,  # noqa: ANN401
        request: Any,  # noqa: ANN401
        *more: object,
        **named: object,
    ) -> None:
        """Hook: a request enters a scheduler with adapters, and gets its run's."""
        slots = self._session
        if isinstance(slots, AdapterSlots):
            number = slots.slot_for(request.extra_key or "")
            if number is None:
                _refuse(scheduler, request)
                return
            request.lora_id = engine_name(number)
            request.extra_key = self._cache_key(request.extra_key, slots[number])
        original(scheduler, request, *more, **named)

    def label_of(self, request: Any) -> str:  # noqa: ANN401
        """Version label of the adapter that a request is computed with."""
        return self._labels[request.lora_id]

    def before_abort(self, scheduler: Any, *_: object, **__: object) -> None:  # noqa: ANN401
        """Hook: requests are looked for; those held back must be found."""
        self._kv.put_back(scheduler)

    def _cache_key(self, own: str | None, session: WeightSession) -> str:
        """Key of KV computed by the present weights; ``own`` is what the caller asked for."""
        run = f"{session.run}:" if isinstance(session, AdapterSession) and session.run else ""
        digest = str(session.digest) if self._stores else ""
        return self._kv.key(own, run + session.version, session.commits, digest)

    def shares(self, key: str) -> bool:
        """Whether KV under a key is of the live weights alone, and those are attested."""
        session = self._session
        if not isinstance(session, WeightSession) or not session.confirmed:
            return False
        return self._kv.shares(key, session.version, session.commits, str(session.digest))

    def forget_weights(self) -> None:
        """The cache was emptied."""
        self._kv.forget()

    def _start(self, scheduler: Any) -> None:  # noqa: ANN401
        try:
            self._check_engine(scheduler)
            self._kv = retraction.RetractingPolicy(os.environ.get(KV_VARIABLE) or kv_policy.KEEP)
            self._leader = rank_of(scheduler) == 0
            if self._permit_path is not None:
                self._gate = PermitGate(self._permit_path)
                # Ranks would have to agree on a chunk before each iteration: theirs stay whole.
                alone = int(scheduler.tp_size) == 1
                self._own_chunk = (scheduler.chunked_prefill_size or 0) if alone else 0
            if self._stores:
                kv_store.check(scheduler.tree_cache)
                gate = self._gate
                kv_store.threads.allow(gate.is_open if gate is not None else lambda: True)
            if self._control_path is not None:
                self._session = self._open_session(scheduler, self._control_path)
                self._watch_wake(scheduler)
                path = socket_of(self._control_path, rank_of(scheduler))
                ControlServer(path, self._session.handle).start()
        except (UnsupportedEngine, BadPermit, OSError) as error:
            refuse(str(error))
            raise  # an exception in the scheduler ends the whole engine
        self._started = True
        log.info("rose: plugin ready, permit %s, control %s", self._permit_path, self._control_path)

    def _check_engine(self, scheduler: Any) -> None:  # noqa: ANN401
        for name in ("pp_size", "dp_size", "ep_size", "nnodes"):
            size = int(getattr(scheduler.server_args, name, 1))
            if size > 1:
                raise UnsupportedEngine(f"{name} {size} is not supported, only tensor parallelism")
        if scheduler.enable_overlap:
            raise UnsupportedEngine("the engine must run with --disable-overlap-schedule")

    def _open_session(
        self,
        scheduler: Any,  # noqa: ANN401
        control: Path,
    ) -> WeightSession | AdapterSlots:
        version = scheduler.server_args.weight_version
        fallback = os.environ.get(FALLBACK_VARIABLE, "")
        began = time.monotonic()
        log.info("rose: learning where the weights are")
        if self._adapter is not None:
            return self._open_adapters(scheduler, control, self._adapter)
        try:
            live = loading.read_in_place(scheduler, control.parent, fallback)
            log.info("rose: layout known after %.2f s", time.monotonic() - began)
        except UnsupportedEngine as refused:
            loading.check_may_reload(scheduler, fallback, refused)
            live = None
        hooks = self._hooks(scheduler)
        session: WeightSession
        if live is None and self._stores:
            raise UnsupportedEngine(
                "a model that is loaded from patched checkpoints attests no weights, so it cannot "
                "share keys; set kvStoreGiB: 0"
            )
        if live is None:
            session = loading.session(scheduler, control.parent, version, *hooks)
        elif int(scheduler.tp_size) == 1:
            let_go = memory.SchedulerMemory.of(scheduler)
            session = WeightSession(live, version, *hooks, memory=let_go, stager=OwnProcess)
        else:
            kind = LeaderSession if self._leader else MemberSession
            joined = ranks.join(scheduler, live, control)
            session = kind(live, version, joined, *hooks, stager=OwnProcess)
        return self._equip(scheduler, session)

    def _open_adapters(
        self,
        scheduler: Any,  # noqa: ANN401
        control: Path,
        spec: AdapterSpec,
    ) -> AdapterSlots:
        from rose_engines.sglang import adapters  # noqa: PLC0415  # torch takes its time

        if spec.shared and self._kv.policy == kv_policy.RECOMPUTE:
            raise UnsupportedEngine(
                "KV policy Recompute would take the KV of every run at each run's commit; with "
                "adapters of several runs it must be Keep or Reuse"
            )
        pool = adapters.read_pool(scheduler, control.parent, spec)
        version = scheduler.server_args.weight_version
        self._labels = {engine_name(number): version for number in range(spec.slots)}
        move, wake = self._hooks(scheduler)
        sessions = []
        for number, live in enumerate(pool.adapters):
            own = partial(self._set_own_label, scheduler, number) if spec.shared else move
            end = partial(self._end_requests, scheduler, number)
            session = AdapterSession(live, version, own, wake, end_requests=end)
            self._equip(scheduler, session)
            sessions.append(session)
        return AdapterSlots(sessions, pool.slot_bytes)

    def _hooks(self, scheduler: Any) -> tuple[Callable[[str], int], Callable[[], None]]:  # noqa: ANN401
        """How a session moves the label, and wakes an idle engine."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return (
            lambda version: self._set_label(scheduler, version),
            lambda: os.eventfd_write(self._wake, 1),
        )

    def _equip(self, scheduler: Any, session: WeightSession) -> WeightSession:  # noqa: ANN401
        """With what the engine knows besides its weights."""
        seen = torch_device(str(scheduler.server_args.device))
        session.device = lambda: seen
        counts = self._kv
        session.recomputed = lambda: (counts.retracted_requests, counts.recomputed_tokens)
        if os.environ.get(DRAFTS_VARIABLE) and scheduler.spec_algorithm.is_ngram():
            session.draft = drafts.HostCorpus(scheduler).replace
        if self._stores:
            session.join = lambda secret: kv_store.join_pool(scheduler.tree_cache, secret)
        gate = self._gate
        session.permit_open = gate.is_open if gate is not None else lambda: None
        return session

    def _watch_wake(self, scheduler: Any) -> None:  # noqa: ANN401
        """An idle scheduler sleeps on its sockets; a commit must wake it too."""
        sleeper = getattr(scheduler, "idle_sleeper", None)
        if sleeper is not None:
            sleeper.poller.register(self._wake, _READABLE)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _set_label(self, scheduler: Any, version: str) -> int:  # noqa: ANN401
        """Move the label, close the spans of live requests, give waiting ones their cache key."""
        self._kv.put_back(scheduler)  # their spans close too
        fenced = sum(1 for request in _live(scheduler) if request.output_ids)
        scheduler.record_weight_version_change(version)
        self._kv.retract(scheduler)
        if self._kv.holding and self._leader:
            os.eventfd_write(self._wake, 1)
        session = self._session
        if session is None:
            return fenced
        weights = session[0] if isinstance(session, AdapterSlots) else session
        for request in (*_waiting(scheduler), *self._kv.held()):
            request.extra_key = self._cache_key(request.extra_key, weights)
        return fenced

    def _set_own_label(self, scheduler: Any, number: int, version: str) -> int:  # noqa: ANN401
        """The same for one adapter of several: requests of the others notice nothing."""
        from sglang.srt.utils.weight_versions import (  # noqa: PLC0415  # only inside engines
            record_weight_version_events,
        )

        slots, name = self._session, engine_name(number)
        if not isinstance(slots, AdapterSlots):
            return 0
        before = self._labels[name]
        requests = [request for request in _live(scheduler) if request.lora_id == name]
        if version != before:
            record_weight_version_events(requests, old_version=before)
            self._labels[name] = version
        for request in _waiting(scheduler):
            if request.lora_id == name:
                request.extra_key = self._cache_key(request.extra_key, slots[number])
        return sum(1 for request in requests if request.output_ids)

    def _end_requests(self, scheduler: Any, number: int) -> int:  # noqa: ANN401
        """End what is computed with one adapter; how many requests still are."""
        from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415  # only inside engines

        name = engine_name(number)
        for request in _live(scheduler):
            if request.lora_id == name and not request.finished():
                scheduler.abort_request(AbortReq(rid=request.rid))
        return sum(one.lora_id == name and not one.finished() for one in _live(scheduler))


def _waiting(scheduler: Any) -> list[Any]:  # noqa: ANN401
    """Requests that have computed nothing: those whose grammar is compiled wait elsewhere."""
    grammars = getattr(scheduler, "grammar_manager", None)
    return [*scheduler.waiting_queue, *getattr(grammars, "grammar_queue", ())]


def _live(scheduler: Any) -> set[Any]:  # noqa: ANN401
    """Every request in the scheduler."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    return {*scheduler.collect_inflight_reqs(), *_waiting(scheduler), *chunked}


def _refuse(scheduler: Any, request: Any) -> None:  # noqa: ANN401
    """Answer a request whose run has no adapter here: another's would compute something else."""
    from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415  # only inside engines

    run = run_of(request.extra_key or "")
    reason = {
        "type": "abort",
        "status_code": 503,
        "message": f"this engine holds no adapter of run {run!r} now",
        "err_type": "UnknownRun",
    }
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=reason), request)


def logprob_scale() -> LogitScale:
    """What this engine does, by the variable that its sampler reads, as that reads it."""
    original = os.environ.get(ORIGINAL_VARIABLE, "").lower() in {"true", "1"}
    return LogitScale.ORIGINAL if original else LogitScale.TEMPERATURE


class LogprobHook:
    """Says in every event whether the engine's log-probs are scaled by the temperature.

    SGLang divides the logits by the temperature before it takes log-probs, unless it runs with
    ``SGLANG_RETURN_ORIGINAL_LOGPROB``. Its replies do not say which, and whoever trains on them has
    to know. So the answer is put beside the version spans, in the process that writes the replies.
    """

    def __init__(self) -> None:
        self._scale = logprob_scale().value

    def before_versions(self, meta_info: dict[str, Any], *_: object, **__: object) -> None:
        """Hook: a reply's ``meta_info`` is about to get its version spans."""
        meta_info[SCALE] = self._scale


def around_accept(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:  # noqa: ANN401
    """Hook: a request's new tokens are added to the outgoing batch, with their version spans.

    Stock SGLang says which versions sampled a request's tokens when the request has finished. A
    router whose stream is cut by a death or a freeze never gets that event, and would have to
    sample the tokens it holds again. This hook fills the same field for unfinished requests, from
    the same records.
    """
    from sglang.srt.utils.weight_versions import compute_weight_version_spans  # noqa: PLC0415

    before = len(accumulator.weight_versions)
    original(accumulator, req=req)
    added = len(accumulator.weight_versions) > before
    if added and accumulator.weight_versions[-1] is None:
        accumulator.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


class OwnLabels:
    """Version spans where versions of several runs compute requests: each run has its own label.

    Args:
        label_of: label of the weights that a request is computed with now.
    """

    def __init__(self, label_of: Callable[[Any], str]) -> None:
        self._label_of = label_of

    def around_accept(self, original: Callable[..., None], accumulator: Any, *, req: Any) -> None:  # noqa: ANN401
        """Hook: a request's new tokens are added to the outgoing batch."""
        accumulator.current_weight_version = self._label_of(req)
        around_accept(original, accumulator, req=req)

    def around_abort(self, original: Callable[..., Any], req: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401
        """Hook: a request ends outside the output stream."""
        from sglang.srt.utils.weight_versions import compute_weight_version_spans  # noqa: PLC0415

        made = original(req, *more, **named)
        made.weight_versions = compute_weight_version_spans(
            req.weight_version_events,
            current_version=self._label_of(req),
            num_output_tokens=len(req.output_ids),
        )
        return made


def unpin_memory() -> None:
    """Have this process, which has no driver to pin memory, take ordinary memory in its place.

    SGLang's LoRA layers and its hierarchical cache pin tensors whatever the device, and torch
    refuses that without a GPU. Used for its CPU engine alone, as the stand-in for its CUDA kernels.
    """
    import torch  # noqa: PLC0415  # only inside engines

    for name in _FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign,assignment]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the factory
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _itself(tensor: Any, *_: object, **__: object) -> Any:  # noqa: ANN401  # a tensor
    return tensor
