"""Two processes publish their shards; the store sees whole versions or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rose_core.delta import ManifestError, TensorSpec, TileBox, digest_run, total
from rose_core.delta.parts import OwnedTensor, PartBuilder, RankPart, aligned, assemble
from rose_core.identity import WeightVersion
from rose_trainer.staging import bits_of
from rose_weights.bundle import Bundle
from rose_weights.store.sharded_parts import IncompleteVersions, PartOutcome
from rose_weights.store.store import Store
from tests.trainer.ranks import Job
from tests.trainer.test_publisher import RunningStore
from tests.weights.models import apply_bundle
from tests.weights.test_service import version

ROOT = Path(__file__).parents[2]
WORLD = 2


class Ranks:
    """Starts the ranks of jobs (``tests.trainer.ranks``); nobody waits for a job that hangs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )

    def run(self, out: Path, address: str, mode: str, world: int = WORLD) -> list[tuple[str, str]]:
        """What each rank has written to standard output and error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = Job(address, str(out), mode, world)
        self._process.stdin.write(job.order())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ended\n"
        files = [job.output_files(rank) for rank in range(world)]
        return [(reported.read_text(), errors.read_text()) for reported, errors in files]

    def end(self) -> None:
        """With what it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


def wanted(path: Path) -> dict[str, np.ndarray]:
    return {name: bits_of(tensor.contiguous()) for name, tensor in torch.load(path).items()}


def held(store: RunningStore, folder: Path) -> dict[str, np.ndarray]:
    manifest = store.pull(folder)
    found = {
        tensor.name: np.zeros(tensor.elements, tensor.kind.unsigned) for tensor in manifest.tensors
    }
    apply_bundle(found, Bundle(folder))
    return found


@pytest.fixture
def open_store(tmp_path: Path) -> RunningStore:
    return RunningStore(tmp_path / "store", token="")


@pytest.mark.slow
def test_each_rank_publishes_its_part_and_a_dead_one_publishes_nothing(
    tmp_path: Path, open_store: RunningStore, ranks: Ranks
) -> None:
    reported = ranks.run(tmp_path, open_store.address, "die")
    lines = [line.split() for out, _ in reported for line in out.splitlines()]
    first, second = (
        {(rank, digest) for rank, name, digest, *_ in lines if name == f"run@1.{number}"}
        for number in (0, 1)
    )
    for found in (first, second):
        assert {rank for rank, _ in found} == {"0", "1"}, reported
        assert len({digest for _, digest in found}) == 1
    sent = {rank: int(size) for rank, name, _, size, _ in lines if name == "run@1.0"}
    assert min(sent.values()) * 3 > sum(sent.values())  # nobody sends nearly everything
    took = [float(seconds) for _, name, _, _, seconds in lines if name == "run@1.1"]
    assert open_store.describe().versions[-1].encode_seconds == max(took) > 0
    # The third version lost a rank: the one that is left was told, and the head did not move.
    assert "PublishFailed" in reported[0][1]
    assert open_store.store.state("run").head == version(1)
    bits, whole = held(open_store, tmp_path / "b"), wanted(tmp_path / "1.pt")
    assert bits.keys() == whole.keys()
    assert all(np.array_equal(bits[name], whole[name]) for name in whole)
    open_store.close()


@pytest.mark.slow
def test_shards_that_are_compared_where_they_lie_make_the_same_versions(
    tmp_path: Path, open_store: RunningStore, ranks: Ranks
) -> None:
    reported = ranks.run(tmp_path, open_store.address, "in place")
    assert open_store.store.state("run").head == version(2), reported
    check(open_store, tmp_path, 2)
    open_store.close()


@pytest.mark.slow
def test_ranks_that_start_again_continue_what_they_published_and_others_send_it_in_full(
    tmp_path: Path, open_store: RunningStore, ranks: Ranks
) -> None:
    def run(mode: str, world: int) -> list[str]:
        reported = ranks.run(tmp_path, open_store.address, mode, world)
        assert all("Traceback" not in errors for _, errors in reported), reported
        return [line for out, _ in reported for line in out.splitlines()]

    run("publish", WORLD)
    resumed = run("resume", WORLD)
    assert [line.split()[3] for line in resumed if " run@2.0 " in line] == ["0", "0"]
    listed = {kept.version: kept for kept in open_store.store.state("run").versions}
    again = listed[version(0, 2)]
    assert (again.base, again.changes) == (version(2), 0)
    assert 0 < listed[version(1, 2)].bytes < listed[version(0)].bytes / 5
    check(open_store, tmp_path, 3)
    # One rank cuts its vectors into other tiles than two: in full, and the run goes on.
    run("resume", 1)
    state = open_store.store.state("run")
    alone = state.kept(version(0, 3))
    assert alone is not None
    assert (alone.base, alone.full, alone.digest) == (None, True, again.digest)
    assert state.head == version(1, 3)
    check(open_store, tmp_path, 3)
    open_store.close()


def check(store: RunningStore, tmp_path: Path, step: int) -> None:
    """The head is what all ranks' tensors were at a step, bit for bit."""
    found = held(store, tmp_path / f"bundle-{store.store.state('run').head}")
    whole = wanted(tmp_path / f"{step}.pt")
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in whole)


SPEC = TensorSpec("w", "BF16", (10, 4))


def part(rank: int, target: WeightVersion, bits: np.ndarray, *, blocks: bool = True) -> RankPart:
    """Rows 0-5 are rank 0's, the rest is rank 1's."""
    box = TileBox(0, 6, 0, 4) if rank == 0 else TileBox(6, 10, 0, 4)
    tensors = aligned([OwnedTensor(SPEC, box, (6, 4))])
    builder = PartBuilder(tensors, None, lambda _: None)
    builder.add(0, box, None, bits[box.row0 * 4 : box.row1 * 4], blocks=blocks)
    return builder.finish(target, rank, WORLD)


def test_parts_of_all_ranks_make_the_digest_of_the_whole() -> None:
    bits = np.arange(40, dtype=np.uint16)
    manifest = assemble([part(1, version(0), bits), part(0, version(0), bits)], None)
    assert manifest.digest == str(total([digest_run("w", 0, bits)]))
    assert [block.tile for block in manifest.blocks] == [0, 1]


def test_parts_that_contradict_each_other_are_refused() -> None:
    bits = np.arange(40, dtype=np.uint16)
    one = part(0, version(0), bits)
    with pytest.raises(ManifestError, match="parts of ranks"):
        assemble([one], None)
    with pytest.raises(ManifestError, match="another version"):
        assemble([one, part(1, version(1), bits)], None)
    twice = part(0, version(0), bits)
    with pytest.raises(ManifestError, match="exactly one owner"):
        assemble([one, msgspec.structs.replace(twice, rank=1)], None)
    with pytest.raises(ManifestError, match="cuts through"):
        PartBuilder(one.tensors, None, lambda _: None).add(0, TileBox(0, 5, 0, 4), None, bits[:20])


def ask(
    parts: IncompleteVersions, rank: int, target: WeightVersion, bits: np.ndarray
) -> PartOutcome | None:
    """Whether a kept version is this state."""
    data = msgspec.msgpack.encode(part(rank, target, bits, blocks=False))
    head = version(0) if target.incarnation > 1 else None
    return parts.add(data, head, continues=True)


def test_a_state_that_is_kept_becomes_the_head_as_an_empty_delta(tmp_path: Path) -> None:
    store, bits = Store(tmp_path), np.arange(40, dtype=np.uint16)
    store.open_incarnation("run", "first")
    both = [part(rank, version(0), bits, blocks=False) for rank in range(WORLD)]
    store.commit(assemble(both, None).encode(), None)
    store.open_incarnation("run", "second")
    parts = IncompleteVersions(store)
    assert ask(parts, 0, version(0, 2), bits) is None
    other = ask(parts, 1, version(0, 2), bits + 1)
    assert other is not None
    assert (other.kept, store.state("run").head) == (None, version(0))
    found = ask(parts, 1, version(0, 2), bits)
    assert found is not None
    assert found.kept is not None
    assert (found.kept.base, found.kept.bytes, found.completed_here) == (version(0), 0, True)
    again = ask(parts, 0, version(0, 2), bits)
    assert again is not None
    assert (again.kept, again.completed_here) == (found.kept, False)


def test_a_rank_that_asks_after_a_restart_hears_what_the_others_heard(tmp_path: Path) -> None:
    """The store forgot its answer; another rank's blocks are on their way already."""
    store, bits = Store(tmp_path), np.arange(40, dtype=np.uint16)
    store.open_incarnation("run", "first")
    parts = IncompleteVersions(store)
    data = msgspec.msgpack.encode(part(0, version(0), bits))
    assert parts.add(data, None) is None
    reported = ask(parts, 1, version(0), bits)
    assert reported is not None
    assert reported.kept is None
