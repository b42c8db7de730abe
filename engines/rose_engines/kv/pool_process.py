"""The process beside an engine that moves pages of keys to and from the platform's pool.

The pool is a store of Mooncake (https://github.com/kvcache-ai/Mooncake): a master that knows where
objects are, and clients that give memory. ROSE gives none: a frozen engine could serve nobody.

A process of its own, because Mooncake's client has threads, listens on ports and may end its
process; here nothing of the engine is in reach of that. Memory that other nodes could address holds
sealed pages alone. It is a child of the engine: it counts to the engine's limits, stands still when
the engine is frozen, and ends with it.

    python -m rose_engines.kv.pool_process    a line of JSON in, a line of JSON out

| in | out |
|---|---|
| first ``PoolSetup`` | ``{"ready": true}``; or it ends, with the reason in the engine's log |
| ``{"do": "count", "pages": [...]}`` | how many of the first are in the pool |
| ``{"do": "pull", "pages": [...]}`` | how many of the first are in ``PoolSetup.shared`` now |
| ``{"do": "push", "pages": [...]}`` | how many of the first are in the pool now, from the folder |

Next step: ``pool`` asks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rose_engines.kv.pages import PageFolder
from rose_engines.kv.seal import SEAL_BYTES, Seal

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Pages of one order: what moves after the permit has closed, and the memory for it."""

_NICE = 10
_LOST = -900  # Mooncake's RPC_FAIL; what is not there is -704, what finds no room -200
# Of Mooncake's own memory, which is not used: pages go into and out of what is registered.
_LOCAL_BYTES = 1 << 20
_THREADS = {
    "MC_STORE_RPC_CLIENT_IO_THREADS": "1",
    "MC_TE_RPC_CLIENT_IO_THREADS": "1",
    "MC_RPC_CLIENT_IO_THREADS": "1",
    "MC_WORKERS_PER_CTX": "1",
    "GLOG_minloglevel": "2",  # errors
}


class PageStore(Protocol):
    """What is used of ``mooncake.store.MooncakeDistributedStore``; pages by their addresses."""

    def batch_is_exist(self, names: list[str]) -> list[int]:
        """1 = it is there."""
        ...

    def batch_get_into(self, names: list[str], at: list[int], sizes: list[int]) -> list[int]:
        """Bytes of each; negative = not there."""
        ...

    def batch_put_from(self, names: list[str], at: list[int], sizes: list[int]) -> list[int]:
        """0 = it is there now."""
        ...

    def register_buffer(self, at: int, size: int) -> int:
        """0 = done."""
        ...

    def remove(self, name: str) -> int:
        """0 = it is gone."""
        ...


@dataclass(frozen=True)
class PoolSetup:
    """What the process is told first; the secret goes by no command line.

    Attributes:
        master: ``host:port`` of Mooncake's master.
        protocol: ``tcp`` or ``rdma``.
        secret: of the lease.
        folder: its pages on this node.
        most_bytes: as ``PageFolder``'s.
        page_bytes: of one page.
        shared: descriptor of memory for ``AT_ONCE`` pages that the engine reads, too.
    """

    master: str
    protocol: str
    secret: str
    folder: str
    most_bytes: int
    page_bytes: int
    shared: int = -1

    def line(self) -> str:
        """The line that is sent first."""
        return json.dumps(asdict(self))


class Mover:
    """Moves pages of one size.

    Args:
        store: where all nodes reach them.
        folder: where this node has them.
        seal: the lease's.
        page_bytes: of one page.
        into: where pulled pages go, ``AT_ONCE`` of them.
    """

    def __init__(
        self, store: PageStore, folder: PageFolder, seal: Seal, page_bytes: int, into: memoryview
    ) -> None:
        self._store, self._folder, self._seal = store, folder, seal
        self._size, self._into = page_bytes + SEAL_BYTES, pieces(into, page_bytes)
        self._plain = memoryview(bytearray(page_bytes))
        self._private = memoryview(bytearray(self._size))
        # Others can address what is registered: nothing but sealed pages is ever written here.
        self._shared = mmap.mmap(-1, AT_ONCE * self._size)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
        self._at = [first + place * self._size for place in range(AT_ONCE)]
        self._sealed = pieces(memoryview(self._shared), self._size)
        if store.register_buffer(first, len(self._shared)):
            raise OSError("Mooncake does not take memory for pages")

    def count(self, pages: Sequence[str]) -> int:
        """How many of the first are in the pool; what is there may still prove to be damaged.

        Raises:
            OSError: the store is lost, and so is this client of it.
        """
        found = self._store.batch_is_exist([self._seal.name(one) for one in pages])
        _check(found)
        return next((place for place, seen in enumerate(found) if seen != 1), len(pages))

    def pull(self, pages: Sequence[str]) -> int:
        """Bring pages, up to the first that is not there or not what it should be.

        Raises:
            OSError: as ``count``.
        """
        names = [self._seal.name(one) for one in pages]
        got = self._store.batch_get_into(names, self._at[: len(names)], [self._size] * len(names))
        _check(got)
        for place, page in enumerate(pages):
            if got[place] != self._size:
                return place
            # Whoever reaches the port could change it between being checked and being read.
            self._private[:] = self._sealed[place]
            if not self._seal.open(page, self._private, self._into[place]):
                log.warning("rose: %s in the pool is damaged; its tokens are computed", page)
                self._store.remove(names[place])
                return place
        return len(pages)

    def push(self, pages: Sequence[str]) -> int:
        """Write pages of the folder, up to the first that is not there any more.

        Raises:
            OSError: as ``count``.
        """
        names: list[str] = []
        for place, page in enumerate(pages):
            if not self._folder.get(page, self._plain):
                break
            self._seal.close(page, self._plain, self._sealed[place])
            names.append(self._seal.name(page))
        if not names:
            return 0
        put = self._store.batch_put_from(names, self._at[: len(names)], [self._size] * len(names))
        _check(put)
        return next((place for place, code in enumerate(put) if code), len(put))


def _check(codes: Sequence[int]) -> None:
    if _LOST in codes:
        raise OSError("Mooncake does not answer")


def pieces(memory: memoryview, size: int) -> list[memoryview]:
    """Memory for ``AT_ONCE`` pages, page by page."""
    return [memory[place * size : (place + 1) * size] for place in range(AT_ONCE)]


def checksum(name: bytes, content: memoryview) -> bytes:
    """Of a page in its folder."""
    import xxhash  # noqa: PLC0415  # engines have it, and not every process that reads this file

    state = xxhash.xxh3_128(name)
    state.update(content)
    return state.digest()


def _own_address(master: str) -> str:
    """Of the interface by which the pool is reached."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, int(port)))  # sends nothing
        return str(asked.getsockname()[0])


def _join(setup: PoolSetup) -> PageStore:
    """Become a client of the pool that gives no memory."""
    mooncake = importlib.import_module("mooncake.store")  # only in this process
    store: Any = mooncake.MooncakeDistributedStore()
    code = store.setup(
        *(_own_address(setup.master), "P2PHANDSHAKE", 0, _LOCAL_BYTES),
        *(setup.protocol, "", setup.master),
    )
    if code:
        raise OSError(f"Mooncake's master {setup.master} cannot be joined: code {code}")
    joined: PageStore = store
    return joined


def _serve(mover: Mover, replies: Any) -> None:  # noqa: ANN401  # a text file
    for line in sys.stdin:
        order = json.loads(line)
        moves = {"count": mover.count, "pull": mover.pull, "push": mover.push}
        done = moves[order["do"]](order["pages"])
        print(json.dumps({"done": done}), file=replies, flush=True)


def main() -> int:
    """``python -m rose_engines.kv.pool_process``; 1 = there is no pool."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ.update(_THREADS)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    # Mooncake writes where it likes; replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        setup = PoolSetup(**json.loads(sys.stdin.readline() or "{}"))
        folder = PageFolder(Path(setup.folder), setup.most_bytes, checksum)
        size, seal = setup.page_bytes, Seal(setup.secret)
        shared = memoryview(mmap.mmap(setup.shared, AT_ONCE * size))
        mover = Mover(_join(setup), folder, seal, size, shared)
    except (ImportError, OSError, TypeError, ValueError) as error:
        log.error("rose: no pool of keys: %s", error)  # noqa: TRY400  # a line says it
        return 1
    print(json.dumps({"ready": True}), file=replies, flush=True)
    try:
        _serve(mover, replies)
    except OSError as error:
        log.error("rose: the pool of keys is lost: %s", error)  # noqa: TRY400  # a line says it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
