"""An engine's weights in host memory as one array, so that one compiled loop serves all tensors.

Tensors lie anywhere in the process. An array from the lowest of them to the end of the highest
reaches each by its index; of it only elements of those tensors are touched, which the loops check.
So a staging and a commit run without the interpreter, and take it once and not once per tensor.
Tensors that are not plain host memory, or where numba is not, go tensor by tensor through
``LiveTensor``. Next step: ``staging`` makes an update with it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose_core.delta import faults, loops
from rose_core.delta.bits import Bits, number_format
from rose_core.delta.digest import Digest, tensor_key
from rose_core.delta.kernels import MemoryLoops, kernels
from rose_engines.tensors.canonical import HostTensor, Live, LiveTensor, do_nothing
from rose_engines.tensors.slices import SlicedTensor

Rows = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]
_NUMBERS = loops.SIGNED + 1
_AT_ONCE = 1 << 18
"""Elements between two rests: a few milliseconds."""
_PIECE = 1 << 16
"""Elements that a thread swaps before it takes more: for one such piece the engine may wait."""
_MOST_THREADS = 4
"""A few cores have all of a machine's memory traffic, of which a swap consists."""


class SwapThreads:
    """Threads that swap beside the engine's, which takes whatever they have not begun.

    Pieces are taken one by one (self-scheduling), so a helper that gets no core costs nothing.

    Args:
        count: of threads, beside the one that calls; None = by the cores that this one may use.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1
        self._count = count
        self._pool = ThreadPoolExecutor(count, "rose-swap") if count else None
        if self._pool is not None:  # begun here, and not amid the first commit
            here = threading.Barrier(count)
            list(self._pool.map(lambda _: here.wait(), range(count)))

    def run(self, work: Callable[[int], object], pieces: int) -> None:
        """Have all pieces done, ``work(0)`` to ``work(pieces - 1)``, each once."""
        left = itertools.count()

        def take() -> None:
            while (number := next(left)) < pieces:
                work(number)

        helpers = min(self._count, pieces - 1)
        begun = [self._pool.submit(take) for _ in range(helpers)] if self._pool is not None else []
        try:
            take()
        finally:  # nobody writes any more once this returns, however it does
            running = [one for one in begun if not one.cancel()]
            wait(running)
        for one in running:
            one.result()


@dataclass(frozen=True)
class HostMemory:
    """Tensors of one engine process; their numbers are their places in its ``live``.

    Attributes:
        names: of all tensors.
        arrays: by width of elements: the memory from the first such tensor to the last.
        tensors, keys: what the loops need to know of each.
        here: which tensors are reached.
        runs: by width, those of them that are here whole, in order and without gaps.
        written: what renews what an engine keeps that is made of a tensor.
        owners: keep the memory.
        threads: swap beside the one that calls.
    """

    names: tuple[str, ...]
    arrays: dict[int, Bits]
    tensors: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    here: npt.NDArray[np.bool_]
    runs: dict[int, dict[int, HostTensor]]
    written: tuple[Callable[[], object], ...]
    owners: tuple[Bits, ...]
    threads: SwapThreads

    @classmethod
    def of(cls, live: Live, threads: int | None = 0) -> HostMemory:
        """Whatever of these tensors is plain host memory.

        Args:
            live: the tensors.
            threads: that swap beside the one that calls; None = as many as there are cores for.
        """
        usable = kernels().memory is not None
        flats = [_flat(one) if usable else None for one in live.values()]
        lows: dict[int, int] = {}
        ends: dict[int, int] = {}
        for one in flats:
            if one is None:
                continue
            width, address = one.itemsize, one.ctypes.data
            end = address + (one.size - 1) * one.strides[0] + width
            lows[width] = min(lows.get(width, address), address)
            ends[width] = max(ends.get(width, end), end)
        tensors = np.zeros((len(flats), _NUMBERS), np.int64)
        here = np.zeros(len(flats), np.bool_)
        runs: dict[int, dict[int, HostTensor]] = {width: {} for width in lows}
        written: list[Callable[[], object]] = [do_nothing] * len(flats)
        for number, (tensor, flat) in enumerate(zip(live.values(), flats, strict=True)):
            if flat is None:
                continue
            width = flat.itemsize
            apart = flat.ctypes.data - lows[width]
            signed = number_format(tensor.dtype).sign_magnitude
            tensors[number] = (apart // width, flat.strides[0] // width, flat.size, signed)
            here[number] = True
            if isinstance(tensor, HostTensor) and flat.strides[0] == width:
                runs[width][number] = tensor
            written[number] = getattr(_storage(tensor), "written", do_nothing)
        return cls(
            tuple(live),
            {width: _spanning(lows[width], ends[width], width) for width in lows},
            tensors,
            np.array([tensor_key(name) for name in live], np.uint64),
            here,
            runs,
            tuple(written),
            tuple(one for one in flats if one is not None),
            SwapThreads(threads if lows else 0),
        )

    def resolve(  # noqa: PLR0917
        self,
        width: int,
        rows: Rows,
        places: npt.NDArray[np.uint32],
        names: npt.NDArray[np.int64],
        given: Bits,
        old: Bits,
        rest: Callable[[], None],
    ) -> Sums | int:
        """Old and new bits of these rows' elements.

        Args:
            width: bytes of an element.
            rows: of tensors that are ``here``.
            places: of a segment.
            names: of a segment.
            given: of this width; steps become new bits.
            old: room for as many.
            rest: called between pieces of the work.

        Returns:
            Per row the digests of old and of new bits, two lanes each; or the number of a row that
            has an element outside its tensor.
        """
        sums = np.zeros((len(rows), 4), np.uint64)
        for first, end in _pieces(rows, _AT_ONCE):
            wrong = _loops().resolve(
                self.arrays[width],
                self.tensors,
                self.keys,
                rows[first:end],
                places,
                names,
                given,
                8 * width,
                old,
                sums[first:end],
            )
            if wrong:
                return first + wrong - 1
            rest()
        return sums

    def swap(
        self, width: int, rows: Rows, places: npt.NDArray[np.uint32], bits: Bits
    ) -> str | None:
        """Overwrite the elements of rows that ``resolve`` took.

        Returns:
            The first tensor that did not keep what was written, None = all did.
        """
        wrong = list[int]()

        def swap_rows(first: int, end: int) -> None:
            row = _loops().swap(self.arrays[width], self.tensors, rows[first:end], places, bits)
            if row:
                wrong.append(first + row - 1)

        # One row, then all others: who looks between finds a model that is half of each version.
        swap_rows(0, 1)
        faults.at("engine.commit.scatter")
        pieces = [(1 + first, 1 + end) for first, end in _pieces(rows[1:], _PIECE)]
        self.threads.run(lambda number: swap_rows(*pieces[number]), len(pieces))
        faults.at("engine.commit.scatter")
        return self.names[int(rows[min(wrong), loops.TENSOR])] if wrong else None

    def digests(self, tensors: Sequence[int]) -> dict[int, Digest]:
        """Digests, by number, of those of these tensors that are ``runs``.

        One loop for each width: a call for each tensor would ask for the interpreter hundreds of
        times, and the engine's thread waits for whoever has it.
        """
        found = dict[int, Digest]()
        for width, runs in self.runs.items():
            chosen = np.array([number for number in tensors if number in runs], np.int64)
            sums = np.zeros((len(chosen), 2), np.uint64)
            _loops().digest_tensors(self.arrays[width], self.tensors, self.keys, chosen, sums)
            for number, (low, high) in zip(chosen.tolist(), sums.tolist(), strict=True):
                found[number] = runs[number].marked(Digest(low, high))
        return found

    def renew(self, tensors: Sequence[int]) -> None:
        """What is made of these tensors, once each."""
        for written in dict.fromkeys(self.written[number] for number in tensors):
            written()


def _loops() -> MemoryLoops:
    found = kernels().memory
    if found is None:
        message = "no tensor is here without compiled loops"
        raise RuntimeError(message)
    return found


def _pieces(rows: Rows, elements: int) -> list[tuple[int, int]]:
    """Rows that together have about so many elements, one behind the other."""
    ends = np.cumsum(rows[:, loops.COUNT]) // elements
    cuts = (np.flatnonzero(np.diff(ends)) + 1).tolist()
    edges = [0, *cuts, len(rows)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _storage(tensor: LiveTensor) -> object:
    return tensor.storage if isinstance(tensor, SlicedTensor) else tensor


def _flat(tensor: LiveTensor) -> Bits | None:
    """The memory of a tensor, where it is plain: what else one does with it is another class."""
    storage = _storage(tensor)
    if type(storage) is not HostTensor or not storage.flat.size:
        return None
    flat, width = storage.flat, storage.flat.itemsize
    plain = flat.flags.writeable and flat.strides[0] > 0
    even = flat.ctypes.data % width == 0 and flat.strides[0] % width == 0
    return flat if plain and even and flat.ndim == 1 else None


def _spanning(low: int, end: int, width: int) -> Bits:
    """The process's memory from one address to another, which none but the loops may index."""
    whole = memoryview((ctypes.c_char * (end - low)).from_address(low))
    found: Bits = np.frombuffer(whole.cast("B"), f"<u{width}")
    return found
