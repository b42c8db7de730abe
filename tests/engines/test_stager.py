"""The stager beside an engine: what it hands over, and what becomes of the engine without it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from rose_core.delta import loops
from rose_core.delta.bits import Bits, number_format
from rose_core.delta.kernels import MemoryLoops, kernels
from rose_core.delta.loops import RUN
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_dev.waiting import wait_until
from rose_engines.errors import CommitRefused
from rose_engines.node.pace import NICE, Pace
from rose_engines.tensors.canonical import HostTensor, Live, LiveTensor, Where, host_tensors
from rose_engines.tensors.slices import Box, SlicedTensor
from rose_engines.weights import decoding, host_memory
from rose_engines.weights import segment as segments
from rose_engines.weights import stager as stagers
from rose_engines.weights.calls import Commit, Committed, Refused, Stage, Staged
from rose_engines.weights.decoding import Decoded, held_of
from rose_engines.weights.host_memory import HostMemory, Rows, SwapThreads
from rose_engines.weights.live import commit, confirm, digest_live
from rose_engines.weights.segment import SharedMemory, Sizes, StagedSegment, memory_of
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import InThread, OwnProcess
from rose_engines.weights.staging import stage

V0, V1, V2 = (WeightVersion("run", 1, n) for n in range(3))
PATIENCE = 300.0


def engine(state: State) -> Live:
    return host_tensors({name: one._replace(bits=one.bits.copy()) for name, one in state.items()})


def equal(live: Live, state: State) -> bool:
    return all(np.array_equal(live[name].all_bits(), state[name][2]) for name in state)


@contextlib.contextmanager
def beside(live: Live, patience: float = PATIENCE) -> Iterator[OwnProcess]:
    stager = OwnProcess(held_of(live), patience)
    try:
        yield stager
    finally:
        stager.close()


@pytest.fixture
def bundle(tmp_path: Path, old: State, sparse: State) -> Path:
    write_bundle(tmp_path / "there", V1, sparse, (V0, old))
    return tmp_path / "there"


def aborted(stager: OwnProcess, live: Live, bundle: Path) -> str:
    """What is said of a staging that the stager did not survive."""
    with pytest.raises(CommitRefused) as refused:
        stage(bundle, live, digest_live(live), stager=stager)
    assert refused.value.reason == "Aborted"
    return refused.value.message


def test_a_process_hands_over_what_a_thread_finds(
    tmp_path: Path, bundle: Path, old: State, sparse: State
) -> None:
    """Deltas and whole states, one after the other, by one stager."""
    write_bundle(tmp_path / "full", V2, old)
    live = engine(old)
    with beside(live) as stager:
        for folder, state in ((bundle, sparse), (tmp_path / "full", old)):
            current = digest_live(live)
            mine = InThread(held_of(live)).decode(folder, str(current), Pace(lambda: False))
            theirs = stager.decode(folder, str(current), Pace(lambda: False))
            assert mine.outline == theirs.outline
            for name in ("rows", "wanted", "touched", "totals", "places", "names"):
                assert np.array_equal(getattr(mine.segment, name), getattr(theirs.segment, name))
            update = stage(folder, live, current, stager=stager)
            commit(update, live)
            assert confirm(update, live) is None
            assert equal(live, state)


def test_what_it_refuses_is_what_a_thread_refuses(
    tmp_path: Path, bundle: Path, old: State, sparse: State
) -> None:
    live = engine(sparse)
    with beside(live) as stager:
        for folder, reason in ((bundle, "WrongBase"), (tmp_path / "none", "Corrupt")):
            with pytest.raises(CommitRefused) as refused:
                stage(folder, live, digest_live(live), stager=stager)
            assert refused.value.reason == reason
        pid = stager.pid
        write_bundle(tmp_path / "back", V2, old, (V1, sparse))
        stage(tmp_path / "back", live, digest_live(live), stager=stager)
        assert stager.pid == pid  # a refusal is no reason for another one


def test_a_killed_one_is_said_and_replaced(bundle: Path, old: State, sparse: State) -> None:
    live = engine(old)
    with beside(live) as stager:
        first = stager.pid
        assert first is not None
        stopped(first)
        killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
        killer.start()
        reported = aborted(stager, live, bundle)
        killer.join()
        assert "SIGKILL" in reported or "lost" in reported
        assert equal(live, old)
        assert stager.pid not in {None, first}
        commit(stage(bundle, live, digest_live(live), stager=stager), live)
        assert equal(live, sparse)


def test_one_that_died_while_idle_is_replaced_unnoticed(
    bundle: Path, old: State, sparse: State
) -> None:
    live = engine(old)
    with beside(live) as stager:
        assert stager.pid is not None
        os.kill(stager.pid, signal.SIGKILL)
        wait_until(lambda: state_of(stager.pid or 0) in {"Z", ""}, "it is dead", seconds=60)
        commit(stage(bundle, live, digest_live(live), stager=stager), live)
        assert equal(live, sparse)


def test_a_stopped_one_is_given_up_after_its_patience(
    bundle: Path, old: State, sparse: State
) -> None:
    live = engine(old)
    with beside(live, patience=0.5) as stager:
        first = stager.pid
        assert first is not None
        stopped(first)
        assert "no sign of life in 0.5 s" in aborted(stager, live, bundle)
        assert equal(live, old)
        assert state_of(first) == ""  # it is ended, and nobody's zombie
        stager._patience = PATIENCE
        commit(stage(bundle, live, digest_live(live), stager=stager), live)
        assert equal(live, sparse)


def test_a_thawed_engine_does_not_take_its_frozen_stager_for_dead(
    bundle: Path, old: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock went on while both stood still: a look counts for little, however long it took."""
    live = engine(old)
    ahead = iter(range(0, 1_000_000_000, 1000))
    monkeypatch.setattr(f"{stagers.__name__}.time.monotonic", lambda: float(next(ahead)))
    with beside(live) as stager:
        stage(bundle, live, digest_live(live), stager=stager)


def test_memory_that_it_may_not_have_is_a_refusal(bundle: Path, old: State, sparse: State) -> None:
    """Files of memory count as files to this limit, so it stands for any that is reached."""
    live = engine(old)
    with beside(live) as stager:
        assert stager.pid is not None
        stage(bundle, live, digest_live(live), stager=stager)  # by now it is set up
        resource.prlimit(stager.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        assert "has no room" in aborted(stager, live, bundle)
        assert equal(live, old)
        resource.prlimit(stager.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        commit(stage(bundle, live, digest_live(live), stager=stager), live)
        assert equal(live, sparse)


def test_a_limit_of_its_address_space_is_a_refusal_too(
    bundle: Path, old: State, sparse: State
) -> None:
    live = engine(old)
    with beside(live) as stager:
        assert stager.pid is not None
        stage(bundle, live, digest_live(live), stager=stager)
        resource.prlimit(stager.pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        aborted(stager, live, bundle)
        assert equal(live, old)
        resource.prlimit(stager.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        commit(stage(bundle, live, digest_live(live), stager=stager), live)
        assert equal(live, sparse)


def test_no_process_at_all_is_a_refusal(
    bundle: Path, old: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = engine(old)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(f"{stagers.__name__}.subprocess.Popen", refuse)
    with beside(live) as stager:
        assert stager.pid is None
        assert "no stager can be started" in aborted(stager, live, bundle)
        monkeypatch.undo()
        stage(bundle, live, digest_live(live), stager=stager)


def test_memory_that_is_too_short_is_refused() -> None:
    shared = SharedMemory()
    shared.room(100)
    with pytest.raises(ValueError, match="100 bytes instead of 101"):
        memory_of(shared.descriptor, 101)
    shared.close()


def test_memory_that_was_handed_over_is_neither_shortened_nor_written_anew() -> None:
    shared = SharedMemory()
    shared.room(8)[:] = b"as it is"
    mine = memory_of(shared.descriptor, 8)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.descriptor, 0)
    if fcntl.fcntl(shared.descriptor, fcntl.F_GET_SEALS) & segments._FUTURE_WRITE:
        with pytest.raises(PermissionError):
            mmap.mmap(shared.descriptor, 8)
        with pytest.raises(PermissionError):
            os.pwrite(shared.descriptor, b"x", 0)
    shared.close()
    assert mine[:] == b"as it is"


class Torn:
    """Hands over what a stager with a fault might."""

    def __init__(self, live: Live, field: int, value: int) -> None:
        self._stager = InThread(held_of(live))
        self._field, self._value = field, value

    def decode(self, bundle: Path, current: str, pace: Pace) -> Decoded:
        found = self._stager.decode(bundle, current, pace)
        found.segment.rows[-1, self._field] = self._value
        return found


@pytest.mark.parametrize("value", [-2, 1 << 20, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize(
    "field",
    [loops.TENSOR, loops.ENTRY, loops.COUNT, loops.PLACE, loops.NAME, loops.START, loops.GIVEN],
)
def test_numbers_that_lead_out_of_a_segment_or_a_tensor_are_refused(
    bundle: Path, old: State, field: int, value: int
) -> None:
    live = engine(old)
    with pytest.raises(CommitRefused) as refused:
        stage(bundle, live, digest_live(live), stager=Torn(live, field, value))
    assert refused.value.reason in {"Corrupt", "DigestMismatch"}
    assert equal(live, old)


@pytest.mark.parametrize("part", ["places", "given", "wanted"])
def test_a_torn_segment_is_refused(bundle: Path, old: State, part: str) -> None:
    live = engine(old)

    class Flipped(InThread):
        def decode(self, bundle: Path, current: str, pace: Pace) -> Decoded:
            found = super().decode(bundle, current, pace)
            array = found.segment.given[2] if part == "given" else getattr(found.segment, part)
            array.reshape(-1)[len(array) // 2] ^= 1
            return found

    with pytest.raises(CommitRefused, match=r"DigestMismatch|Corrupt"):
        stage(bundle, live, digest_live(live), stager=Flipped(held_of(live)))
    assert equal(live, old)


def test_tensor_by_tensor_comes_to_the_same_as_all_at_once(
    tmp_path: Path, bundle: Path, old: State, sparse: State
) -> None:
    """Plain memory goes through one loop; what is another class goes through its own methods."""

    class Other(HostTensor):
        pass

    write_bundle(tmp_path / "full", V2, sparse)
    for folder in (bundle, tmp_path / "full"):
        live = engine(old)
        other: dict[str, LiveTensor] = {
            name: Other(name, d, s, bits.copy()) for name, (d, s, bits) in old.items()
        }
        assert HostMemory.of(live).here.all()
        assert not HostMemory.of(other).here.any()
        one, two = (stage(folder, each, digest_live(each)) for each in (live, other))
        assert not one.single
        assert not two.host.rows
        assert one.moved == two.moved
        for mine, theirs in zip(one.changes, two.changes, strict=True):
            assert mine.tensor.name == theirs.tensor.name
            assert np.array_equal(mine.old, theirs.old)
            assert np.array_equal(mine.new, theirs.new)
        commit(one, live)
        commit(two, other)
        assert equal(live, sparse)
        assert equal(other, sparse)


def test_a_part_of_a_tensor_is_resolved_by_its_own_names(
    bundle: Path, old: State, sparse: State
) -> None:
    """A rank holds half of the columns, transposed."""
    live: dict[str, LiveTensor] = dict(engine(old))
    dtype, shape, bits = old["a.down_proj.weight"]
    rows, columns = shape
    half = columns // 2
    box = Box("p", half, rows, half, columns, 0, 1, rows)
    flat = HostTensor("p", dtype, (rows * half,), bits.reshape(shape)[:, half:].T.copy().ravel())
    live["a.down_proj.weight"] = SlicedTensor("a.down_proj.weight", dtype, shape, (box,), flat)
    with beside(live) as stager:
        update = stage(bundle, live, digest_live(engine(old)), stager=stager)
        commit(update, live)
    wanted = sparse["a.down_proj.weight"][2].reshape(shape)[:, half:].T.ravel()
    assert np.array_equal(flat.flat, wanted)


def test_memory_is_counted_as_a_rank_fills_it(bundle: Path, old: State) -> None:
    """Of every block of this tensor it holds half, and the stager keeps room for the whole."""
    live: dict[str, LiveTensor] = dict(engine(old))
    name = "a.q_proj.weight"
    dtype, shape, bits = old[name]
    rows, columns = shape
    box = Box("p", 0, rows, columns // 2, columns, 0, columns // 2)
    half = bits.reshape(shape)[:, : columns // 2].ravel()
    live[name] = SlicedTensor(name, dtype, shape, (box,), HostTensor("p", dtype, half.shape, half))
    update = stage(bundle, live, digest_live(engine(old)))
    table = update.segment.rows
    named = table[:, loops.NAME] >= 0
    held = int((table[:, loops.COUNT] * np.where(named, 16, 8)).sum())
    assert named.any()
    assert held < update.staged_bytes < held + 2 * table.nbytes


def test_loops_report_memory_that_does_not_keep_its_bits() -> None:
    """Two values for one place: one of them is not there when it is read back."""
    bits = np.zeros(8, np.uint16)
    memory = HostMemory.of(host_tensors({"t": StoredTensor("BF16", (8,), bits)}))
    rows = np.array([[0, 0, 0, 2, 0, -1, 0, 0, 0, loops.VALUES, 1]], np.int64)
    places = np.array([3, 3], np.uint32)
    assert memory.swap(2, rows, places, np.array([1, 2], np.uint16)) == "t"
    assert memory.swap(2, rows, places, np.array([2, 2], np.uint16)) is None
    assert bits.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]


def _rows(count: int, each: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
    """Rows of one tensor with so many elements each, every third of the tensor."""
    starts = each * np.arange(count)
    rows = np.zeros((count, loops.WHOLE + 1), np.int64)
    rows[:, loops.COUNT], rows[:, loops.ENTRY], rows[:, loops.PLACE] = each, starts, starts
    rows[:, loops.NAME], rows[:, loops.GIVEN], rows[:, loops.WHOLE] = RUN, loops.VALUES, 1
    return rows, 3 * np.arange(count * each, dtype=np.uint32)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_threads_swap_every_row_once_and_tell_what_is_not_kept(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", 64)
    rows, places = _rows(100, 40)
    bits = np.zeros(3 * len(places), np.uint16)
    memory = HostMemory.of(host_tensors({"t": StoredTensor("BF16", (len(bits),), bits)}), threads)
    given = np.arange(1, len(places) + 1, dtype=np.uint16)
    assert memory.swap(2, rows, places, given) is None
    wanted = np.zeros_like(bits)
    wanted[::3] = given
    assert np.array_equal(bits, wanted)
    twice = places.copy()
    twice[[2041, 3001]] = twice[[2040, 3000]]  # two values for one place, in two rows
    assert memory.swap(2, rows, twice, given) == "t"


@pytest.mark.parametrize("word", ["BF16", "I8", "F32", "U64"])
def test_one_loop_digests_what_each_tensor_would(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lie without gaps; what is out of date in one of them shows as before."""
    kind, draw = number_format(word).unsigned, np.random.default_rng(5)
    live: dict[str, LiveTensor] = {}
    for name, size, apart in (("a", 100, 1), ("b", 37, 2), ("c", 9, 1)):
        bits = draw.integers(0, 1 << 8 * kind.itemsize, size * apart, dtype=kind, endpoint=False)
        live[name] = HostTensor(name, word, (size,), bits[::apart], current=partial(ne, name, "c"))
    wanted = {number: live[name].digest() for number, name in ((0, "a"), (2, "c"))}
    memory = HostMemory.of(live)
    assert memory.digests([0, 1, 2]) == wanted
    assert memory.digests([2]) == {2: wanted[2]}
    plain = MemoryLoops(loops.resolve, loops.swap, loops.digest_tensors)
    monkeypatch.setattr(host_memory, "_loops", lambda: plain)
    with np.errstate(over="ignore"):
        assert memory.digests([0, 1, 2]) == wanted


def test_a_commit_is_confirmed_without_a_call_for_each_tensor(
    bundle: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = engine(old)
    update = stage(bundle, live, digest_live(live))
    commit(update, live)
    calls = list[str]()
    monkeypatch.setattr(HostTensor, "digest", lambda self: calls.append(self.name))
    assert confirm(update, live) is None
    assert not calls
    name = min(update.wanted)
    live[name].put(slice(0, 1), sparse[name][2][:1] ^ 1)
    assert (confirm(update, live) or "").startswith(f"{name} has digest")


def test_a_compiled_swap_fetches_what_it_will_write() -> None:
    """It is a hint to the processor, so no result shows it: the compiled loop does."""
    kernels()  # says what numba makes of the hint
    fresh: Any = numba.njit(loops.swap)
    row, places, bits = np.zeros((0, loops.WHOLE + 1), np.int64), np.uint32, np.uint16
    nothing = np.zeros(0, places), np.zeros(0, bits)
    fresh(np.zeros(1, bits), np.zeros((1, 4), np.int64), row, *nothing)
    (made,) = fresh.inspect_llvm().values()
    assert "call void @llvm.prefetch" in made


def test_a_swap_does_not_wait_for_threads_that_get_no_core() -> None:
    threads, done, free = SwapThreads(2), list[int](), threading.Event()
    for _ in range(2):
        threads._pool.submit(free.wait)  # type: ignore[union-attr]
    threads.run(done.append, 20)
    free.set()
    assert done == list(range(20))
    threads.run(done.append, 20)
    assert sorted(done) == sorted([*range(20)] * 2)


def test_what_a_thread_fails_at_fails_the_swap() -> None:
    def fail(number: int) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match=r"[01]"):
        SwapThreads(1).run(fail, 2)


@pytest.mark.parametrize("word", ["BF16", "I8", "F32", "U64"])
def test_compiled_loops_do_what_they_say_in_python(word: str) -> None:
    """A box of lines, and elements with places and names of their own."""
    kind = number_format(word).unsigned
    draw = np.random.default_rng(3)
    rows = np.array(
        [
            [0, 0, 0, 6, RUN, RUN, 4, 3, 10, loops.VALUES, 1],
            [0, 1, 6, 4, 0, 0, 20, 0, 0, loops.STEPS, 1],
        ],
        np.int64,
    )
    places, names = np.array([0, 1, 7, 9], np.uint32), np.array([90, 8, 7, 100], np.int64)
    start = draw.integers(0, 1 << 8 * kind.itemsize, 40, dtype=kind, endpoint=False)
    reported = draw.integers(0, 1 << 8 * kind.itemsize, 10, dtype=kind, endpoint=False)
    found = []
    for compiled in (True, False):
        bits, given, old = start.copy(), reported.copy(), np.zeros_like(reported)
        memory = HostMemory.of(host_tensors({"t": StoredTensor(word, (40,), bits)}))
        sums = np.zeros((2, 4), np.uint64)
        both = (
            kernels().memory
            if compiled
            else MemoryLoops(loops.resolve, loops.swap, loops.digest_tensors)
        )
        assert both is not None
        common = (memory.arrays[kind.itemsize], memory.tensors)
        with np.errstate(over="ignore"):
            resolved = (memory.keys, rows, places, names, given, 8 * kind.itemsize, old, sums)
            assert both.resolve(*common, *resolved) == 0
            assert both.swap(*common, rows, places, given) == 0
            far = rows.copy()
            far[1, loops.START] = 31  # its last place is behind the end
            assert both.resolve(*common, memory.keys, far, *resolved[2:]) == 2
        found.append((bits, old[:6], sums))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    assert not np.array_equal(found[0][0], start)


def test_a_session_keeps_its_version_without_its_stager_and_takes_the_next(
    bundle: Path, old: State, sparse: State
) -> None:
    made: list[OwnProcess] = []

    def start(held: object) -> OwnProcess:
        made.append(OwnProcess(held, PATIENCE))  # type: ignore[arg-type]
        return made[-1]

    live = engine(old)
    session = WeightSession(live, str(V0), stager=start)
    running = threading.Event()
    running.set()

    def serve() -> None:
        while running.is_set():
            session.on_boundary()
            time.sleep(0.001)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        (stager,) = made
        pid = stager.pid
        assert pid is not None
        stopped(pid)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        refused = session.handle(Stage(str(bundle)))
        assert isinstance(refused, Refused)
        assert (refused.reason, session.version) == ("Aborted", str(V0))
        assert session.status().phase == "Idle"
        assert isinstance(session.handle(Stage(str(bundle))), Staged)
        assert isinstance(session.handle(Commit(str(V1))), Committed)
        assert equal(live, sparse)
    finally:
        running.clear()
        serving.join()
        made[0].close()


def test_an_engine_that_dropped_an_answer_is_not_given_it_for_the_next_bundle(
    tmp_path: Path, bundle: Path, old: State, sparse: State
) -> None:
    live = engine(old)
    write_bundle(tmp_path / "other", V2, sparse, (V0, old))
    looks = iter(range(1_000_000))

    def busy() -> bool:
        if next(looks):  # the order is sent by now
            raise RuntimeError("no permit can be read")
        return False

    with beside(live) as stager:
        current = str(digest_live(live))
        with pytest.raises(RuntimeError):
            stager.decode(bundle, current, Pace(busy))
        found = stager.decode(tmp_path / "other", current, Pace(lambda: False))
        assert found.outline.target == V2


def test_blocks_that_lie_far_apart_are_placed_each_from_its_own_beginning(
    tmp_path: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor with more elements than a place can count, small blocks are decoded together."""
    name = "a.q_proj.weight"
    before, after = {name: old[name]}, {name: sparse[name]}
    write_bundle(tmp_path / "far", V1, after, (V0, before))
    monkeypatch.setattr(f"{decoding.__name__}._SPAN", old[name][2].size // 4)
    live = engine(before)
    update = stage(tmp_path / "far", live, digest_live(live))
    assert len(np.unique(update.segment.rows[:, loops.START])) > 1
    commit(update, live)
    assert confirm(update, live) is None
    assert equal(live, after)


@pytest.mark.parametrize("whole", [False, True])
def test_no_tensor_of_another_class_is_asked_for_what_it_has_not(
    tmp_path: Path, bundle: Path, old: State, sparse: State, whole: bool
) -> None:
    """A GPU does not refuse a place outside: all that runs on it is lost."""

    class OnDevice(HostTensor):
        def take(self, where: Where) -> Bits:
            end = where.stop if isinstance(where, slice) else int(where.max()) + 1
            assert end <= self.flat.size
            return super().take(where)

    write_bundle(tmp_path / "full", V2, sparse)
    live: dict[str, LiveTensor] = {name: OnDevice(name, *parts) for name, parts in old.items()}
    with pytest.raises(CommitRefused, match="outside"):
        stage(
            tmp_path / "full" if whole else bundle,
            live,
            digest_live(live),
            stager=Torn(live, loops.START, 1 << 20),
        )


def _memfd_of(known: int, *, demanded: int = 0) -> Callable[[str, int], int]:
    """``memfd_create`` of a kernel that knows these flags and may demand one."""
    create = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        if flags & ~known:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if flags & demanded != demanded:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return create(name, flags & ~segments._NOEXEC_SEAL)

    return memfd_create


_MEMFD_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


@pytest.mark.parametrize(
    "create",
    [
        _memfd_of(_MEMFD_FLAGS),
        _memfd_of(_MEMFD_FLAGS | segments._NOEXEC_SEAL, demanded=segments._NOEXEC_SEAL),
    ],
    ids=["before Linux 6.3", "vm.memfd_noexec=2"],
)
def test_it_starts_whatever_the_kernel_asks_of_memory_without_a_name(
    bundle: Path, old: State, monkeypatch: pytest.MonkeyPatch, create: Callable[[str, int], int]
) -> None:
    monkeypatch.setattr(os, "memfd_create", create)
    SharedMemory().close()
    live = engine(old)
    with beside(live) as stager:
        found = stager.decode(bundle, str(digest_live(live)), Pace(lambda: False))
        assert found.outline.target == V1


def test_memory_is_not_made_where_the_kernel_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _memfd_of(~0, demanded=1 << 30))
    with pytest.raises(PermissionError):
        SharedMemory()


def test_it_is_no_client_of_a_gpu(old: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with beside(engine(old)) as stager:
        environment = Path(f"/proc/{stager.pid}/environ")
        wait_until(lambda: bool(environment.read_bytes()), "its program", seconds=PATIENCE)
        lines = environment.read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in lines
    assert not [line for line in lines if line.startswith(b"LD_PRELOAD=")]


def test_versions_leave_no_descriptor_and_no_mapping_behind(
    tmp_path: Path, bundle: Path, old: State, sparse: State
) -> None:
    write_bundle(tmp_path / "back", V2, old, (V1, sparse))
    live = engine(old)

    def held(process: int) -> tuple[int, int]:
        maps = Path(f"/proc/{process}/maps").read_text()
        return len(list(Path(f"/proc/{process}/fd").iterdir())), maps.count("memfd:rose-stager ")

    def held_at_rest(process: int) -> tuple[int, int]:
        """A stager answers first, and closes what it has handed over a moment later."""
        looks = []
        for _ in range(20):
            looks.append(held(process))
            time.sleep(0.01)
        return min(looks)

    with beside(live) as stager:
        pid, seen = stager.pid, []
        assert pid is not None
        for _ in range(3):
            for folder in (bundle, tmp_path / "back"):
                commit(stage(folder, live, digest_live(live), stager=stager), live)
            with pytest.raises(CommitRefused):
                stage(tmp_path / "back", live, digest_live(live), stager=stager)
            seen.append((held(os.getpid()), held_at_rest(pid)))
        assert seen[0][1] == seen[1][1] == seen[2][1]
        assert seen[1][0] == seen[2][0]
        assert equal(live, old)


def test_it_ends_amid_its_work_when_its_engine_is_killed(tmp_path: Path) -> None:
    """Nobody tells it any more that serving is at rest: it would go on, at a fifth of a core."""
    (tmp_path / "endless.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rose_engines.weights import stager\n"
        "def decode(self, bundle, current, room, rest):\n"
        "    while True:\n"
        "        rest()\n"
        "        Path('working').touch()\n"
        "        time.sleep(0.01)\n"
        "stager.Decoder.decode = decode\n"
        "sys.exit(stager.main(sys.argv[1:]))\n"
    )
    program = (
        "from pathlib import Path\n"
        "from rose_engines.node.pace import Pace\n"
        "from rose_engines.weights import stager\n"
        "stager.__name__ = 'endless'\n"
        "one = stager.OwnProcess(())\n"
        "print(one.pid, flush=True)\n"
        "one.decode(Path('bundle'), '', Pace(lambda: False))\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    try:
        wait_until((tmp_path / "working").exists, "it works", seconds=120)
        owner.kill()
        owner.wait()
        owner.stdout.close()
        wait_until(lambda: state_of(pid) in {"Z", ""}, "the stager has ended", seconds=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_ends_when_its_engine_is_killed(tmp_path: Path, old: State) -> None:
    del old
    program = (
        "import time, numpy as np\n"
        "from rose_engines.weights.stager import OwnProcess\n"
        "print(OwnProcess(()).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: state_of(pid) in {"Z", ""}, "the stager has ended", seconds=120)


def test_sizes_cover_every_region() -> None:
    sizes = Sizes(3, 2, 5, 7, 4, (1, 2, 3, 4))
    segment = StagedSegment.over(bytearray(sizes.nbytes), sizes)
    assert segment.rows.shape == (3, segments.FIELDS)
    assert [len(segment.given[width]) for width in segments.WIDTHS] == [1, 2, 3, 4]
    assert (len(segment.raw), len(segment.places), len(segment.names)) == (5, 7, 4)


def stopped(pid: int) -> None:
    """Stop a process, for certain."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", "it is stopped", seconds=60)


def state_of(pid: int) -> str:
    """One letter of the kernel's, empty = there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _nice(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_the_engines_thread_comes_before_its_stager_and_before_what_stages(
    tmp_path: Path, old: State, bundle: Path
) -> None:
    own, seen = _nice(os.getpid()), list[int]()
    live = engine(old)
    with beside(live) as stager:
        session = WeightSession(live, str(V0), stager=lambda _: stager)

        def stage_twice() -> None:
            for _ in range(2):
                assert isinstance(session.handle(Stage(str(bundle))), Staged)
                seen.append(_nice(threading.get_native_id()))

        thread = threading.Thread(target=stage_twice)
        thread.start()
        thread.join()
        assert stager.pid is not None
        tasks = Path(f"/proc/{stager.pid}/task").iterdir()
        assert {_nice(int(task.name)) for task in tasks} == {min(19, own + NICE)}
        assert isinstance(session.handle(Stage(str(bundle))), Staged)
    assert seen == [min(19, own + NICE)] * 2
    assert _nice(os.getpid()) == own, "the engine's own thread gives way to nobody"
