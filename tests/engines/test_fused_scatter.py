"""Elements of many tensors on a device go in at once, are read back, and come out again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import CommitRefused
from rose_engines.tensors.canonical import HostTensor, Live, LiveTensor
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.tensors.slices import Box, SlicedTensor
from rose_engines.weights import fused_scatter
from rose_engines.weights.fused_scatter import (
    Arena,
    FusedScatter,
    StagedScatter,
    TorchLane,
    fuse,
    lane_of,
)
from rose_engines.weights.live import commit, confirm, digest_live, put_back, revert, scatter
from rose_engines.weights.staging import stage
from tests.delta.strategies import DEVICE

V0, V1 = (WeightVersion("run", 1, n) for n in range(2))


class Counting(TorchLane):
    """Counts what a GPU would be asked for."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))
        self.launches = self.waits = 0

    def scatter(self, arena: Arena) -> None:
        self.launches += 1
        super().scatter(arena)

    def wait(self) -> None:
        self.waits += 1


class Deaf(TorchLane):
    """A device on which one tensor does not keep its bits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._deaf = tensor

    def scatter(self, arena: Arena) -> None:
        before = self._deaf.clone()
        super().scatter(arena)
        if not torch.equal(self._deaf, before):
            self._deaf.copy_(before)
            number = next(n for n, one in enumerate(arena.parts) if one.flat is self._deaf)
            arena.wrong[0] = 1 + (int(arena.ends[number - 1]) if number else 0)


def device(state: State) -> dict[str, LiveTensor]:
    return {
        name: DeviceTensor(name, dtype, shape, torch.tensor(bits.view(f"i{bits.itemsize}")))
        for name, (dtype, shape, bits) in state.items()
    }


def equal(live: Live, state: State) -> bool:
    return all(np.array_equal(live[name].all_bits(), state[name][2]) for name in state)


def test_a_bundle_on_a_device_is_committed_and_put_back(
    tmp_path: Path, old: State, sparse: State
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = device(old)
    update = stage(tmp_path / "b", live, digest_live(live))
    assert not update.single
    assert update.fused is not None
    assert update.staged_bytes > update.fused.nbytes > 0
    assert equal(live, old)
    commit(update, live)
    assert equal(live, sparse)
    assert confirm(update, live) is None
    commit(update, live)  # again does no harm
    assert equal(live, sparse)
    revert(update, live, "test")
    assert equal(live, old)
    assert scatter(update, live) is None
    assert equal(live, sparse)
    put_back(update, live)
    assert equal(live, old)


def test_a_whole_state_and_one_partly_in_host_memory_go_in(
    tmp_path: Path, old: State, sparse: State
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, None)
    live = device(old)
    dtype, shape, bits = old["a.norm.weight"]
    live["a.norm.weight"] = HostTensor("a.norm.weight", dtype, shape, bits.copy())
    update = stage(tmp_path / "b", live, digest_live(live))
    assert not update.single
    assert update.host.numbers == [list(live).index("a.norm.weight")]
    commit(update, live)
    assert equal(live, sparse)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
def test_runs_slices_and_scattered_elements_of_any_width(width: int, count: int) -> None:
    draw = np.random.default_rng(count)
    signed = "u1" if width == 1 else f"i{width}"

    def bits(size: int) -> np.ndarray:
        return draw.integers(0, 256, size * width, np.uint8).view(f"u{width}")

    states = [bits(9000), bits(9000), bits(9000)]
    flats = [torch.from_numpy(one.view(signed).copy()) for one in states]
    box = Box("p", 0, 1, 9000, 9000, 0, 9000)
    live: dict[str, LiveTensor] = {
        "run": DeviceTensor("run", "x", (9000,), flats[0][100:]),
        "far": DeviceTensor("far", "x", (9000,), flats[1]),
        "cut": SlicedTensor("cut", "x", (9000,), (box,), DeviceTensor("p", "x", (9000,), flats[2])),
    }
    wheres: dict[str, slice | np.ndarray] = {
        "run": slice(7, 7 + count),
        "far": draw.permutation(9000)[:count].astype(np.int64),
        "cut": np.sort(draw.permutation(9000)[:count]).astype(np.int64),
    }
    staged = [
        StagedScatter(name, where, bits(count), bits(count)) for name, where in wheres.items()
    ]
    wanted = [one.copy() for one in states]
    wanted[0][107 : 107 + count] = staged[0].new
    wanted[1][wheres["far"]] = staged[1].new
    wanted[2][wheres["cut"]] = staged[2].new
    fused = fuse(staged, live)
    assert fused is not None
    assert fused.put() is None
    for flat, one in zip(flats, wanted, strict=True):
        assert np.array_equal(flat.numpy().view(f"u{width}"), one)
    assert fused.put_back() is None
    wanted[1][wheres["far"]] = staged[1].old
    assert np.array_equal(flats[1].numpy().view(f"u{width}"), wanted[1])


def test_launches_and_waits_do_not_grow_with_the_number_of_tensors() -> None:
    found = set()
    for tensors in (2, 200):
        names = [f"t{number}" for number in range(tensors)]
        live: dict[str, LiveTensor] = {
            name: DeviceTensor(name, "BF16", (50,), torch.zeros(50, dtype=torch.int16))
            for name in names
        }
        where, bits = np.arange(0, 50, 7), np.ones(8, np.uint16)
        lane = Counting()
        fused = FusedScatter([StagedScatter(name, where, bits, bits) for name in names], live, lane)
        assert fused.put() is None
        assert all(int(live[name].all_bits().sum()) == 8 for name in names)
        found.add((lane.launches, lane.waits))
    assert found == {(1, 1)}


def test_what_is_made_of_a_tensor_is_renewed_once_a_commit_and_before_the_wait() -> None:
    called: list[int] = []
    lane = Counting()
    flat = torch.zeros(50, dtype=torch.int16)

    def renew() -> None:
        called.append(lane.waits)

    live: dict[str, LiveTensor] = {
        name: DeviceTensor(name, "BF16", (25,), flat[first : first + 25], renew)
        for name, first in (("a", 0), ("b", 25))
    }
    bits = np.ones(2, np.uint16)
    fused = FusedScatter(
        [StagedScatter(name, np.arange(2), bits, bits) for name in live], live, lane
    )
    fused.put()
    assert called == [0]
    fused.put_back()
    assert called == [0, 1]


def test_places_too_far_apart_for_an_offset_are_laid_out_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_scatter, "_SPAN", 16)
    flat = torch.zeros(100, dtype=torch.int16)
    where = np.array([90, 3, 40, 5, 99, 20])
    new = np.arange(1, 7).astype(np.uint16)
    live: dict[str, LiveTensor] = {"t": DeviceTensor("t", "BF16", (100,), flat)}
    fused = fuse([StagedScatter("t", where, new, new)], live)
    assert fused is not None
    assert fused.put() is None
    assert flat[torch.from_numpy(where)].tolist() == [1, 2, 3, 4, 5, 6]
    assert all(int(arena.offsets.max()) < 16 for arena in fused._arenas)


def test_a_device_that_does_not_keep_its_bits_is_refused_by_name(
    tmp_path: Path, old: State, sparse: State
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = device(old)
    update = stage(tmp_path / "b", live, digest_live(live))
    deaf = live["a.q_proj.weight"]
    assert isinstance(deaf, DeviceTensor)
    staged = [StagedScatter(one.tensor.name, one.where, one.new, one.old) for one in update.changes]
    lame = replace(update, fused=FusedScatter(staged, live, Deaf(deaf.flat)))
    with pytest.raises(CommitRefused, match=r"a\.q_proj\.weight did not keep"):
        commit(lame, live)
    assert equal(live, old)


def test_tensors_in_host_memory_have_no_arena() -> None:
    host = HostTensor("h", "BF16", (2,), np.zeros(2, np.uint16))
    assert fuse([StagedScatter("h", slice(0, 2), host.flat, host.flat)], {"h": host}) is None
    assert isinstance(lane_of(torch.zeros(1, device=DEVICE)), TorchLane)


class Gpu:
    """Stands for a tensor on a GPU, and for the CUDA runtime that locks pages for it."""

    is_cuda = True

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.launches = 0

    def get_device(self) -> int:
        return -1

    def new_zeros(self, _: int) -> None:
        self.launches += 1
        message = "operation not supported"
        raise RuntimeError(message)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        if not self.refuses:
            self.locked[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        assert any(first <= address < last for first, last in spans), "the pages are gone already"
        del self.locked[address]
        return 0


def gpu(monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> Gpu:
    made = Gpu(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_arenas_are_locked_to_their_size_and_given_back_with_the_update(
    tmp_path: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = gpu(monkeypatch)
    lane = Counting()
    monkeypatch.setattr(lane, "_flat", cuda)
    monkeypatch.setattr(fused_scatter, "lane_of", lambda _: lane)
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = device(old)
    update = stage(tmp_path / "b", live, digest_live(live))
    assert update.fused is not None
    assert sum(cuda.locked.values()) == update.fused.nbytes
    commit(update, live)
    assert equal(live, sparse)
    put_back(update, live)
    assert equal(live, old)
    assert cuda.locked
    del update
    assert cuda.locked == {}


def test_pages_stay_locked_as_long_as_anything_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = gpu(monkeypatch)
    tensor = fused_scatter.pinned(cuda, 5, torch.int16)  # type: ignore[arg-type]
    assert tensor.tolist() == [0] * 5
    seen = tensor[1:].numpy()
    del tensor
    assert list(cuda.locked.values()) == [10]
    seen[:] = 7
    del seen
    assert cuda.locked == {}
    assert fused_scatter.pinned(cuda, 0, torch.int64).numel() == 0  # type: ignore[arg-type]
    assert cuda.locked == {}


def test_where_cuda_locks_no_given_pages_torch_pins_them_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = gpu(monkeypatch, refuses=801)
    asked = []
    zeros = torch.zeros

    def pins(count: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(count, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", pins)
    assert fused_scatter.pinned(cuda, 3, torch.int64).tolist() == [0] * 3  # type: ignore[arg-type]
    assert asked == [True]
    assert cuda.launches == 1, "an error that is left is told to the next launch"
    assert "does not lock given pages (error 801)" in caplog.text


def test_a_renewal_that_fails_waits_for_what_was_launched() -> None:
    bits = np.zeros(4, np.uint16)
    tensor = DeviceTensor("a", "BF16", (4,), torch.zeros(4, dtype=torch.int16))

    def fail() -> None:
        message = "no renewal"
        raise RuntimeError(message)

    tensor.written = fail
    lane = Counting()
    fused = FusedScatter([StagedScatter("a", np.arange(4), bits, bits)], {"a": tensor}, lane)
    with pytest.raises(RuntimeError, match="no renewal"):
        fused.put()
    assert (lane.launches, lane.waits) == (1, 1)
