"""ROSE's plugin inside vLLM: permit, weight session and cache keys at iteration boundaries.

vLLM calls ``register`` in every process of an engine (entry point ``vllm.general_plugins``). It
wraps four methods of vLLM's classes, before any object of them is made:

| method | what is added |
|---|---|
| ``EngineCoreProc._process_engine_step`` | an iteration: first the permit, then a boundary |
| ``EngineCoreProc._handle_client_request`` | an idle engine that was woken passes a boundary |
| ``EngineCore.add_request`` | the prefix-cache key names the weights |
| ``RequestState._new_completion_output`` | version spans in every event |

and changes what log-probs are of (``with_unfiltered_logprobs``) and, on CPU, what linear layers
compute with (``keep_weight``). While it waits for its permit the engine takes in requests and
aborts, so both are known before the next token. The worker runs in the engine core's own process
(executor ``uni``), so between two steps nothing of the one before is under way. Several workers are
refused by name.

Whatever is not as expected ends the process with a clear reason, as in ``rose_engines.sglang``.
Next step: ``weights``, ``rose_engines.weights.session``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from rose_core.identity import BASE_LABEL
from rose_engines.errors import BrokenWeights, UnsupportedEngine
from rose_engines.kv import policy as kv_policy
from rose_engines.node.gate import POLL_SECONDS, PermitGate
from rose_engines.node.permit import BadPermit
from rose_engines.process.device import torch_device
from rose_engines.process.hooks import refuse, require
from rose_engines.process.launch import KV_VARIABLE, PERMIT_VARIABLE, SOCKET_VARIABLE
from rose_engines.vllm.arguments import SUPPORTED, VERSION_VARIABLE
from rose_engines.vllm.memory import CoreMemory
from rose_engines.weights.control import ControlServer
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import OwnProcess

log = logging.getLogger(__name__)

CORE = "vllm.v1.engine.core.EngineCoreProc"
REQUEST_STATE = "vllm.v1.engine.output_processor.RequestState"
NEW_OUTPUT = "_new_completion_output"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler"
SAMPLER_METHODS = ("forward_native", "forward_cpu")
"""Implementations that a sampler with processed log-probs chooses from on GPU and CPU."""
CPU_GEMM = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
_NEEDED = (
    f"{CORE}._process_engine_step",
    f"{CORE}._handle_client_request",
    f"{CORE}.add_request",
    f"{CORE}.set_weight_version",
    f"{CORE}._send_abort_outputs",
    "vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache",
    "vllm.v1.request.Request.update_block_hashes",
    f"{REQUEST_STATE}.{NEW_OUTPUT}",
    f"{REQUEST_STATE}._weight_version_spans",
    *(f"{SAMPLER}.{name}" for name in SAMPLER_METHODS),
    CPU_GEMM,
)

_registered: list[CorePlugin] = []


class _Leaving(Exception):
    """The engine had to end while it waited for its permit."""


def registered() -> bool:
    """Whether vLLM has called ``register`` in this process and the methods were wrapped."""
    return bool(_registered)


def register() -> None:
    """Wrap the methods; in a process without an engine core most of them never run.

    Raises:
        SystemExit: this build of vLLM lacks a function that the plugin needs.
    """
    permit, control = os.environ.get(PERMIT_VARIABLE), os.environ.get(SOCKET_VARIABLE)
    if _registered or (not permit and not control):
        return
    require(_NEEDED, "vLLM", SUPPORTED)
    hooks = CorePlugin(Path(permit) if permit else None, Path(control) if control else None)
    _wrap(CORE, "_process_engine_step", hooks.around_step)
    _wrap(CORE, "_handle_client_request", hooks.around_client_request)
    _wrap(CORE, "add_request", hooks.around_add)
    owner = pkgutil.resolve_name(REQUEST_STATE)
    setattr(owner, NEW_OUTPUT, with_spans_so_far(getattr(owner, NEW_OUTPUT)))
    sampler = pkgutil.resolve_name(SAMPLER)
    for name in SAMPLER_METHODS:
        setattr(sampler, name, with_unfiltered_logprobs(getattr(sampler, name)))
    module, _, name = CPU_GEMM.rpartition(".")
    setattr(pkgutil.resolve_name(module), name, keep_weight)
    _registered.append(hooks)


def _wrap(owner: str, name: str, around: Callable[..., Any]) -> None:
    kind = pkgutil.resolve_name(owner)
    original = getattr(kind, name)

    @wraps(original)
    def wrapped(core: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return around(lambda: original(core, *arguments, **named), core, *arguments)

    setattr(kind, name, wrapped)


def _end_server(reason: str) -> None:
    """End the server whose core this is: while it starts it waits for a dead core for ever."""
    refuse(reason)
    server = multiprocessing.parent_process()
    if server is not None and server.pid is not None and server.is_alive():
        os.kill(server.pid, signal.SIGTERM)


class RetractingPolicy(kv_policy.CachePolicy):
    """What becomes of cached KV, by vLLM's means: a request that loses it waits in its queue."""

    def retract(self, scheduler: Any) -> None:  # noqa: ANN401
        """After a commit: what runs loses its KV, if the policy says so.

        Nothing is held back, unlike with SGLang: an iteration prefills one chunk in any case.
        """
        if self.policy != kv_policy.RECOMPUTE:
            return
        running = list(scheduler.running)
        self.retracted_requests += len(running)
        self.recomputed_tokens += sum(request.num_tokens for request in running)
        scheduler.reset_prefix_cache(reset_running_requests=True)


class CorePlugin:
    """What is added to one engine core; everything is built before its first iteration.

    Args:
        permit: permit file, None = compute always.
        control: control socket, None = weights stay as they are.
    """

    def __init__(self, permit: Path | None, control: Path | None) -> None:
        self._permit_path = permit
        self._control_path = control
        self._gate: PermitGate | None = None
        self._session: WeightSession | None = None
        self._kv = RetractingPolicy()
        self._started = False
        self._passing = False
        self._own_chunk = 0

    def around_step(self, original: Callable[[], bool], core: Any) -> bool:  # noqa: ANN401
        """Before an iteration: the permit, and what changes between two of them."""
        return original() if self._pass(core) else False

    def around_client_request(
        self,
        original: Callable[[], None],
        core: Any,  # noqa: ANN401
        kind: Any,  # noqa: ANN401
        _request: object,
    ) -> None:
        """A message to the engine core; the one that only wakes it is ours.

        The first message of all comes before anything is computed: the session opens there.
        """
        self._start(core)
        original()
        if kind.name == "WAKEUP":
            self._pass(core)

    def around_add(self, original: Callable[[], None], core: Any, request: Any, *_: Any) -> None:  # noqa: ANN401, ARG002
        """A request enters the scheduler."""
        if self._session is not None:
            self._rekey(request, self._session)
        original()

    def _pass(self, core: Any) -> bool:  # noqa: ANN401
        """A boundary under an open permit, however long that takes; False = the engine ends."""
        if self._passing:  # woken while it waits here
            return True
        self._start(core)
        self._passing = True
        try:
            self._boundary(core)
            while not self._may_compute():
                time.sleep(POLL_SECONDS)
                self._rest(core)
                self._boundary(core)
        except _Leaving:
            return False
        finally:
            self._passing = False
        if self._session is not None and self._session.broken:
            reason = "an undo failed; this engine ends so that it starts afresh"
            _end_server(reason)
            raise BrokenWeights(reason)
        self._size_chunks(core)
        return True

    def _boundary(self, core: Any) -> None:  # noqa: ANN401
        if self._gate is not None:
            self._gate.wait(lambda: self._rest(core))
        _take_in(core)  # before it looks for orders: a later wake-up counts for the next time
        if self._session is not None:
            self._session.on_rest()
            self._session.on_boundary()

    def _may_compute(self) -> bool:
        """Asked behind a boundary, which may have taken long: an activation loads all weights."""
        session = self._session
        if session is not None and (session.dormant or session.broken):
            return session.broken
        return self._gate is None or self._gate.is_open()

    def _rest(self, core: Any) -> None:  # noqa: ANN401
        """While the permit is closed: nothing is computed, everything is taken in."""
        _take_in(core)
        if not core.is_running():
            raise _Leaving
        if self._session is not None:
            self._session.on_rest()

    def _size_chunks(self, core: Any) -> None:  # noqa: ANN401
        """This iteration prefills no more tokens than the permit allows."""
        if self._gate is None:
            return
        # Each request that runs has its token first.
        least = int(core.vllm_config.scheduler_config.max_num_seqs)
        chunk = max(self._own_chunk // self._gate.chunk_divisor, least)
        core.scheduler.max_num_scheduled_tokens = min(chunk, self._own_chunk)

    def _rekey(self, request: Any, session: WeightSession) -> None:  # noqa: ANN401
        """The request's prefix-cache key names the weights that compute its first block."""
        request.cache_salt = self._kv.key(request.cache_salt, session.version, session.commits)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _start(self, core: Any) -> None:  # noqa: ANN401
        if self._started:
            return
        self._started = True
        try:
            runner = _check(core)
            core.set_weight_version(os.environ.get(VERSION_VARIABLE, BASE_LABEL))
            self._kv = RetractingPolicy(os.environ.get(KV_VARIABLE) or kv_policy.KEEP)
            if self._permit_path is not None:
                self._gate = PermitGate(self._permit_path)
                self._own_chunk = int(core.scheduler.max_num_scheduled_tokens)
            if self._control_path is not None:
                session = self._open_session(core, runner, self._control_path)
                ControlServer(self._control_path, session.handle).start()
        except (UnsupportedEngine, BadPermit, OSError) as error:
            _end_server(str(error))
            raise
        log.info("rose: plugin ready, permit %s, control %s", self._permit_path, self._control_path)

    def _open_session(self, core: Any, runner: Any, control: Path) -> WeightSession:  # noqa: ANN401
        from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415  # only inside engines

        from rose_engines.vllm import weights  # noqa: PLC0415  # torch takes its time

        session = self._session = WeightSession(
            weights.read_live(core, runner, control.parent),
            core.get_weight_version(),
            lambda version: self._set_label(core, version),
            lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)),
            memory=CoreMemory.of(core, runner),
            stager=OwnProcess,
        )
        seen, counts, gate = torch_device(runner.device.type), self._kv, self._gate
        session.device = lambda: seen
        session.recomputed = lambda: (counts.retracted_requests, counts.recomputed_tokens)
        session.permit_open = gate.is_open if gate is not None else lambda: None
        return session

    def _set_label(self, core: Any, version: str) -> int:  # noqa: ANN401
        """Move the label; requests that have computed nothing get the key of the new weights.

        Spans close by themselves: outputs of earlier iterations carry the label of then.
        """
        scheduler = core.scheduler
        fenced = sum(1 for one in scheduler.requests.values() if one.num_output_tokens)
        core.set_weight_version(version)
        self._kv.retract(scheduler)
        if self._session is not None:
            for request in _waiting(scheduler):
                self._rekey(request, self._session)
        return fenced


def _waiting(scheduler: Any) -> Iterator[Any]:  # noqa: ANN401
    """Requests that hold no KV: they have not begun, or lost it."""
    running = set(map(id, scheduler.running))
    for request in scheduler.requests.values():
        if id(request) not in running and not request.num_computed_tokens:
            yield request


def _take_in(core: Any) -> None:  # noqa: ANN401
    """Requests and aborts that have arrived."""
    while not core.input_queue.empty():
        core._handle_client_request(*core.input_queue.get_nowait())  # noqa: SLF001


def _check(core: Any) -> Any:  # noqa: ANN401
    """The model runner, if this engine is one that can be steered.

    Raises:
        UnsupportedEngine: says what it is.
    """
    config = core.vllm_config
    parallel = config.parallel_config
    for name in ("world_size", "data_parallel_size"):
        if int(getattr(parallel, name, 1)) > 1:
            raise UnsupportedEngine(f"{name} {getattr(parallel, name)}: one worker is supported")
    if core.batch_queue is not None or config.scheduler_config.async_scheduling:
        raise UnsupportedEngine("the engine must run with --no-async-scheduling")
    if config.speculative_config is not None or config.lora_config is not None:
        raise UnsupportedEngine("speculative decoding and adapters are not supported in vLLM")
    if config.model_config.logprobs_mode != "processed_logprobs":
        raise UnsupportedEngine("the engine must run with --logprobs-mode processed_logprobs")
    if getattr(config, "use_v2_model_runner", False):
        raise UnsupportedEngine("the engine must run with VLLM_USE_V2_MODEL_RUNNER=0")
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    runner = getattr(worker, "model_runner", None)
    if runner is None:
        raise UnsupportedEngine("the engine must run with --distributed-executor-backend uni")
    return runner


def with_unfiltered_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same sampling, with log-probs as SGLang's: of the logits before top-k and top-p.

    vLLM's ``processed_logprobs`` are of the logits after bias, penalties and temperature, as
    SGLang's are, but also after top-k and top-p have dropped tokens. Whoever trains on tokens of
    both engines must have one distribution, so the log-probs are taken before those filters.
    """

    def sample(
        sampler: Any,  # noqa: ANN401
        logits: Any,  # noqa: ANN401
        generators: Any,  # noqa: ANN401
        k: Any,  # noqa: ANN401
        p: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        import torch  # noqa: PLC0415  # only inside engines

        if k is None and p is None:
            return original(sampler, logits, generators, k, p)
        before = logits.log_softmax(dim=-1, dtype=torch.float32)  # the filters write in place
        sampled, scores = original(sampler, logits, generators, k, p)
        return sampled, None if scores is None else before

    return sample


def with_spans_so_far(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same output, with the version spans so far in every event of a stream.

    vLLM notes which version sampled which of a request's tokens, and says so when the request has
    ended. A router whose stream is cut never gets that event.
    """

    def make(state: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        output = original(state, *arguments, **named)
        if output.weight_versions is None:
            output.weight_versions = state._weight_version_spans()  # noqa: SLF001
        return output

    return make


def keep_weight(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401, ARG001
    """Have a linear layer on CPU compute with its own weight; stands in for vLLM's kernel choice.

    vLLM's CPU backend packs each matrix for oneDNN or AMX when it is loaded, and throws the weight
    away: nothing could be committed into it or attested. On GPUs no such copy is made.
    """
    import torch  # noqa: PLC0415  # only inside engines

    layer.cpu_linear = torch.nn.functional.linear
