"""kvcached without a GPU: its segment, and an allocator that obeys it as kvcached 0.1.5 does.

The segment lies in ``/dev/shm``: three 64-bit words, the limit, the bytes in use and the bytes
mapped ahead. What the real one was read to do, and this one repeats:

- pages come and go in *bundles*, one page of every layer's keys and values;
- a limit takes effect at the next allocation, not by itself: an idle engine keeps its memory;
- a limit of 0, and one of exactly the size the pool was made with, change nothing;
- below what is in use nothing is taken away: the pool grows no more and shrinks as tokens go;
- spare bundles are given up first;
- the segment ends with the pool, and not when its process is killed.

On the command line it is a pool that takes orders, to which the real one can be compared
(``bench.gpu.kvcached_pool`` takes the same): ``alloc N``, ``free N``, ``clear``, ``quit``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = 2 << 20
SHM = Path("/dev/shm")  # noqa: S108  # kvcached's place
_COUNTERS = struct.Struct("=qqq")
_SPARES = 1


class FakePool:
    """An elastic KV pool.

    Args:
        name: of the segment.
        bundles: the pool's size.
        bundle: bytes of a page of every layer.
        deaf: ignores its limit, as an engine whose patches were not applied.
    """

    def __init__(self, name: str, bundles: int, bundle: int = PAGE, *, deaf: bool = False) -> None:
        self.path = SHM / name
        self.bundle, self._made_with, self._deaf = bundle, bundles, deaf
        self._most, self._used, self._spare = bundles, 0, 0
        self.path.unlink(missing_ok=True)
        self._write(bundles * bundle)
        self._refill()

    @property
    def used(self) -> int:
        """Bundles with tokens on them."""
        return self._used

    def alloc(self, bundles: int) -> bool:
        """Take bundles; the limit is looked at first.

        Returns:
            False when there are too few: the caller has to free some.
        """
        self._obey()
        if self._used + bundles > self._most:
            return False
        self._used += bundles
        self._refill()
        return True

    def free(self, bundles: int) -> None:
        """Give bundles back."""
        self._used = max(0, self._used - bundles)
        self._refill()

    def close(self) -> None:
        """End in order."""
        self.path.unlink(missing_ok=True)

    def _obey(self) -> None:
        wanted = self._limit() // self.bundle
        if self._deaf or wanted in {0, self._made_with}:
            return
        self._most = wanted
        self._refill()

    def _refill(self) -> None:
        self._spare = max(0, min(_SPARES, self._most - self._used))
        self._write(None)

    def _limit(self) -> int:
        return int(_COUNTERS.unpack(self.path.read_bytes())[0])

    def _write(self, limit: int | None) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if limit is None:
                limit = _COUNTERS.unpack(
                    os.pread(file, _COUNTERS.size, 0).ljust(_COUNTERS.size, b"\0")
                )[0]
            held = (self._used * self.bundle, self._spare * self.bundle)
            os.pwrite(file, _COUNTERS.pack(limit, *held), 0)
        finally:
            os.close(file)


class TokenPool:
    """The KV cache of a fake engine on an elastic pool; finished turns stay cached.

    Args:
        pool: where its pages come from.
        tokens: that fit on a bundle.
    """

    def __init__(self, pool: FakePool, tokens: int = 16) -> None:
        self.pool = pool
        self._tokens = tokens
        self._running: dict[str, int] = {}
        self._cached = 0

    def hold(self, rid: str, tokens: int) -> bool:
        """Have room for a request's tokens; cached ones give way.

        Returns:
            False when there is no room: it has to wait.
        """
        more = -(-tokens // self._tokens) - self._running.get(rid, 0)
        if more <= 0:
            return True
        while not self.pool.alloc(more):
            if not self._cached:
                return False
            self._cached -= 1
            self.pool.free(1)
        self._running[rid] = self._running.get(rid, 0) + more
        return True

    def finish(self, rid: str) -> bool:
        """The request has ended; its tokens stay until the room is needed.

        Returns:
            Whether it had any.
        """
        had = self._running.pop(rid, 0)
        self._cached += had
        return had > 0

    def flush(self) -> bool:
        """Forget finished turns, unless some are running, as SGLang's ``/flush_cache``."""
        if self._running:
            return False
        self.pool.free(self._cached)
        self._cached = 0
        return True


def connect(environment: Mapping[str, str], size: int, how: str) -> TokenPool | None:
    """The pool that the environment asks for; None without one, in silence as kvcached does.

    Args:
        environment: ``ENABLE_KVCACHED`` and ``KVCACHED_IPC_NAME``.
        size: bytes.
        how: ``real``, ``deaf``, or ``absent`` when kvcached is not installed.
    """
    enabled = environment.get("ENABLE_KVCACHED", "") == "true" and how != "absent"
    if not enabled:
        return None
    name = environment["KVCACHED_IPC_NAME"]
    bundle = max(1, size // 64)
    return TokenPool(FakePool(name, size // bundle, bundle, deaf=how == "deaf"))


def main(argv: list[str]) -> int:
    """A pool that takes orders from its input and answers each with JSON."""
    parser = argparse.ArgumentParser(prog="rose_engines.fake.kvcached")
    parser.add_argument("--name", required=True)
    parser.add_argument("--bundles", type=int, default=64)
    arguments = parser.parse_args(argv)
    pool = FakePool(arguments.name, arguments.bundles)

    def reply(answer: object) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    reply({"bundle": pool.bundle, "bundles": arguments.bundles})
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
