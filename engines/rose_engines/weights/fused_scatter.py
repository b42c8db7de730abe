"""A commit's elements of all tensors on an accelerator, put in and read back in one launch.

Copies, launches and waits per tensor are little for a dense model of 400 tensors and seconds for
one of 18,867, in which no turn computes. So what the pause needs is laid out beforehand, beside
the serving engine: changes of equal width lie in one *arena* in pinned host memory, cut into
chunks, with a table that says to which address each chunk belongs. The pause then launches one
kernel per width (``scatter_kernel``), which reads the arena over the bus and takes no memory of the
device, and waits once. What did not keep its bits is written into pinned memory by the same kernel.

``TorchLane`` does the same by torch's own operations wherever Triton is not. Next step:
``rose_engines.weights.live`` commits; ``python -m bench.weights.launches`` counts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rose_core.delta.bits import Bits
from rose_engines.tensors.canonical import Live, LiveTensor, Where, do_nothing
from rose_engines.tensors.slices import SlicedTensor

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CHUNK = 1024
"""Elements that one program of the kernel puts in: eight for each of its threads."""
RUN = -1
"""In the place of a chunk's first offset: its elements lie one behind the other."""
_SPAN = 1 << 31
"""Offsets are 32 bits wide: with 16 bits of a weight six bytes a change cross the bus, not ten."""


@runtime_checkable
class OnDevice(Protocol):
    """A live parameter outside host memory.

    Attributes:
        written: renews what the engine keeps that is made of it.
    """

    written: Callable[[], object]

    def device_bits(self) -> torch.Tensor:
        """Its elements, flat, as signed integers of their width."""
        ...


class StagedScatter(NamedTuple):
    """Elements of one tensor: where they go, and the bits after and before."""

    name: str
    where: Where
    new: Bits
    old: Bits


@dataclass(frozen=True)
class Part:
    """A piece of one tensor's elements in an arena, at most ``_SPAN`` apart from each other.

    Attributes:
        staged: number of the tensor.
        flat: the tensor on the device.
        base: flat index of the element that offsets count from.
        first, count: entries in the arena.
        offset: first entry of its offsets, ``RUN`` = a run from ``base`` on.
        taken: which of the tensor's elements these are, None = all.
    """

    staged: int
    flat: torch.Tensor
    base: int
    first: int
    count: int
    offset: int
    taken: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class Arena:
    """All staged elements of one width, in pinned memory.

    Attributes:
        values: bits to be put in, signed.
        offsets: of those that are no run, from their part's base.
        table: per chunk: address of the base, first value, first offset or ``RUN``, elements.
        wrong: one number: 1 + a chunk that did not keep its bits; 0 = all did.
        parts: what lies where, in the order of the table.
        ends: number of the chunk behind each part's last.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    table: torch.Tensor
    wrong: torch.Tensor
    parts: tuple[Part, ...]
    ends: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Pinned memory that this takes."""
        pieces = (self.values, self.offsets, self.table, self.wrong)
        return sum(piece.nbytes for piece in pieces)


class Lane(Protocol):
    """What a commit asks of an accelerator; ``bench.weights.launches`` counts here."""

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can read while a kernel runs."""
        ...

    def address(self, flat: torch.Tensor) -> int:
        """Where the device finds a tensor's first element."""
        ...

    def scatter(self, arena: Arena) -> None:
        """Put an arena in and read it back; need not be done on return."""
        ...

    def wait(self) -> None:
        """Return when everything before is done."""
        ...


class FusedScatter:
    """Changes of tensors on one device, ready to be put in between two iterations.

    Args:
        staged: elements by tensor.
        live: the engine's weights; all of these tensors are ``OnDevice``.
        lane: the device.
    """

    def __init__(self, staged: Sequence[StagedScatter], live: Live, lane: Lane) -> None:
        self._lane = lane
        found = [_storage(live[one.name]) for one in staged]
        storages = [one for one in found if one is not None]
        flats = [one.device_bits() for one in storages]
        self._staged = tuple(
            _spread(one, flat.stride(0)) for one, flat in zip(staged, flats, strict=True)
        )
        self._written = dict.fromkeys(
            one.written for one in storages if one.written is not do_nothing
        )
        by_width: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, flat in enumerate(map(_close, flats)):
            by_width.setdefault(flat.element_size(), []).append((number, flat))
        self._arenas = tuple(self._arena(members) for members in by_width.values())
        self._holds_new = True
        # Places are in the arenas by now, in half of the memory.
        self._staged = tuple(one._replace(where=slice(0, 0)) for one in self._staged)

    @property
    def names(self) -> frozenset[str]:
        """The tensors it changes."""
        return frozenset(one.name for one in self._staged)

    @property
    def nbytes(self) -> int:
        """Pinned memory; unlocked and given back when the update is let go of."""
        return sum(arena.nbytes for arena in self._arenas)

    def put(self) -> str | None:
        """Put the new bits in and read them back; again does no harm.

        Returns:
            A tensor that did not keep what was written, None = all did.
        """
        self._fill(new=True)
        return self._go()

    def put_back(self) -> str | None:
        """Put the old bits in; again does no harm. Refills the arenas first, so it takes longer.

        Returns:
            As ``put``.
        """
        self._fill(new=False)
        return self._go()

    def _go(self) -> str | None:
        for arena in self._arenas:
            arena.wrong[0] = 0
        try:
            for arena in self._arenas:
                self._lane.scatter(arena)
            for written in self._written:
                written()
        finally:
            self._lane.wait()  # whatever failed, a launched kernel still reads the arenas
        for arena in self._arenas:
            if chunk := int(arena.wrong[0]):
                part = arena.parts[int(np.searchsorted(arena.ends, chunk - 1, side="right"))]
                return self._staged[part.staged].name
        return None

    def _arena(self, members: list[tuple[int, torch.Tensor]]) -> Arena:
        import torch  # noqa: PLC0415  # only inside engines

        parts: list[Part] = []
        entries = spread = 0
        for number, flat in members:
            for base, taken, run in _pieces(self._staged[number].where):
                count = self._staged[number].new.size if taken is None else taken.size
                offset = RUN if run else spread
                parts.append(Part(number, flat, base, entries, count, offset, taken))
                entries += count
                spread += 0 if run else count
        values = self._lane.pinned(entries, members[0][1].dtype)
        offsets = self._lane.pinned(spread, torch.int32)
        ends = np.cumsum([-(-part.count // CHUNK) for part in parts], dtype=np.int64)
        table = self._lane.pinned(4 * int(ends[-1] if len(ends) else 0), torch.int64)
        arena = Arena(values, offsets, table, self._lane.pinned(1, torch.int64), tuple(parts), ends)
        self._lay_out(arena)
        self._fill_arena(arena, new=True)
        return arena

    def _lay_out(self, arena: Arena) -> None:
        """Offsets, and the table over them."""
        offsets, table = arena.offsets.numpy(), arena.table.numpy().reshape(-1, 4)
        chunk = 0
        for part in arena.parts:
            where = self._staged[part.staged].where
            if part.offset != RUN and not isinstance(where, slice):
                places = where if part.taken is None else where[part.taken]
                offsets[part.offset : part.offset + part.count] = places - part.base
            begins = np.arange(0, part.count, CHUNK)
            rows = table[chunk : chunk + len(begins)]
            size = part.flat.element_size()
            start = self._lane.address(part.flat) + part.base * size
            rows[:, 0] = start + (begins * size if part.offset == RUN else 0)
            rows[:, 1] = part.first + begins
            rows[:, 2] = RUN if part.offset == RUN else part.offset + begins
            rows[:, 3] = np.minimum(part.count - begins, CHUNK)
            chunk += len(begins)

    def _fill(self, *, new: bool) -> None:
        if self._holds_new != new:
            for arena in self._arenas:
                self._fill_arena(arena, new=new)
            self._holds_new = new

    def _fill_arena(self, arena: Arena, *, new: bool) -> None:
        values = arena.values.numpy()
        unsigned = values.view(f"u{values.itemsize}")
        for part in arena.parts:
            staged = self._staged[part.staged]
            bits = staged.new if new else staged.old
            taken = bits if part.taken is None else bits[part.taken]
            unsigned[part.first : part.first + part.count] = taken


def _close(flat: torch.Tensor) -> torch.Tensor:
    """The same memory without gaps between its elements."""
    apart = flat.stride(0)
    return flat.as_strided(((flat.numel() - 1) * apart + 1,), (1,)) if apart > 1 else flat


def _spread(staged: StagedScatter, apart: int) -> StagedScatter:
    """The places of elements that lie so far apart (``_close``)."""
    if apart == 1:
        return staged
    where = staged.where
    if isinstance(where, slice):
        where = np.arange(where.start, where.stop, dtype=np.int64)
    return staged._replace(where=where * apart)


def _pieces(where: Where) -> Iterable[tuple[int, npt.NDArray[np.int64] | None, bool]]:
    """Base, elements (None = all) and whether they are a run, for pieces that offsets can span."""
    if isinstance(where, slice):
        yield int(where.start or 0), None, True
        return
    if not where.size:
        return
    base = int(where.min())
    if int(where.max()) - base < _SPAN:
        yield base, None, False
        return
    groups = (where - base) // _SPAN
    for group in np.unique(groups):
        yield base + int(group) * _SPAN, np.flatnonzero(groups == group), False


def _storage(tensor: LiveTensor) -> OnDevice | None:
    """The parameter outside host memory in which a tensor lies."""
    storage = tensor.storage if isinstance(tensor, SlicedTensor) else tensor
    return storage if isinstance(storage, OnDevice) else None


def fuse(staged: Iterable[StagedScatter], live: Live) -> FusedScatter | None:
    """Those staged elements whose tensors lie on an accelerator; None = there are none."""
    fitting, flat = list[StagedScatter](), None
    for one in staged:
        if (storage := _storage(live[one.name])) is not None:
            fitting.append(one)
            flat = storage.device_bits()
    return FusedScatter(fitting, live, lane_of(flat)) if flat is not None else None


def warm_up(live: Mapping[str, LiveTensor]) -> None:
    """Compile the kernel for every width of the engine, on scratch memory, before it serves."""
    widths: dict[int, torch.Tensor] = {}
    for tensor in live.values():
        if (storage := _storage(tensor)) is not None:
            flat = storage.device_bits()
            widths.setdefault(flat.element_size(), flat)
    for width, flat in widths.items():
        scratch = _Scratch(flat.new_zeros(2))
        zeros = np.zeros(2, f"u{width}")
        staged = [StagedScatter("scratch", np.arange(2), zeros, zeros)]
        FusedScatter(staged, {"scratch": scratch}, lane_of(flat)).put()  # type: ignore[dict-item]


@dataclass
class _Scratch:
    """Memory that is no weight."""

    flat: torch.Tensor
    written: Callable[[], object] = do_nothing

    def device_bits(self) -> torch.Tensor:
        """Itself."""
        return self.flat


def lane_of(flat: torch.Tensor) -> Lane:
    """How elements come to where this tensor is."""
    if flat.is_cuda and (kernel := _kernel()) is not None:
        return KernelLane(flat, kernel)
    return TorchLane(flat)


@functools.cache
def _kernel() -> ModuleType | None:
    """The kernel, where torch brought Triton with it."""
    try:
        from rose_engines.ondevice import scatter_kernel  # noqa: PLC0415  # compiles at import
    except ImportError:
        return None
    return scatter_kernel


_PORTABLE, _MAPPED = 1, 2  # of cudaHostRegister


class _LockedPages(mmap.mmap):
    """Memory of its own, unlocked before it goes back: when the last tensor over it is gone."""

    unlock: Callable[[], object] = staticmethod(do_nothing)

    def __del__(self) -> None:
        self.unlock()


def pinned(flat: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory that this tensor's device reads at the same address, if it is a GPU.

    torch keeps what it has pinned locked as long as the process lives, rounded up to a power of
    two. The pages here are locked to their size, and go back with the tensor.
    """
    import torch  # noqa: PLC0415  # only inside engines

    if not flat.is_cuda:
        return torch.zeros(count, dtype=dtype)
    nbytes = count * dtype.itemsize
    pages = _LockedPages(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # a child's copy would part the device from this process
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    address = whole.data_ptr()
    # A thread's current device need not be the tensor's, and must get no context here.
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(address, len(pages), _PORTABLE | _MAPPED))
    if not error:
        pages.unlock = functools.partial(_unlock, flat, address)
        return whole[:nbytes].view(dtype)
    log.warning("rose: CUDA does not lock given pages (error %d); torch keeps what it pins", error)
    with contextlib.suppress(RuntimeError):
        flat.new_zeros(1)  # the next launch reports the error, whichever launch that is
    return torch.zeros(count, dtype=dtype, pin_memory=True)


def _unlock(flat: torch.Tensor, address: int) -> None:
    import torch  # noqa: PLC0415  # only inside engines

    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        error = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if error:
        log.warning("rose: CUDA did not unlock the pages at %#x: error %d", address, error)


class TorchLane:
    """By torch's own operations, tensor by tensor: where Triton is not, and on CPU.

    Args:
        flat: a tensor on the device.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory, pinned where there is a GPU."""
        return pinned(self._flat, count, dtype)

    def address(self, flat: torch.Tensor) -> int:
        """Address of the memory that the tensor has."""
        return flat.data_ptr()

    def scatter(self, arena: Arena) -> None:
        """Put it in, part by part, and compare what is there then."""
        import torch  # noqa: PLC0415  # only inside engines

        chunk = 0
        for part, end in zip(arena.parts, arena.ends.tolist(), strict=True):
            device = part.flat.device
            given = arena.values[part.first : part.first + part.count].to(device)
            if part.offset == RUN:
                target = part.flat[part.base : part.base + part.count]
                kept = torch.equal(target.copy_(given), given)
            else:
                places = arena.offsets[part.offset : part.offset + part.count].to(device)
                where = places.to(torch.int64).add_(part.base)
                part.flat.scatter_(0, where, given)
                kept = torch.equal(part.flat.gather(0, where), given)
            if not kept:
                arena.wrong[0] = chunk + 1
            chunk = end

    def wait(self) -> None:
        """Every comparison above has waited."""


class KernelLane:
    """By one launch of ``scatter_kernel`` per arena.

    Args:
        flat: a tensor on the device.
        kernel: the module, which needs Triton.
    """

    def __init__(self, flat: torch.Tensor, kernel: ModuleType) -> None:
        self._flat = flat
        self._kernel = kernel

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory at the same address for the device, pinned."""
        return pinned(self._flat, count, dtype)

    def address(self, flat: torch.Tensor) -> int:
        """Address of the memory that the tensor has."""
        return flat.data_ptr()

    def scatter(self, arena: Arena) -> None:
        """One launch, behind whatever the engine has launched before."""
        if len(arena.table):
            parts = (arena.table, arena.offsets, arena.values, arena.wrong)
            self._kernel.scatter(*parts, self._flat, CHUNK)

    def wait(self) -> None:
        """One wait for the stream that the launches went to."""
        import torch  # noqa: PLC0415  # only inside engines

        if self._flat.is_cuda:
            torch.cuda.current_stream(self._flat.device).synchronize()
