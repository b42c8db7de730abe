"""Chooses how the inner loops run: compiled by numba where it is installed, else numpy.

``Kernels`` is what an implementation has to offer; all give the same bytes. numba is imported on
first use, because importing it takes longer than most processes need to start. A third one, by
torch on any device, is ``rose_engines.ondevice.device_loops``: it is handed in, since the core
knows no torch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rose_core.delta import loops, vectors
from rose_core.delta.bits import Bits, Indices

KEPT_ELEMENTS = 1 << 22
"""Room for larger tiles is not kept."""
_CACHE_LOCK = threading.Lock()  # numba's folder is a setting of the process


@dataclass(frozen=True)
class ClassLoops:
    """Loops of exponent classes (``rice``) of one backend; ``rice_vectors`` says what they do."""

    largest: Callable[[Bits, int], int]
    rank: Callable[[Bits, Indices, int, int, int], tuple[Bits, Indices]]
    arrange: Callable[[Bits, Indices, Bits], tuple[Indices, Indices, Bits]]
    choose: Callable[[Indices, Indices], Indices]
    write: Callable[[Indices, Bits, Indices, Indices, int], bytes]
    read: Callable[[bytes, Indices, Indices, int, Indices, Bits], bool]
    place: Callable[[Bits, int, int, int, Indices, Indices], tuple[Indices, Indices] | None]


@dataclass(frozen=True)
class MemoryLoops:
    """Loops over many tensors in host memory at once; ``loops`` says what they do."""

    resolve: Callable[..., int]
    swap: Callable[..., int]
    digest_tensors: Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """The inner loops of one backend; all arrays are contiguous and one-dimensional.

    Attributes:
        name: ``numba``, ``numpy`` or ``torch``.
        compare: (old, new) -> ascending positions that differ, bits before, bits after.
        steps_between: (old, new) -> steps from one run of sign-magnitude values to another.
        move: (old, steps) -> sign-magnitude values moved by steps.
        pack: (positions, steps) -> gap bytes, code bytes, escaped steps.
        unpack: the inverse, None when the streams do not belong together.
        digest_run: (bits, first position, key) -> two lanes.
        digest_at: (positions, bits, key) -> two lanes.
        put: (flat, positions, bits) overwrites; positions are known to be inside.
        holds: (flat, positions, bits) -> whether they are there.
        classes: its own loops of exponent classes, where it has some.
        memory: loops over many tensors at once, where it has some.
    """

    name: str
    compare: Callable[[Bits, Bits], tuple[Indices, Bits, Bits]]
    steps_between: Callable[[Bits, Bits], Bits]
    move: Callable[[Bits, Bits], Bits]
    pack: Callable[[Indices, Bits], tuple[Bits, Bits, Bits]]
    unpack: Callable[[Bits, Bits, Bits], tuple[Indices, Bits] | None]
    digest_run: Callable[[Bits, int, int], tuple[int, int]]
    digest_at: Callable[[Indices, Bits, int], tuple[int, int]]
    classes: ClassLoops | None = None
    put: Callable[[Bits, Indices, Bits], None] = vectors.put
    holds: Callable[[Bits, Indices, Bits], bool] = vectors.holds
    memory: MemoryLoops | None = None


Backend = Literal["auto", "numba", "numpy"] | Kernels
"""Which implementation runs, by name, or one that was made elsewhere."""

NUMPY = Kernels(
    "numpy",
    vectors.compare,
    vectors.steps_between,
    vectors.move,
    vectors.pack,
    vectors.unpack,
    vectors.digest_run,
    vectors.digest_at,
)


@functools.cache
def kernels(backend: Backend = "auto") -> Kernels:
    """The inner loops.

    Raises:
        ModuleNotFoundError: ``numba`` was demanded and is not installed.
    """
    if isinstance(backend, Kernels):
        return backend
    if backend == "numpy":
        return NUMPY
    try:
        return _compiled()
    except ModuleNotFoundError:
        if backend == "numba":
            raise
        return NUMPY


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop as machine code."""
    import numba  # noqa: PLC0415  # optional, and slow to import

    # numba discards an index that another release of it has written. So each release has a folder:
    # an engine's environment often has another one than the environment that uses the checkout.
    settings: Any = numba.config
    with _CACHE_LOCK:
        before = settings.CACHE_DIR
        parent = Path(before) if before else Path(loops.__file__).parent / "__pycache__"
        settings.CACHE_DIR = str(parent / f"numba-{numba.__version__}")
        try:
            fast: Callable[..., Any] = numba.njit(cache=True, nogil=True)(loop)
        except RuntimeError:  # no folder to cache in: compile anew in every process
            fast = numba.njit(nogil=True)(loop)
        finally:
            settings.CACHE_DIR = before
    return fast


class _Scratch(threading.local):
    """Room for what a comparison finds, per thread: new memory would have to be cleared first."""

    def __init__(self) -> None:
        self._room: dict[np.dtype[Any], tuple[Indices, Bits, Bits]] = {}

    def room(self, elements: int, dtype: np.dtype[Any]) -> tuple[Indices, Bits, Bits]:
        found = self._room.get(dtype)
        if found is not None and len(found[0]) >= elements:
            return found
        made = np.empty(elements, np.int64), np.empty(elements, dtype), np.empty(elements, dtype)
        if elements <= KEPT_ELEMENTS:
            self._room[dtype] = made
        return made


def _compile_fetch() -> None:
    """Have numba make ``loops.fetch`` the processor's own instruction, which never faults."""
    from llvmlite import ir  # noqa: PLC0415  # comes with numba
    from numba import types  # noqa: PLC0415
    from numba.core.cgutils import get_or_insert_function  # noqa: PLC0415
    from numba.extending import intrinsic, overload  # noqa: PLC0415

    def instruction(_: Any, memory: Any, at: Any) -> Any:  # noqa: ANN401
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:  # noqa: ANN401
            array = context.make_array(signature.args[0])(context, builder, given[0])
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            address = builder.bitcast(builder.gep(array.data, [given[1]]), byte)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            name = "llvm.prefetch.p0i8"
            insert: Any = get_or_insert_function
            called = insert(builder.module, kind, name)
            # To be read, into all caches, of data.
            builder.call(called, [address, *(number(one) for one in (0, 3, 1))])
            return context.get_dummy_value()

        return types.void(memory, at), generate

    made: Any = intrinsic(instruction)

    @overload(loops.fetch, strict=False)  # that would compare annotations too
    def fetch(memory: Any, at: Any) -> Any:  # noqa: ANN401, ARG001  # numba asks for both names
        return lambda memory, at: made(memory, at)  # noqa: PLW0108  # numba compiles this one


def _compiled() -> Kernels:
    _compile_fetch()
    compare_loop, steps_loop, move_loop, pack_loop, unpack_loop, run, at, put, differing = (
        compiled(loop)
        for loop in (
            loops.compare,
            loops.steps_between,
            loops.move,
            loops.pack,
            loops.unpack,
            loops.digest_run,
            loops.digest_at,
            loops.put,
            loops.differing,
        )
    )

    scratch = _Scratch()

    def compare(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
        whole = old.nbytes // 8 * 8 // old.itemsize
        words = (part[:whole].view(np.uint64) for part in (old, new))
        found, before, after = scratch.room(len(old) + 1, old.dtype)
        marked = np.empty(loops.CHUNK + 1, np.uint32)
        count = int(compare_loop(old, new, *words, marked, found, before, after))
        return found[:count].copy(), before[:count].copy(), after[:count].copy()

    def steps_between(old: Bits, new: Bits) -> Bits:
        steps = np.empty(len(old), old.dtype)
        steps_loop(old, new, old.dtype.itemsize * 8, steps)
        return steps

    def move(old: Bits, steps: Bits) -> Bits:
        new = np.empty(len(old), old.dtype)
        move_loop(old, steps, old.dtype.itemsize * 8, new)
        return new

    def pack(indices: Indices, steps: Bits) -> tuple[Bits, Bits, Bits]:
        span = int(indices[-1]) + 1 if len(indices) else 0
        gaps = np.empty(len(indices) + span // loops.ESCAPE + 1, np.uint8)
        codes = np.empty(len(indices), np.uint8)
        escapes = np.empty(len(indices), steps.dtype)
        width = steps.dtype.itemsize * 8
        used, escaped = pack_loop(indices, steps, width, gaps, codes, escapes)
        return gaps[:used], codes, escapes[:escaped]

    def unpack(gaps: Bits, codes: Bits, escapes: Bits) -> tuple[Indices, Bits] | None:
        indices = np.empty(len(codes) + 1, np.int64)
        steps = np.empty(len(codes), escapes.dtype)
        width = escapes.dtype.itemsize * 8
        used = unpack_loop(gaps, codes, escapes, width, indices, steps)
        return (indices[:-1], steps) if used == len(escapes) else None

    def digest_run(bits: Bits, first: int, key: int) -> tuple[int, int]:
        low, high = run(bits, first, np.uint64(key))
        return int(low), int(high)

    def digest_at(indices: Indices, bits: Bits, key: int) -> tuple[int, int]:
        low, high = at(indices, bits, np.uint64(key))
        return int(low), int(high)

    def holds(flat: Bits, where: Indices, bits: Bits) -> bool:
        return not differing(flat, where, bits)

    return Kernels(
        "numba",
        compare,
        steps_between,
        move,
        pack,
        unpack,
        digest_run,
        digest_at,
        put=put,
        holds=holds,
        memory=MemoryLoops(
            compiled(loops.resolve), compiled(loops.swap), compiled(loops.digest_tensors)
        ),
    )
