"""The store's promises: order of durability, compare-and-swap, fencing, retention."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rose_core.delta import Manifest, compose
from rose_core.identity import WeightVersion
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Fenced,
    HeadMoved,
    Incomplete,
    StoreFailed,
    UnknownRun,
    UnknownVersion,
)
from rose_weights.planning import Planner
from rose_weights.retention import fold, sweep
from rose_weights.state import RunState
from rose_weights.store import Store
from tests.weights.faulty import Crash, FaultyDisk
from tests.weights.models import Model, apply_manifest


def version(sequence: int, incarnation: int = 1) -> WeightVersion:
    return WeightVersion("run", incarnation, sequence)


def publish(
    store: Store, manifest: Manifest, blocks: dict[bytes, bytes], expected: WeightVersion | None
) -> RunState:
    for name in store.blocks.missing(block.sha256 for block in manifest.blocks):
        store.put_block(blocks[name])
    return store.commit(manifest.encode(), expected)


def published(store: Store, count: int, *, seed: int = 1) -> tuple[Model, list[Manifest]]:
    """A run of ``count`` versions."""
    store.open_incarnation("run", "test")
    model = Model(seed)
    manifest, blocks = model.full("run", 1)
    publish(store, manifest, blocks, None)
    manifests = [manifest]
    for number in range(1, count):
        model.change(seed=number)
        manifest, blocks = model.delta(version(number))
        publish(store, manifest, blocks, version(number - 1))
        manifests.append(manifest)
    return model, manifests


def check_head(store: Store, states: dict[str, dict[str, np.ndarray]]) -> None:
    """Whatever is head can be had in full and is what was published under that digest."""
    state = store.state("run")
    if state.head is None:
        return
    manifest, _ = Planner(store).plan("run")
    wanted = states[manifest.digest]
    held = {name: np.zeros_like(bits) for name, bits in wanted.items()}
    apply_manifest(held, manifest, lambda block: store.blocks.get(block.sha256))
    assert all(np.array_equal(held[name], wanted[name]) for name in wanted)


def publish_three(store: Store, states: dict[str, dict[str, np.ndarray]]) -> None:
    """What a publisher does, start to end; can be repeated after a crash."""
    opened = store.open_incarnation("run", "test")
    model = Model(seed=1)
    manifest, blocks = model.full("run", opened.fence)
    states[manifest.digest] = model.copy()
    expected = opened.head
    publish(store, manifest, blocks, expected)
    for number in (1, 2):
        model.change(seed=number)
        target = WeightVersion("run", opened.fence, number)
        manifest, blocks = model.delta(target)
        states[manifest.digest] = model.copy()
        publish(store, manifest, blocks, WeightVersion("run", opened.fence, number - 1))


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> int:
    disk = FaultyDisk()
    publish_three(Store(tmp_path_factory.mktemp("count"), disk=disk), {})
    return disk.operations


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_crash_at_any_operation_leaves_a_whole_version(
    tmp_path: Path, operations: int, power_loss: bool
) -> None:
    assert operations > 50
    for at in range(0, operations, 2):
        root = tmp_path / f"{at}"
        states: dict[str, dict[str, np.ndarray]] = {}
        disk = FaultyDisk(at)
        with pytest.raises(Crash):
            publish_three(Store(root, disk=disk), states)
        if power_loss:
            disk.lose_power()
        again = Store(root, disk=FaultyDisk())
        if again.runs():
            check_head(again, states)
        publish_three(again, states)
        check_head(again, states)
        head = again.state("run").head
        assert head is not None
        assert head.sequence == 2


def test_a_full_disk_is_a_clear_error_and_the_head_stays(tmp_path: Path, operations: int) -> None:
    for at in range(0, operations, 7):
        states: dict[str, dict[str, np.ndarray]] = {}
        root = tmp_path / f"{at}"
        with pytest.raises(StoreFailed, match="No space left on device"):
            publish_three(Store(root, disk=FaultyDisk(at, full=True)), states)
        again = Store(root)
        if again.runs():
            check_head(again, states)


def test_the_second_publisher_fences_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, _ = published(store, 2)
    assert store.open_incarnation("run", "second").fence == 2
    model.change(seed=9)
    manifest, blocks = model.delta(version(2))
    with pytest.raises(Fenced, match="published by incarnation 2 \\(second\\)"):
        publish(store, manifest, blocks, version(1))
    assert store.state("run").head == version(1)


def test_the_head_moves_by_compare_and_swap(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, _ = published(store, 2)
    model.change(seed=9)
    manifest, blocks = model.delta(version(2))
    with pytest.raises(HeadMoved, match=r"it is run@1\.1"):
        publish(store, manifest, blocks, version(0))
    publish(store, manifest, blocks, version(1))
    # The answer was lost: the same commit again is no error, another one is.
    publish(store, manifest, blocks, version(1))
    other = msgspec.structs.replace(manifest, step=77)
    with pytest.raises(HeadMoved):
        store.commit(other.encode(), version(1))


def test_versions_follow_one_another(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, _ = published(store, 2)
    model.change(seed=9)
    manifest, blocks = model.delta(version(5))
    with pytest.raises(BadManifest, match="next version is number 2"):
        publish(store, manifest, blocks, version(1))


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, manifests = published(store, 2)
    model.change(seed=9)
    manifest, blocks = model.delta(version(2))
    elsewhere = msgspec.structs.replace(manifest, base=version(0))
    with pytest.raises(BadManifest, match="with digest"):
        publish(store, elsewhere, blocks, version(1))
    unknown = msgspec.structs.replace(manifest, base=version(7))
    with pytest.raises(BadManifest, match="not kept"):
        publish(store, unknown, blocks, version(1))
    assert store.state("run").head == manifests[-1].target


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    _, manifests = published(store, 1)
    store.open_incarnation("run", "other model")
    full = manifests[0]
    fewer = msgspec.structs.replace(
        full,
        target=version(0, 2),
        tensors=full.tensors[:-1],
        tiles=full.tiles[:-16],
        blocks=full.blocks[:-1],
    )
    total = sum(d.low for d in fewer.tile_digests) % 2**64
    high = sum(d.high for d in fewer.tile_digests) % 2**64
    fewer = msgspec.structs.replace(fewer, digest=f"{high:016x}{total:016x}")
    with pytest.raises(BadManifest, match="steps is missing"):
        store.commit(fewer.encode(), version(0))


def test_missing_blocks_are_named_and_nothing_changes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_incarnation("run", "test")
    manifest, blocks = Model(seed=1).full("run", 1)
    for block in list(blocks.values())[1:]:
        store.put_block(block)
    with pytest.raises(Incomplete, match="1 of"):
        store.commit(manifest.encode(), None)
    assert store.state("run").head is None


def test_flipped_bytes_on_disk_are_found_and_can_be_sent_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_incarnation("run", "test")
    manifest, blocks = Model(seed=1).full("run", 1)
    for block in blocks.values():
        store.put_block(block)
    victim = manifest.blocks[3].sha256
    path = store.blocks.path(victim)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="removed"):
        store.blocks.get(victim)
    assert Store(tmp_path).blocks.missing([victim]) == [victim]
    publish(store, manifest, blocks, None)
    assert store.blocks.get(victim) == blocks[victim]


def test_a_store_that_starts_again_trusts_no_file_by_its_name(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.open_incarnation("run", "test")
    manifest, blocks = Model(seed=1).full("run", 1)
    for block in blocks.values():
        first.put_block(block)
    victim = manifest.blocks[0].sha256
    first.blocks.path(victim).write_bytes(b"torn")
    second = Store(tmp_path)
    assert second.blocks.missing([block.sha256 for block in manifest.blocks]) == [victim]


def test_bad_names_and_bytes_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run in ("../escape", "UPPER", "", "a/b"):
        with pytest.raises(UnknownRun, match="no run name"):
            store.open_incarnation(run, "test")
    with pytest.raises(UnknownRun, match="known: none"):
        store.state("run")
    with pytest.raises(BadManifest, match="not a manifest"):
        store.commit(b"garbage", None)
    published(store, 1)
    (tmp_path / "runs" / "run" / "state.json").write_bytes(b"{")
    with pytest.raises(Damaged, match="restore it"):
        store.state("run")


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    published(store, 1)
    kept = store.state("run").versions[0]
    path = store.manifest_path("run", kept.manifest)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="cannot be read"):
        store.manifest(kept)


def test_old_versions_are_folded_and_everything_kept_stays_reachable(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, manifests = published(store, 9)
    leased = [version(2)]
    assert fold(store, "run", window=3, leased=leased) == 3
    state = store.state("run")
    assert [kept.version.sequence for kept in state.versions] == [0, 2, 5, 6, 7, 8]
    assert sweep(store, grace_seconds=3600) == 0
    assert sweep(store, grace_seconds=-1) > 0
    planner = Planner(store)
    for kept in state.versions:
        start, digest = kept.version, kept.digest
        manifest, _ = planner.plan("run", start, digest)
        assert manifest.base == start
        assert manifest.digest == manifests[-1].digest
    held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
    full, _ = planner.plan("run")
    apply_manifest(held, full, lambda block: store.blocks.get(block.sha256))
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
    # A version that is gone, held by a receiver whose lease ran out: in full.
    gone, _ = planner.plan("run", version(1), manifests[1].digest)
    assert gone.base is None
    model.change(seed=99)
    manifest, blocks = model.delta(version(9))
    publish(store, manifest, blocks, version(8))
    assert fold(store, "run", window=30) == 0


def test_a_publish_during_the_fold_is_not_lost(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, _ = published(store, 6)
    before = store.state("run")
    model.change(seed=99)
    manifest, blocks = model.delta(version(6))
    publish(store, manifest, blocks, version(5))
    assert not store.relist(before, before.versions[:1])  # would lose the base of version 6
    assert store.relist(before, before.versions)
    assert store.state("run").head == version(6)
    other = msgspec.structs.replace(before, versions=before.versions[1:])
    assert not store.relist(other, before.versions)


class TestPlanning:
    @pytest.fixture
    def planner(self, tmp_path: Path) -> tuple[Planner, list[Manifest]]:
        store = Store(tmp_path)
        return Planner(store), published(store, 4)[1]

    def test_the_next_version_is_the_published_delta(
        self, planner: tuple[Planner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        assert plan.plan("run", version(2), manifests[2].digest) == (manifests[3], 1)

    def test_several_behind_is_one_delta(self, planner: tuple[Planner, list[Manifest]]) -> None:
        plan, manifests = planner
        manifest, merged = plan.plan("run", version(0), manifests[0].digest)
        assert (manifest.base, manifest.target, merged) == (version(0), version(3), 3)
        assert plan.plan("run", version(0), manifests[0].digest)[0] is manifest
        assert plan.cached_blocks() >= {block.sha256 for block in manifest.blocks}

    def test_who_asks_the_same_at_the_same_time_waits_for_one_merge(
        self, planner: tuple[Planner, list[Manifest]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan, manifests = planner
        merges: list[int] = []

        def slow(*arguments: object) -> Manifest:
            merges.append(1)
            time.sleep(0.2)
            return compose(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr("rose_weights.planning.compose", slow)
        with ThreadPoolExecutor(8) as threads:
            found = list(
                threads.map(
                    lambda _: plan.plan("run", version(0), manifests[0].digest)[0], range(8)
                )
            )
        assert len({manifest.name for manifest in found}) == 1
        assert len(merges) == 1

    def test_the_digest_decides_not_the_label(
        self, planner: tuple[Planner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        assert plan.plan("run", version(2), "0" * 32)[0].base is None
        assert plan.plan("run", version(2), "")[0].base is None
        assert plan.plan("run", None, manifests[1].digest)[0].base == version(1)
        assert plan.plan("run", WeightVersion("run", 7, 7), manifests[1].digest)[0].base == version(
            1
        )

    def test_who_is_there_gets_an_empty_delta(
        self, planner: tuple[Planner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        manifest, merged = plan.plan("run", version(3), manifests[3].digest)
        assert (manifest.blocks, manifest.target, merged) == ((), version(3), 0)
        assert Manifest.decode(manifest.encode()) == manifest

    def test_a_pinned_version_can_be_had_and_an_unknown_one_not(
        self, planner: tuple[Planner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        # The norm is replaced as a whole, so there is no way back by steps: in full.
        manifest, _ = plan.plan("run", version(3), manifests[3].digest, version(1))
        assert (manifest.base, manifest.target) == (None, version(1))
        with pytest.raises(UnknownVersion, match=r"not kept; head is run@1\.3"):
            plan.plan("run", want=version(9))
