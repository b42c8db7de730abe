"""What every place holds a store to: a folder and a bucket, by the same tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import obstore
import pytest

from rose_weights.bundle import Bundle
from rose_weights.errors import (
    BadManifest,
    Damaged,
    Fenced,
    Forbidden,
    HeadMoved,
    Incomplete,
    Outrun,
    StoreFailed,
    UnknownRun,
)
from rose_weights.store.bucket import Bucket, BucketBlocks, Objects
from rose_weights.store.folder import Folder
from rose_weights.store.open_store import open_store
from rose_weights.store.planning import FetchPlanner
from rose_weights.store.records import PublishedTurn, Records
from rose_weights.store.retention import fold, sweep
from rose_weights.store.store import Store
from tests.weights.buckets import FaultyObjects
from tests.weights.faulty import Crash
from tests.weights.models import Model, apply_bundle, apply_manifest
from tests.weights.runs import check_repeated, publish, publish_three, published, version
from tests.weights.test_service import connected
from tests.weights.test_service import publish as publish_over


def test_the_second_publisher_fences_the_first(store: Store) -> None:
    model, _ = published(store, 2)
    assert store.open_incarnation("run", "second").fence == 2
    model.change(seed=9)
    manifest, blocks = model.delta(version(2))
    with pytest.raises(Fenced, match="published by incarnation 2 \\(second\\)"):
        publish(store, manifest, blocks, version(1))
    assert store.state("run").head == version(1)


def put_stray_entries(store: Store) -> None:
    """What a file system or somebody else has put beside the runs' folders."""
    if isinstance(store.backend, Bucket):
        for key in ("record-blocks/lost+found/x", "record-blocks/notes"):
            store.backend._objects.put(key, b"x")
        return
    assert isinstance(store.backend, Folder)
    folder = store.backend.root / "record-blocks"
    (folder / "lost+found").mkdir()
    (folder / "notes").touch()


def test_records_are_kept_apart_from_weights_and_other_runs_and_are_swept(store: Store) -> None:
    records = Records(store, "run")
    owned = records.claim("s", "host")
    record = records.publish(owned, PublishedTurn(1, (1, 2), {}, files=b"f" * 5000))
    names = sorted(record.blocks())
    assert store.blocks.missing(names) == names
    assert store.record_blocks("other").missing(names) == names
    assert store.backend.record_runs() == ["run"]
    put_stray_entries(store)
    assert store.backend.record_runs() == ["run"]
    sweep(store, grace_seconds=-1)
    assert record.files is not None
    assert records.part(record.files) == b"f" * 5000
    records.forget(owned)
    assert sweep(store, grace_seconds=-1) > 0
    with pytest.raises(Incomplete):
        store.record_blocks("run").get(names[0])


def test_the_head_moves_by_compare_and_swap(store: Store) -> None:
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


def test_versions_follow_one_another(store: Store) -> None:
    model, _ = published(store, 2)
    model.change(seed=9)
    manifest, blocks = model.delta(version(5))
    with pytest.raises(BadManifest, match="next version is number 2"):
        publish(store, manifest, blocks, version(1))


def test_a_wrong_base_is_refused(store: Store) -> None:
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


def test_another_model_is_refused_by_name(store: Store) -> None:
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


def test_tiles_may_be_cut_anew_in_full_and_not_by_a_delta(store: Store) -> None:
    model, manifests = published(store, 2)
    store.open_incarnation("run", "other ranks")
    model.cut_anew()
    full, blocks = model.full("run", 2)
    empty = msgspec.structs.replace(
        full, base=version(1), base_digest=full.digest, base_tiles=full.tiles, blocks=()
    )
    with pytest.raises(BadManifest, match="other tiles than its base"):
        publish(store, empty, {}, version(1))
    publish(store, full, blocks, version(1))
    planner = FetchPlanner(store)
    assert planner.plan("run", version(1), manifests[1].digest)[0].blocks == ()
    assert planner.plan("run", version(0), manifests[0].digest)[0].base is None
    model.change(seed=9)
    manifest, blocks = model.delta(version(1, 2))
    publish(store, manifest, blocks, version(0, 2))
    merged, _ = planner.plan("run", version(0, 2), full.digest)
    assert (merged.base, merged.digest) == (version(0, 2), manifest.digest)


def test_missing_blocks_are_named_and_nothing_changes(store: Store) -> None:
    store.open_incarnation("run", "test")
    manifest, blocks = Model(seed=1).full("run", 1)
    for block in list(blocks.values())[1:]:
        store.put_block(block)
    with pytest.raises(Incomplete, match="1 of"):
        store.commit(manifest.encode(), None)
    assert store.state("run").head is None


def test_old_versions_are_folded_and_everything_kept_stays_reachable(store: Store) -> None:
    model, manifests = published(store, 9)
    leased = [version(2)]
    assert fold(store, "run", window=3, leased=leased) == 3
    state = store.state("run")
    assert [kept.version.sequence for kept in state.versions] == [0, 2, 5, 6, 7, 8]
    assert sweep(store, grace_seconds=3600) == 0
    assert sweep(store, grace_seconds=-1) > 0
    planner = FetchPlanner(store)
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


def test_a_publish_during_the_fold_is_not_lost(store: Store) -> None:
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


def test_what_one_process_published_another_one_serves(root: str) -> None:
    model, manifests = published(open_store(root), 2)
    again = open_store(root)
    assert again.runs() == ["run"]
    assert again.state("run").head == version(1)
    held = {name: np.zeros_like(bits) for name, bits in model.state.items()}
    manifest, _ = FetchPlanner(again).plan("run")
    apply_manifest(held, manifest, lambda block: again.blocks.get(block.sha256))
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
    names = [block.sha256 for block in manifests[0].blocks]
    assert again.blocks.read(names) == [again.blocks.get(name) for name in names]
    with pytest.raises(UnknownRun, match="known: run"):
        again.state("other")


def test_of_publishers_at_the_same_time_none_is_lost(root: str) -> None:
    stores = [open_store(root) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda one: one.open_incarnation("run", "test").fence, stores))
    assert sorted(opened) == [1, 2, 3, 4]


def test_a_run_or_block_that_cannot_be_is_refused(store: Store) -> None:
    for run in ("../escape", "UPPER", "", "a/b"):
        with pytest.raises(UnknownRun, match="no run name"):
            store.open_incarnation(run, "test")
    with pytest.raises(Incomplete, match="no name of a block"):
        store.blocks.get(b"short")
    with pytest.raises(Incomplete, match="is not"):
        store.blocks.get(bytes(32))
    with pytest.raises(BadManifest, match="not a manifest"):
        store.commit(b"garbage", None)


class TestBucket:
    @pytest.fixture
    def memory(self) -> obstore.store.MemoryStore:
        return obstore.store.MemoryStore()

    @pytest.mark.parametrize("done", [False, True])
    def test_a_death_at_any_request_leaves_a_whole_version(self, done: bool) -> None:
        counted = FaultyObjects(obstore.store.MemoryStore())
        publish_three(Store(Bucket(counted)), {})
        assert counted.operations > 40
        for at in range(int(done), counted.operations, 7):
            memory = obstore.store.MemoryStore()
            states: dict[str, dict[str, np.ndarray]] = {}
            with pytest.raises(Crash):
                publish_three(Store(Bucket(FaultyObjects(memory, at, done=done))), states)
            check_repeated(Store(Bucket(FaultyObjects(memory))), states)

    def test_a_commit_whose_answer_was_lost_is_known_again(
        self, memory: obstore.store.MemoryStore
    ) -> None:
        class Lossy(Objects):
            lost = False

            def swap(self, key: str, data: bytes, tag: str | None) -> None:
                super().swap(key, data, tag)
                if self.lost:
                    self.lost = False
                    super().swap(key, data, tag)  # what the library's own second attempt meets

        objects = Lossy(memory, "memory://bucket")
        store = Store(Bucket(objects))
        opened = store.open_incarnation("run", "test")
        manifest, blocks = Model(seed=1).full("run", opened.fence)
        objects.lost = True
        assert publish(store, manifest, blocks, None).head == manifest.target
        assert not objects.lost
        assert len(store.state("run").versions) == 1

    def test_a_state_that_others_replace_all_the_time_is_given_up(
        self, memory: obstore.store.MemoryStore
    ) -> None:
        class Busy(Objects):
            def swap(self, key: str, data: bytes, tag: str | None) -> None:
                raise Outrun(key)

        with pytest.raises(StoreFailed, match="replaced by others 16 times"):
            Store(Bucket(Busy(memory, "memory://bucket"))).open_incarnation("run", "test")

    def test_a_bucket_that_ignores_conditions_is_refused(
        self, memory: obstore.store.MemoryStore
    ) -> None:
        class Careless(Objects):
            def swap(self, key: str, data: bytes, tag: str | None) -> None:
                self.put(key, data)

        store = Store(Bucket(Careless(memory, "memory://bucket")))
        with pytest.raises(StoreFailed, match="ignores conditional writes"):
            store.open_incarnation("run", "test")
        assert list(Objects(memory, "memory://bucket").list("")) == []

    def test_damage_is_found_removed_and_sent_again(
        self, memory: obstore.store.MemoryStore
    ) -> None:
        store = Store(Bucket(Objects(memory, "memory://bucket")))
        _, manifests = published(store, 1)
        victim = manifests[0].blocks[0].sha256
        whole = store.blocks.get(victim)
        obstore.put(memory, f"blocks/{victim.hex()[:2]}/{victim.hex()}", whole[:-1] + b"?")
        with pytest.raises(Damaged, match="has been removed"):
            store.blocks.get(victim)
        assert store.blocks.missing([victim]) == [victim]
        assert store.blocks.put(whole) == victim
        assert store.blocks.get(victim) == whole
        obstore.put(memory, "runs/run/state.json", b"{")
        with pytest.raises(Damaged, match="restore it"):
            store.state("run")

    def test_a_block_that_another_process_may_sweep_is_asked_for_again(
        self, memory: obstore.store.MemoryStore
    ) -> None:
        objects = Objects(memory, "memory://bucket")
        name = BucketBlocks(objects).put(b"content")
        assert BucketBlocks(objects).missing([name]) == []
        assert BucketBlocks(objects, stale_seconds=-1).missing([name]) == [name]

    def test_a_bucket_that_does_not_answer_is_named(self, s3_environment: str) -> None:
        store = open_store("s3://absent/prefix")
        with pytest.raises(StoreFailed, match="s3://absent/prefix"):
            store.open_incarnation("run", "test")


@pytest.mark.parametrize(
    ("root", "patterns", "error", "words"),
    [
        ("s3://other/x", "s3://rose/*, /data/*", Forbidden, "not among the stores"),
        ("/tmp/x", "s3://rose/*", Forbidden, "ROSE_STORES"),
        ("gs://bucket/x", "", ValueError, "is no store ROSE knows"),
        ("s3://key:secret@bucket/x", "", ValueError, "comes from the environment"),
        ("s3://bucket/x?region=eu", "", ValueError, "comes from the environment"),
        ("s3:///x", "", ValueError, "s3://bucket/prefix"),
    ],
)
def test_a_store_that_may_not_be_opened_is_refused(
    root: str, patterns: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_store(root, {"ROSE_STORES": patterns})


def test_the_platforms_list_allows_what_it_names(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), {"ROSE_STORES": f"s3://rose/*,{tmp_path}"})
    assert store.runs() == []


async def test_a_run_goes_through_the_service_whatever_the_place(root: str, tmp_path: Path) -> None:
    model = Model(seed=1)
    states = [model.copy()]
    async with connected(open_store(root)) as (_, writer, client):
        await publish_over(writer, model, 2)
        got = await client.pull("run", tmp_path / "bundle")
        assert got.target == version(1)
    held = {name: np.zeros_like(bits) for name, bits in states[0].items()}
    apply_bundle(held, Bundle(tmp_path / "bundle"))
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
