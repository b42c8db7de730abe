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
    StoreFailed,
    UnknownRun,
    UnknownVersion,
)
from rose_weights.store.blocks import Blocks
from rose_weights.store.folder import Folder
from rose_weights.store.planning import FetchPlanner
from rose_weights.store.store import Store
from tests.weights.faulty import Crash, FaultyDisk
from tests.weights.models import SPECS, Model
from tests.weights.runs import (
    check_head,
    check_repeated,
    publish,
    publish_three,
    published,
    version,
)


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
        check_repeated(Store(root, disk=FaultyDisk()), states)


def test_a_full_disk_is_a_clear_error_and_the_head_stays(tmp_path: Path, operations: int) -> None:
    for at in range(0, operations, 7):
        states: dict[str, dict[str, np.ndarray]] = {}
        root = tmp_path / f"{at}"
        with pytest.raises(StoreFailed, match="No space left on device"):
            publish_three(Store(root, disk=FaultyDisk(at, full=True)), states)
        again = Store(root)
        if again.runs():
            check_head(again, states)


def test_flipped_bytes_on_disk_are_found_and_can_be_sent_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_incarnation("run", "test")
    manifest, blocks = Model(seed=1).full("run", 1)
    for block in blocks.values():
        store.put_block(block)
    victim = manifest.blocks[3].sha256
    path = Blocks(tmp_path / "blocks").path(victim)
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
    Blocks(tmp_path / "blocks").path(victim).write_bytes(b"torn")
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
    path = Folder(tmp_path).manifest_path("run", kept.manifest)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="cannot be read"):
        store.manifest(kept)


def test_a_damaged_manifest_is_kept_again_by_whoever_published_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, manifests = published(store, 2)
    path = Folder(tmp_path).manifest_path("run", manifests[1].name)
    path.write_bytes(b"torn")
    model.change(seed=9)
    manifest, blocks = model.delta(version(2))
    with pytest.raises(Damaged, match=r"manifest of run@1\.1"):
        publish(store, manifest, blocks, version(1))
    publish(store, manifests[1], {}, version(0))
    assert store.state("run").head == version(1)
    publish(store, manifest, blocks, version(1))
    assert (
        FetchPlanner(store).plan("run", version(0), manifests[0].digest)[0].digest
        == manifest.digest
    )


def test_a_full_version_needs_no_manifest_that_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model, manifests = published(store, 2)
    Folder(tmp_path).manifest_path("run", manifests[1].name).write_bytes(b"torn")
    store.open_incarnation("run", "again")
    other = Model(seed=1, specs=SPECS[:-1])
    wrong, blocks = other.full("run", 2)
    with pytest.raises(BadManifest, match="steps is missing"):
        publish(store, wrong, blocks, version(1))
    manifest, blocks = model.full("run", 2)
    publish(store, manifest, blocks, version(1))
    assert store.state("run").head == manifest.target


def test_a_bit_that_flips_in_the_list_of_versions_is_never_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    published(store, 2)
    path = tmp_path / "runs" / "run" / "state.json"
    kept, right = path.read_bytes(), store.state("run")
    found = 0
    for at in range(0, len(kept), 11):
        flipped = bytearray(kept)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        try:
            assert store.state("run") == right  # the name of a field that says what is usual
        except Damaged:
            found += 1
    assert found > len(kept) // 11 * 0.7


def test_a_list_that_an_earlier_release_wrote_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    published(store, 2)
    path = tmp_path / "runs" / "run" / "state.json"
    older = msgspec.json.decode(path.read_bytes())
    assert len(older.pop("check")) == 64
    path.write_bytes(msgspec.json.encode(older))
    assert store.state("run").head == version(1)


class TestPlanning:
    @pytest.fixture
    def planner(self, tmp_path: Path) -> tuple[FetchPlanner, list[Manifest]]:
        store = Store(tmp_path)
        return FetchPlanner(store), published(store, 4)[1]

    def test_the_next_version_is_the_published_delta(
        self, planner: tuple[FetchPlanner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        assert plan.plan("run", version(2), manifests[2].digest) == (manifests[3], 1)

    def test_several_behind_is_one_delta(
        self, planner: tuple[FetchPlanner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        manifest, merged = plan.plan("run", version(0), manifests[0].digest)
        assert (manifest.base, manifest.target, merged) == (version(0), version(3), 3)
        assert plan.plan("run", version(0), manifests[0].digest)[0] is manifest
        assert plan.cached_blocks() >= {block.sha256 for block in manifest.blocks}

    def test_who_asks_the_same_at_the_same_time_waits_for_one_merge(
        self, planner: tuple[FetchPlanner, list[Manifest]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan, manifests = planner
        merges: list[int] = []

        def slow(*arguments: object) -> Manifest:
            merges.append(1)
            time.sleep(0.2)
            return compose(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr("rose_weights.store.merging.compose", slow)
        with ThreadPoolExecutor(8) as threads:
            found = list(
                threads.map(
                    lambda _: plan.plan("run", version(0), manifests[0].digest)[0], range(8)
                )
            )
        assert len({manifest.name for manifest in found}) == 1
        assert len(merges) == 1

    def test_the_digest_decides_not_the_label(
        self, planner: tuple[FetchPlanner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        assert plan.plan("run", version(2), "0" * 32)[0].base is None
        assert plan.plan("run", version(2), "")[0].base is None
        assert plan.plan("run", None, manifests[1].digest)[0].base == version(1)
        assert plan.plan("run", WeightVersion("run", 7, 7), manifests[1].digest)[0].base == version(
            1
        )

    def test_who_is_there_gets_an_empty_delta(
        self, planner: tuple[FetchPlanner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        manifest, merged = plan.plan("run", version(3), manifests[3].digest)
        assert (manifest.blocks, manifest.target, merged) == ((), version(3), 0)
        assert Manifest.decode(manifest.encode()) == manifest

    def test_a_pinned_version_can_be_had_and_an_unknown_one_not(
        self, planner: tuple[FetchPlanner, list[Manifest]]
    ) -> None:
        plan, manifests = planner
        # The norm is replaced as a whole, so there is no way back by steps: in full.
        manifest, _ = plan.plan("run", version(3), manifests[3].digest, version(1))
        assert (manifest.base, manifest.target) == (None, version(1))
        with pytest.raises(UnknownVersion, match=r"not kept; head is run@1\.3"):
            plan.plan("run", want=version(9))
