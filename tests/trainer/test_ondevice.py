"""A model compared where it lies: the host's blocks, bit for bit, and nothing but changes outside.

On a GPU where there is one; on the CPU the same operations on the same integers.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rose_core.delta import (
    FORMATS,
    Builder,
    Manifest,
    ManifestError,
    TensorSpec,
    TileBox,
    Tiling,
    table,
)
from rose_core.delta.bits import Bits
from rose_core.delta.parts import OwnedTensor, PartBuilder, RankPart, aligned
from rose_core.identity import WeightVersion
from rose_engines.ondevice import device_loops
from rose_trainer import device_diff, ondevice
from rose_trainer.device_diff import Region, bands, differences, working_bytes
from rose_trainer.errors import BadState
from rose_trainer.ondevice import Base, DeviceShards, DeviceSnapshot, Place
from rose_trainer.publisher import Publisher
from rose_trainer.sharded import ShardedPublisher
from rose_trainer.shards import Shard
from rose_trainer.staging import Layout, Snapshot
from rose_weights.bundle import Bundle
from tests.delta.strategies import DEVICE, corner_bits
from tests.trainer.test_publisher import RunningStore, bits_of, small_model
from tests.weights.models import apply_bundle

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}
SHAPES = {  # cut along rows, along columns, large but odd, small; as few elements as can be cut
    "model.layers.0.mlp.up_proj.weight": (512, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 512),
    "model.embed_tokens.weight": (441, 300),
    "model.norm.weight": (96,),
    "scale": (),
}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningStore]:
    store = RunningStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of a few tiles, and halves of them."""
    monkeypatch.setattr(device_diff, "CHUNK", 1 << 16)
    monkeypatch.setattr(device_diff, "BATCH", 1 << 12)


def two_states(dtype: str, share: float) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Random bits with all corners in them; some tensors of the second are the first's."""
    kind, draw = FORMATS[dtype], np.random.default_rng(7)
    before, after = {}, {}
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        old = draw.integers(0, 256, count * kind.width, np.uint8).view(kind.unsigned)
        new = old.copy()
        chosen = draw.random(count) < share
        new[chosen] += kind.unsigned.type(1)
        corners = np.array(corner_bits(kind), np.uint64).astype(kind.unsigned)
        if share and count > 2 * len(corners):
            old[: len(corners)], new[: len(corners)] = corners, corners[::-1]
        before[name], after[name] = old, new
    return before, after


def tensors_of(state: dict[str, Bits], dtype: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(bits.view(f"i{bits.itemsize}"), device=DEVICE)
        .view(DTYPES[dtype])
        .view(SHAPES[name])
        for name, bits in state.items()
    }


def host_manifest(
    before: dict[str, Bits], after: dict[str, Bits], dtype: str
) -> tuple[Manifest, Manifest, Manifest | None, list[bytes]]:
    tensors = table(TensorSpec(name, dtype, shape) for name, shape in SHAPES.items())
    bare = Builder(tensors, None, lambda _: None)
    for bits in before.values():
        bare.add(None, bits, blocks=False)
    base = bare.finish(WeightVersion("run", 1, 0))
    blocks: list[bytes] = []
    builder = Builder(tensors, base, blocks.append, on_base=True)
    for name, bits in before.items():
        builder.add(bits, after[name])
    manifest = builder.finish(WeightVersion("run", 1, 1))
    return base, manifest, builder.on_base(manifest), blocks


SHARES = (0.0, 0.01, 0.4, 1.0)
PLACES: tuple[Place, Place] = ("host", "device")
# Where the base lies changes nothing of how a dtype is coded: one has both with each share, the
# others by turns.
CASES = [
    (dtype, share, place)
    for (number, dtype), (turn, share) in product(enumerate(DTYPES), enumerate(SHARES))
    for place in (PLACES if dtype == "BF16" else [PLACES[(number + turn) % 2]])
]


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize(("dtype", "share", "keep_on"), CASES)
def test_the_manifest_and_every_block_are_the_hosts(
    dtype: str, share: float, keep_on: Place
) -> None:
    before, after = two_states(dtype, share)
    base, wanted, wanted_on_base, wanted_blocks = host_manifest(before, after, dtype)
    model = tensors_of(before, dtype)
    snapshot = DeviceSnapshot(Layout(list(model.items())), Base(keep_on), ranked=True)
    snapshot.take(model)
    assert all(np.array_equal(snapshot.bits(name), bits) for name, bits in before.items())
    snapshot.take(tensors_of(after, dtype))
    blocks: list[bytes] = []
    builder = Builder(base.tensors, base, blocks.append, on_base=True)
    for name in SHAPES:
        snapshot.add_to(builder, name, snapshot)
    manifest = builder.finish(WeightVersion("run", 1, 1))
    assert manifest == wanted
    assert builder.on_base(manifest) == wanted_on_base
    assert blocks == wanted_blocks
    # The base is the state that was taken last.
    assert all(np.array_equal(snapshot.bits(name), bits) for name, bits in after.items())


def test_tests_compute_with_as_many_threads_as_they_were_told_to() -> None:
    """The variable counts only if it is set before anything imports PyTorch."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_without_a_change_nothing_is_found_and_without_a_base_nothing_can_be() -> None:
    before, _ = two_states("BF16", 0.0)
    tensors = table(TensorSpec(name, "BF16", shape) for name, shape in SHAPES.items())
    with pytest.raises(ManifestError, match="without a base"):
        Builder(tensors, None, lambda _: None).add_found([])
    model = tensors_of(before, "BF16")
    snapshot = DeviceSnapshot(Layout(list(model.items())), Base())
    snapshot.take(model)
    snapshot.take(model)
    base, _, _, _ = host_manifest(before, before, "BF16")
    builder = Builder(tensors, base, lambda _: pytest.fail("a block of nothing"))
    for name in SHAPES:
        snapshot.add_to(builder, name, snapshot)
    assert builder.finish(WeightVersion("run", 1, 1)).digest == base.digest


def test_only_changes_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = two_states("BF16", 0.01)
    model = tensors_of(before, "BF16")
    snapshot = DeviceSnapshot(Layout(list(model.items())), Base("device"))
    snapshot.take(model)
    left = []
    here = device_loops.here

    def counting(bits: torch.Tensor) -> Bits:
        left.append(bits.nbytes)
        return here(bits)

    monkeypatch.setattr(device_diff, "here", counting)
    snapshot.take(tensors_of(after, "BF16"))
    changes = sum(int((before[name] != after[name]).sum()) for name in before)
    assert changes < sum(left) < 2.5 * changes


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_the_part_of_a_rank_is_the_hosts(share: float, axis: str) -> None:
    rows, columns = 600, 800
    half = (rows // 2, columns) if axis == "rows" else (rows, columns // 2)
    spec = TensorSpec("a.o_proj.weight", "BF16", (rows, columns))
    draw = np.random.default_rng(5)
    whole = draw.integers(0, 1 << 16, (rows, columns), np.uint16)
    then = whole + (draw.random(whole.shape) < share).astype(np.uint16)
    parts: list[list[RankPart]] = [[], []]
    blocks: list[list[bytes]] = [[], []]
    for rank in range(2):
        row0, column0 = (rank * half[0], 0) if axis == "rows" else (0, rank * half[1])
        box = TileBox(row0, row0 + half[0], column0, column0 + half[1])
        tensors = aligned([OwnedTensor(spec, box, half)])
        states = [
            np.ascontiguousarray(state[row0 : box.row1, column0 : box.column1])
            for state in (whole, then)
        ]
        shards = [
            Shard(
                spec,
                box,
                half,
                owned=True,
                local=torch.tensor(state.view("i2"), device=DEVICE).view(torch.bfloat16),
                dtype=torch.bfloat16,
            )
            for state in states
        ]
        full = PartBuilder(tensors, None, lambda _: None)
        taken = DeviceShards(tensors, Base())
        taken.take(shards[:1])
        taken.add_to(full, 0, shards[0], None)
        known = dict(full.digests)
        taken.take(shards[1:])
        here, there = (PartBuilder(tensors, known, some.append) for some in blocks)
        here.add(0, box, *(state.reshape(-1) for state in states))
        taken.add_to(there, 0, shards[1], taken)
        for side, builder in enumerate((here, there)):
            target, base = (WeightVersion("run", 1, number) for number in (1, 0))
            parts[side].append(builder.finish(target, rank, 2, base=base))
    assert parts[0] == parts[1]
    assert blocks[0] == blocks[1]
    assert sum(block.changes for part in parts[1] for block in part.blocks) == (whole != then).sum()


def test_what_no_version_took_is_no_base() -> None:
    spec, box = TensorSpec("w", "BF16", (4, 4)), TileBox(0, 4, 0, 4)
    shard = Shard(spec, box, (4, 4), True, torch.zeros(4, 4, dtype=torch.bfloat16), torch.bfloat16)
    taken = DeviceShards(aligned([OwnedTensor(spec, box, (4, 4))]), Base())
    taken.take([shard])
    taken.discard()
    with pytest.raises(BadState, match="start a new Publisher"):
        taken.take([shard])


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that were made and are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, list[int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = {
            one.untyped_storage().data_ptr()
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        made = operation(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._keep(one, given)
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return made

    def _keep(self, tensor: torch.Tensor, given: set[int]) -> None:
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if place in given and place not in self._held:
            return  # a view of what was there before
        held = self._held.setdefault(place, [0, size])
        held[0] += 1
        weakref.finalize(tensor, self._drop, place)

    def _drop(self, place: int) -> None:
        held = self._held.get(place)
        if held is not None:
            held[0] -= 1
            if not held[0]:
                del self._held[place]


@pytest.mark.parametrize("tile", [(16, 64), (4, 256)])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_memory_does_not_grow_with_the_model(
    share: float, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "CHUNK", 1 << 15)
    monkeypatch.setattr(device_diff, "BATCH", 1 << 10)
    region = Region("w", FORMATS["BF16"], 256, 0, 0, Tiling(256, 256, *tile))
    old = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), dtype=torch.int16, device=DEVICE)
    new = torch.where(torch.rand(len(old), device=DEVICE) < share, old ^ 1, old)
    changes = 0
    with Memory() as memory:
        for band in bands(region.cut):
            for found in differences(region, band, old[band.span], new[band.span]):
                changes += sum(one.changes for one in found.tiles)
                del found
    assert changes == int((old != new).sum())
    assert len(list(bands(region.cut))) == 2
    assert (1 << 15) <= memory.peak <= working_bytes(2)


@pytest.mark.parametrize("keep_on", ["host", "device"])
def test_versions_follow_the_tensors_bit_for_bit(
    running: RunningStore, tmp_path: Path, keep_on: Place
) -> None:
    model = {name: tensor.to(DEVICE) for name, tensor in small_model(1).items()}
    model["lm_head.weight"] = model["model.embed_tokens.weight"]
    held = bits_of({name: tensor.cpu() for name, tensor in model.items()})
    with Publisher(
        running.address,
        "run",
        token="t",
        source=lambda: model,
        compare_on="device",
        keep_on=keep_on,
        on_base=True,
    ) as publisher:
        first = publisher.wait(publisher.publish(0), 60)
        for step in range(1, 6):
            model["model.norm.weight"][step] = float("nan") if step == 2 else -0.0
            model["model.embed_tokens.weight"][step] *= 1.01
            version = publisher.publish(step)
        last = publisher.wait(version, 60)
    assert 0 < last.changes < 100
    manifest = running.pull(tmp_path / "b", first.version, first.digest)
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    apply_bundle(held, Bundle(tmp_path / "b"))
    wanted = bits_of({name: tensor.cpu() for name, tensor in model.items()})
    assert all(np.array_equal(held[name], wanted[name]) for name in wanted)
    assert manifest.digest == last.digest


def test_masters_are_cast_band_by_band(running: RunningStore, tmp_path: Path) -> None:
    masters = {"w": torch.randn(300, 70, device=DEVICE)}
    with Publisher(
        running.address, "run", token="t", dtype=torch.bfloat16, compare_on="device"
    ) as publisher:
        first = publisher.wait(publisher.publish(0, masters), 60)
        held = bits_of({"w": masters["w"].to(torch.bfloat16).cpu()})
        masters["w"].t()[3] += 1
        last = publisher.wait(publisher.publish(1, {"w": masters["w"].t().contiguous().t()}), 60)
    assert last.changes == 300
    running.pull(tmp_path / "b", first.version, first.digest)
    apply_bundle(held, Bundle(tmp_path / "b"))
    assert np.array_equal(held["w"], bits_of({"w": masters["w"].to(torch.bfloat16).cpu()})["w"])


def test_where_it_is_compared_can_be_forced_and_follows_the_tensors_else(
    running: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[type] = []
    for kind in (Snapshot, DeviceSnapshot):
        monkeypatch.setattr(kind, "take", _spying(kind, taken))
    model = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    ways: tuple[Literal["auto", "host", "device"], ...] = ("auto", "host", "device")
    for number, compare_on in enumerate(ways):
        with Publisher(
            running.address, f"run-{number}", token="t", compare_on=compare_on
        ) as publisher:
            publisher.publish(0, model)
    assert taken == [Snapshot, Snapshot, DeviceSnapshot]


def test_unless_asked_states_are_compared_on_the_host() -> None:
    for publisher in (Publisher, ShardedPublisher):
        assert inspect.signature(publisher).parameters["compare_on"].default == "host"


def _spying(kind: type, taken: list[type]) -> object:
    take = kind.take  # type: ignore[attr-defined]

    def spy(self: object, *given: object) -> None:
        taken.append(kind)
        take(self, *given)

    return spy


def test_what_breaks_off_is_never_published_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the changes that were found before would be in the base and in no version."""
    before, after = two_states("BF16", 0.01)
    model = tensors_of(before, "BF16")
    base, layout = Base(), Layout(list(model.items()))
    one, other = DeviceSnapshot(layout, base), DeviceSnapshot(layout, base)
    one.take(model)
    with pytest.raises(BadState, match="missing"):
        other.take({"scale": model["scale"]})
    other.take(model)  # nothing was touched

    def without_memory(*given: object, **more: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ondevice, "differences", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        one.take(tensors_of(after, "BF16"))
    monkeypatch.undo()
    with pytest.raises(BadState, match="start a new Publisher"):
        other.take(model)
