"""A lease's folder of pages as a storage backend of SGLang's hierarchical cache.

SGLang names a page by a hash over the request's key and all tokens up to the page's end
(``rose_engines.kv.policy`` has the key: label and digest of the weights). What the bytes of a page
mean depends on more: how keys are laid out, their type, the model's shape and its settings (of
which no digest of weights knows: how it turns positions into angles), SGLang's release. A digest of
all that is part of every file's name, so engines that differ in it never meet.

Where the platform has a pool, pages that the node lacks are brought from there, and what is new in
the folder is written there (``rose_engines.kv.pool``), from when the lease's secret has come by the
control socket.

Imported by SGLang inside an engine, and nowhere else. Next step: ``kv.pages`` has the files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__

from rose_core.rollouts.engines.kv_store import PAGE_TOKENS, KvPoolSpec, PoolCounts
from rose_engines.kv.pages import BYTES_VARIABLE, FOLDER_VARIABLE, PageFolder
from rose_engines.kv.pool import KvPool, PoolTurn, from_environment
from rose_engines.kv.pool_process import PoolSetup, checksum
from rose_engines.sglang.kv_store import prefill, threads


class FolderBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is in engines alone
    """Pages of the lease.

    Args:
        config: SGLang's: ranks, layout, model.
        more: SGLang's, without use here.
    """

    def __init__(self, config: HiCacheStorageConfig, more: object = None) -> None:
        del more
        self._config = config
        self._suffix = ""
        self._folder, self._most = os.environ[FOLDER_VARIABLE], int(os.environ[BYTES_VARIABLE])
        self._pages = PageFolder(Path(self._folder), self._most, checksum)
        self._pool: KvPool | None = None
        self._page_bytes, self._joining = 0, threading.Lock()
        self._current = threading.local()  # the turn that one of SGLang's threads works for

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Take over what a page is."""
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._config
        page = pool.get_dummy_flat_data_page()
        parts = (
            *(__version__, type(pool).__name__, pool.layout, pool.page_size, pool.dtype),
            *(tuple(page.shape), config.tp_rank, config.tp_size, config.is_mla_model),
            Path(get_server_args().model_path, "config.json").read_bytes(),
        )
        self._suffix = "-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        self._page_bytes = page.numel() * page.element_size()

    def join(self, secret: str) -> PoolCounts:
        """Join the platform's pool, once; what became of it so far.

        Args:
            secret: of the lease.

        Raises:
            ValueError: the engine was told of no pool.
        """
        spec = from_environment()
        if spec is None or not self._page_bytes:
            raise ValueError("this engine was told of no pool of keys")
        with self._joining:
            if self._pool is None:
                self._pool = self._pool_of(spec, secret)
        return self._pool.counts()

    def _pool_of(self, spec: KvPoolSpec, secret: str) -> KvPool:
        setup = PoolSetup(
            *(spec.master, spec.protocol, secret), *(self._folder, self._most, self._page_bytes)
        )
        return KvPool(
            [spec.python, "-m", "rose_engines.kv.pool_process"],
            setup,
            lambda: prefill.seconds_per_token,
            may_move=threads.may_move,
            leaving=threads.is_leaving,
        )

    def ask_for_turn(self, operation: Any, ask: Callable[[], Any]) -> Any:  # noqa: ANN401  # SGLang's
        """Which pages a turn will be given.

        Args:
            operation: SGLang's, of one turn.
            ask: calls ``batch_exists`` with all of them.
        """
        if self._pool is not None:
            pages = len(operation.token_ids) // PAGE_TOKENS
            turn = self._pool.begin(pages, operation.start_time)
            operation.rose_turn = self._current.turn = turn
        return ask()

    def move_for_turn(self, operation: Any, move: Callable[[], Any]) -> Any:  # noqa: ANN401  # SGLang's
        """Bring a turn's pages.

        Args:
            operation: as ``ask_for_turn``'s.
            move: calls ``batch_get`` as often as it takes.
        """
        turn: PoolTurn | None = getattr(operation, "rose_turn", None)
        self._current.turn = turn
        try:
            return move()
        finally:
            if turn is not None and self._pool is not None:
                self._pool.finish(turn)

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Of pages that follow each other, how many can be had: from here first, then the pool."""
        del extra_info
        names = [key + self._suffix for key in keys]
        here = next((at for at, name in enumerate(names) if not self._pages.has(name)), len(keys))
        turn: PoolTurn | None = getattr(self._current, "turn", None)
        if turn is None or self._pool is None or here == len(names):
            return here
        found = self._pool.count(turn, names[here:])
        return here + (found if found and self._pool.pulls(turn) else 0)

    def close(self) -> None:
        """SGLang does without its store from now on."""
        if self._pool is not None:
            self._pool.close()

    def exists(self, key: str) -> bool:
        """Whether a page is there; it may still prove to be damaged."""
        return self._pages.has(key + self._suffix)

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,
    ) -> torch.Tensor | None:
        """A page, read where SGLang wants it; None = its tokens are to be computed."""
        del target_sizes
        if target_location is None or not threads.may_move():
            return None
        page = target_location.contiguous()
        there = self._pages.get(key + self._suffix, _bytes_of(page))
        return page if there else None

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Pages that follow each other, up to the first that is not there."""
        del target_sizes
        found: list[torch.Tensor | None] = []
        for key, target in zip(keys, target_locations or (), strict=True):
            page = self.get(key, target)
            if page is None:  # what follows is of no use without it
                break
            found.append(page)
        here, targets = len(found), target_locations or ()
        turn: PoolTurn | None = getattr(self._current, "turn", None)
        if self._pool is not None and turn is not None and here < len(keys):
            names = [key + self._suffix for key in keys[here:]]
            whole = [target.contiguous() for target in targets[here:]]
            came = self._pool.pull(turn, names, [_bytes_of(target) for target in whole])
            found += whole[:came]
        return found + [None] * (len(keys) - len(found))

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Write a page; False = it was not kept."""
        del target_location, target_sizes
        if value is None or not threads.may_move():
            return False
        name = key + self._suffix
        fresh = not self._pages.has(name)
        kept = self._pages.put(name, _bytes_of(value.contiguous()))
        if kept and fresh and self._pool is not None:
            self._pool.push(name)
        return kept

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Write pages that follow each other, up to the first that is not kept."""
        del target_locations, target_sizes
        return all(self.set(key, one) for key, one in zip(keys, values or (), strict=True))


def _bytes_of(page: torch.Tensor) -> memoryview:
    return page.view(torch.uint8).numpy().data.cast("B")
