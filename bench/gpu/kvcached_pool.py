"""kvcached's own pool on a GPU, told what to do as ``rose_engines.fake.kvcached`` is.

    python -m bench.gpu.kvcached_pool --name SEGMENT [--bundles N]     # alloc N, free N, quit

Needs kvcached and torch; ``tests/devices/test_elastic.py`` and ``make gpu-check`` hold both to the
same contract.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import Any

_LAYERS = 4
_BLOCK_TOKENS = 16
_HEADS, _WIDTH, _BYTES = 8, 64, 2
_PAGE = 2 << 20


class RealPool:
    """kvcached's allocator, counted in bundles.

    Args:
        bundles: the pool's size.
    """

    def __init__(self, bundles: int) -> None:
        torch: Any = importlib.import_module("torch")
        interfaces: Any = importlib.import_module("kvcached.integration.vllm.interfaces")
        manager: Any = importlib.import_module("kvcached.kv_cache_manager")
        self._close = interfaces.shutdown_kvcached
        torch.cuda.set_device(0)
        cell = _HEADS * _WIDTH * _BYTES
        self._blocks = _PAGE // (_BLOCK_TOKENS * cell)
        count = bundles * self._blocks
        interfaces.init_kvcached(tp_rank=0, world_size=1, is_worker=True, async_sched=False)
        interfaces.alloc_kv_cache(
            kvcache_shape=(2, count, _BLOCK_TOKENS, _HEADS, _WIDTH),
            block_size=_BLOCK_TOKENS,
            dtype=torch.float16,
            device="cuda:0",
            num_layers=_LAYERS,
        )
        self._pool = manager.KVCacheManager(
            num_blocks=count, block_size=_BLOCK_TOKENS, cell_size=cell, num_layers=_LAYERS
        )
        self._held: list[int] = []

    def alloc(self, bundles: int) -> bool:
        """Take bundles."""
        taken = self._pool.alloc(bundles * self._blocks)
        self._held += taken or []
        return taken is not None

    def free(self, bundles: int) -> None:
        """Give bundles back, the oldest first."""
        count = bundles * self._blocks
        given, self._held = self._held[:count], self._held[count:]
        self._pool.free(given)

    def close(self) -> None:
        """End in order."""
        self._close()


def main(argv: list[str]) -> int:
    """A pool that takes orders from its input and answers each with JSON."""
    parser = argparse.ArgumentParser(prog="bench.gpu.kvcached_pool")
    parser.add_argument("--name", required=True)
    parser.add_argument("--bundles", type=int, default=64)
    options = parser.parse_args(argv)
    os.environ |= {
        "KVCACHED_IPC_NAME": options.name,
        "KVCACHED_MIN_RESERVED_PAGES": "1",
        "KVCACHED_MAX_RESERVED_PAGES": "1",
        "KVCACHED_LOG_LEVEL": "ERROR",
    }
    # What the library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pool = RealPool(options.bundles)
    time.sleep(1.0)  # its thread maps the first pages ahead

    def reply(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    reply({"bundle": 2 * _LAYERS * _PAGE, "bundles": options.bundles})
    for line in sys.stdin:
        order, _, count = line.strip().partition(" ")
        if order == "quit":
            break
        if order == "alloc":
            reply(pool.alloc(int(count)))
        elif order == "free":
            pool.free(int(count))
            reply(True)
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
