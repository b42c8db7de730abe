"""What SGLang's hierarchical cache may write to a lease's store and fetch from it, and when.

SGLang 0.5.23 copies prompts and answers to host memory as they are computed, and from there to a
store; before a prefill it fetches what the store has. Stock, that is wrong and in serving's way:

| where | what SGLang does | here |
|---|---|---|
| ``STORE``, engine thread | stores all of a turn under its first key | none after a commit |
| ``FETCH``, engine thread | asks the store for any key | only for the live weights' |
| store threads | read and write whenever there is work | page by page, under an open permit |
| ``STOP``, engine thread | waits 10 s for each store thread | who waits for the permit gives up |
| ``QUERY``, ``TRANSFER``, store threads | 128 pages are moved at a time | a turn has one patience |
| ``FORWARD`` to ``RESULT`` | | how long prefilling takes: no pull may take longer (``kv.pool``) |

A turn that ran over a commit has a key that is no longer the live weights'
(``rose_engines.kv.policy``), and weights that a commit has yet to confirm are nobody's. So what is
stored was computed by the weights in its name, from its first token. Next step: ``kv_backend``
moves the pages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from rose_core.rollouts.engines.kv_store import PoolCounts, RecentPace
from rose_engines.errors import UnsupportedEngine
from rose_engines.kv.pages import FOLDER_VARIABLE
from rose_engines.node.gate import POLL_SECONDS

STORE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage"
FETCH = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefetch_from_storage"
STOP = "sglang.srt.managers.cache_controller.HiCacheController._stop_storage_threads"
EMPTY = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset"
FORWARD = "sglang.srt.managers.scheduler.Scheduler.run_batch"
RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
QUERY, TRANSFER = f"{_CONTROLLER}._storage_hit_query", f"{_CONTROLLER}._page_transfer"
NEEDED = (STORE, FETCH, STOP, EMPTY, QUERY, TRANSFER, FORWARD, RESULT)


def is_enabled() -> bool:
    """Whether this engine was given a store."""
    return bool(os.environ.get(FOLDER_VARIABLE))


class StoreThreads:
    """Lets the threads that move pages work while the permit is open; one for a process."""

    def __init__(self) -> None:
        self._is_open: Callable[[], bool] = lambda: False
        self._leaving = threading.Event()

    def allow(self, is_open: Callable[[], bool]) -> None:
        """Ask this before each page; until then nothing is moved."""
        self._is_open = is_open

    def leave(self) -> None:
        """Whoever waits gives up, since the threads are to end."""
        self._leaving.set()

    def is_leaving(self) -> bool:
        """Whether whoever waits gives up."""
        return self._leaving.is_set()

    def begin(self) -> None:
        """New threads work again."""
        self._leaving.clear()

    def may_move(self) -> bool:
        """Wait until the next page may be moved; False = it is not to be."""
        while not self._leaving.is_set():
            if self._is_open():
                return True
            time.sleep(POLL_SECONDS)
        return False


threads = StoreThreads()


class PrefillRate:
    """What a token of a long prompt takes the engine, as of late; one for a process.

    Every iteration has a time of its own, however few tokens it has. So those are looked at alone
    that fill half a chunk, as those of a long prompt do.
    """

    def __init__(self) -> None:
        self._pace, self._began = RecentPace(), 0.0

    @property
    def seconds_per_token(self) -> float:
        """0 = it has prefilled nothing yet."""
        return self._pace.seconds_each

    def begin(self, now: float) -> None:
        """An iteration begins."""
        self._began = now

    def end(self, now: float, tokens: int, chunk: int) -> None:
        """It has ended, and has prefilled so many tokens and done nothing else.

        Args:
            now: ``time.monotonic``.
            tokens: of all its prompts.
            chunk: as many as it may have had.
        """
        if 2 * tokens >= chunk:
            self._pace.note(now - self._began, tokens)


prefill = PrefillRate()


def check(cache: Any) -> None:  # noqa: ANN401  # SGLang's
    """Refuse an engine whose prefix cache is not the one that the hooks are placed in.

    Raises:
        UnsupportedEngine: says what it has.
    """
    from sglang.srt.mem_cache.unified_radix_cache import (  # noqa: PLC0415  # only inside engines
        UnifiedRadixCache,
    )

    if type(cache) is not UnifiedRadixCache or cache.linker is not None:
        raise UnsupportedEngine(
            f"the prefix cache {type(cache).__name__} has no keys that can be shared; set "
            "kvStoreGiB: 0"
        )
    if len(cache.tree_components) > 1 or cache.sidecar_pool_specs:
        raise UnsupportedEngine(
            "this model keeps more than keys and values of all tokens; set kvStoreGiB: 0"
        )


def join_pool(cache: Any, secret: str) -> PoolCounts:  # noqa: ANN401  # SGLang's
    """Have the store join the platform's pool, once; what became of it so far.

    Raises:
        ValueError: there is none.
    """
    backend = cache.cache_controller.storage_backend
    if backend is None:
        raise ValueError("SGLang does without its store")
    found: PoolCounts = backend.join(secret)
    return found


def place_hooks(
    registry: Any,  # noqa: ANN401  # SGLang's own types
    kinds: Any,  # noqa: ANN401
    shares: Callable[[str], bool],
    forget: Callable[[], None],
    *,
    cpu: bool,
) -> None:
    """Place the hooks of an engine with a store.

    Args:
        registry: SGLang's.
        kinds: SGLang's.
        shares: whether KV under a key is of the live weights alone.
        forget: called when the cache has been emptied.
        cpu: there is no driver: stand in for what needs one.
    """

    def around_store(original: Callable[..., None], cache: Any, node: Any) -> None:  # noqa: ANN401
        key, _ = cache.tree_core.prefetch_anchor_info(node)
        if key is not None and shares(key):
            original(cache, node)

    def around_fetch(
        original: Callable[..., Any],
        cache: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return original(cache, *args, **named) if shares(named.get("extra_key") or "") else None

    def around_stop(original: Callable[..., None], controller: Any) -> None:  # noqa: ANN401
        threads.leave()
        try:
            original(controller)
        finally:
            threads.begin()

    def after_empty(_result: object, *_: object, **__: object) -> None:
        forget()

    registry.register(STORE, around_store, kinds.AROUND)
    registry.register(FETCH, around_fetch, kinds.AROUND)
    registry.register(STOP, around_stop, kinds.AROUND)
    registry.register(EMPTY, after_empty, kinds.AFTER)
    registry.register(FORWARD, lambda *_, **__: prefill.begin(time.monotonic()), kinds.BEFORE)
    registry.register(RESULT, _after_result, kinds.AFTER)
    registry.register(QUERY, _around_query, kinds.AROUND)
    registry.register(TRANSFER, _around_transfer, kinds.AROUND)
    if cpu:
        _stand_in()


def _after_result(
    _result: object,
    scheduler: Any,  # noqa: ANN401  # SGLang's
    batch: Any,  # noqa: ANN401
    *_: object,
    **__: object,
) -> None:
    mode, tokens = batch.forward_mode, int(batch.extend_num_tokens or 0)
    if mode.is_extend() and not mode.is_mixed() and tokens:
        prefill.end(time.monotonic(), tokens, int(scheduler.chunked_prefill_size or tokens))


def _around_query(original: Callable[..., Any], controller: Any, operation: Any) -> Any:  # noqa: ANN401  # SGLang's
    return controller.storage_backend.ask_for_turn(
        operation, lambda: original(controller, operation)
    )


def _around_transfer(original: Callable[..., Any], controller: Any, operation: Any) -> Any:  # noqa: ANN401  # SGLang's
    return controller.storage_backend.move_for_turn(
        operation, lambda: original(controller, operation)
    )


def _stand_in() -> None:
    """Copies between two pools in plain torch, and host memory that nobody pins."""
    from sglang.srt.mem_cache.pool_host import (  # noqa: PLC0415  # torch takes its time
        base,
        common,
        mha,
    )

    mha.transfer_kv_direct = _copy
    common._cuda_host_register = lambda *_, **__: None  # noqa: SLF001  # there is no driver
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB, more than a machine of tests may have


def _copy(
    *,
    src_layers: list[Any],
    dst_layers: list[Any],
    src_indices: Any,  # noqa: ANN401  # tensors
    dst_indices: Any,  # noqa: ANN401
    page_size: int,  # noqa: ARG001  # as SGLang calls it
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
