"""Staging and committing bundles on weights in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from rose_core.delta import Builder, Codec, name_of
from rose_core.delta.digest import Digest, to_bytes, total
from rose_core.delta.manifest import Manifest
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.node import pace
from rose_engines.tensors.canonical import HostTensor, Live, LiveTensor, Where, host_tensors
from rose_engines.weights import decoding
from rose_engines.weights.decoding import groups
from rose_engines.weights.live import commit, confirm, digest_live, readable, revert
from rose_engines.weights.staging import stage

V0, V1, V2 = (WeightVersion("run", 1, n) for n in range(3))


def engine(state: State) -> Live:
    return host_tensors({name: one._replace(bits=one.bits.copy()) for name, one in state.items()})


def equal(live: Live, state: State) -> bool:
    return all(np.array_equal(live[name].all_bits(), state[name][2]) for name in state)


def rewrite(bundle: Path, **fields: object) -> None:
    """Change fields of a bundle's manifest."""
    path = bundle / "manifest.msgpack"
    path.write_bytes(msgspec.structs.replace(Manifest.decode(path.read_bytes()), **fields).encode())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_delta_makes_the_new_state(tmp_path: Path, old: State, share: float) -> None:
    new = {
        name: StoredTensor(
            d, s, np.where(np.arange(b.size) < share * b.size, b ^ 5, b).astype(b.dtype)
        )
        for name, (d, s, b) in old.items()
    }
    manifest = write_bundle(tmp_path / "b", V1, new, (V0, old))
    live = engine(old)
    update = stage(tmp_path / "b", live, digest_live(live))
    assert equal(live, old)
    assert update.version == "run@1.1"
    assert str(commit(update, live)) == manifest.digest == str(digest_live(live))
    assert equal(live, new)


def test_blocks_coded_on_their_base_are_read_against_the_live_weights(
    tmp_path: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    entries = manifest.tensors
    base = Builder(entries, None, lambda _: None)
    for name in old:
        base.add(None, old[name][2], blocks=False)
    folder = tmp_path / "b" / "blocks"
    builder = Builder(
        entries,
        base.finish(V0),
        lambda data: (folder / name_of(data).hex()).write_bytes(data),
        on_base=True,
    )
    for name in old:
        builder.add(old[name][2], sparse[name][2])
    smaller = builder.on_base(builder.finish(V1))
    assert smaller is not None
    assert Codec.RICE in {block.codec for block in smaller.blocks}
    (tmp_path / "b" / "manifest.msgpack").write_bytes(smaller.encode())
    live = engine(old)
    assert Codec.RICE in readable(live)
    rests = list[int]()
    monkeypatch.setattr(pace.Pace, "rest", lambda _: rests.append(1))
    assert str(commit(stage(tmp_path / "b", live, digest_live(live)), live)) == manifest.digest
    assert equal(live, sparse)
    coded = [block.codec for block in smaller.blocks].count(Codec.RICE)
    others = {block.tensor for block in smaller.blocks if block.codec != Codec.RICE}
    # Read and later decoded, each one by itself; the rest tensor by tensor; then all is resolved.
    assert len(rests) == 2 * coded + len(others) + 1
    wrong = engine(sparse)
    with pytest.raises(CommitRefused, match="WrongBase"):
        stage(tmp_path / "b", wrong, digest_live(wrong))


def test_an_engine_whose_weights_are_elsewhere_does_not_ask_for_them(old: State) -> None:
    class Elsewhere:
        name, dtype, shape = "w", "BF16", (2,)

    live = {**engine(old), "w": cast("LiveTensor", Elsewhere())}
    assert Codec.RICE not in readable(live)


def test_full_bundle_needs_no_base(tmp_path: Path, old: State, sparse: State) -> None:
    write_bundle(tmp_path / "b", V1, old)
    live = engine(sparse)
    commit(stage(tmp_path / "b", live, digest_live(live)), live)
    assert equal(live, old)


def test_a_delta_is_committed_on_the_state_of_the_one_before(
    tmp_path: Path, old: State, sparse: State
) -> None:
    live = engine(old)
    write_bundle(tmp_path / "1", V1, sparse, (V0, old))
    write_bundle(tmp_path / "2", V2, old, (V1, sparse))
    reached = commit(stage(tmp_path / "1", live, digest_live(live)), live)
    commit(stage(tmp_path / "2", live, reached), live)
    assert equal(live, old)


def test_a_delta_from_another_base_is_refused_with_both_versions(
    tmp_path: Path, old: State, sparse: State
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = engine(sparse)
    with pytest.raises(CommitRefused, match=r"WrongBase.*run@1\.1 starts from run@1\.0"):
        stage(tmp_path / "b", live, digest_live(live))


def test_flipped_bit_in_every_file(
    tmp_path: Path, old: State, sparse: State, flip: Callable[[Path], None]
) -> None:
    live = engine(old)
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    for path in [tmp_path / "b" / "manifest.msgpack", *(tmp_path / "b" / "blocks").iterdir()]:
        flip(path)
        with pytest.raises(CommitRefused) as refused:
            stage(tmp_path / "b", live, digest_live(live))
        assert refused.value.reason in {"Corrupt", "WrongBase", "Layout"}
        flip(path)
    assert equal(live, old)
    commit(stage(tmp_path / "b", live, digest_live(live)), live)


@pytest.mark.parametrize("together", [1, 1 << 16])
def test_a_tensor_is_put_in_at_once_however_its_blocks_were_decoded(
    tmp_path: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Small groups are joined; each change moves the digest by its own part."""
    monkeypatch.setattr(decoding, "MOST_TOGETHER", together)
    manifest = write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = engine(old)
    current = digest_live(live)
    update = stage(tmp_path / "b", live, current)
    names = [change.tensor.name for change in update.changes]
    assert names == [entry.name for entry, _ in manifest.blocks_by_tensor()]
    assert len(names) < len(manifest.blocks)
    moved = total(change.moved for change in update.changes)
    assert str(current.plus(moved)) == manifest.digest
    commit(update, live)
    assert equal(live, sparse)


def test_large_blocks_are_decoded_alone_and_small_ones_together(
    tmp_path: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    _, blocks = max(manifest.blocks_by_tensor(), key=lambda found: len(found[1]))
    assert [len(group) for group in groups(blocks)] == [len(blocks)]
    monkeypatch.setattr(decoding, "ALONE", 1)
    assert [len(group) for group in groups(blocks)] == [1] * len(blocks)


def test_missing_block_and_missing_manifest(tmp_path: Path, old: State, sparse: State) -> None:
    live = engine(old)
    with pytest.raises(CommitRefused, match=r"Corrupt.*manifest"):
        stage(tmp_path, live, digest_live(live))
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    next((tmp_path / "b" / "blocks").iterdir()).unlink()
    with pytest.raises(CommitRefused, match=r"Corrupt.*missing"):
        stage(tmp_path / "b", live, digest_live(live))


def test_hidden_change_is_refused(tmp_path: Path, old: State, sparse: State) -> None:
    """A tile whose digest changes without a block."""
    manifest = write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    rewrite(tmp_path / "b", blocks=manifest.blocks[1:])
    live = engine(old)
    with pytest.raises(CommitRefused, match=r"Corrupt.*no block"):
        stage(tmp_path / "b", live, digest_live(live))


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "dtype"])
def test_other_model_is_refused_by_name(
    tmp_path: Path, old: State, sparse: State, how: str
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    state = dict(old)
    dtype, shape, bits = state.pop("a.norm.weight")
    if how == "shape":
        state["a.norm.weight"] = StoredTensor(dtype, (2, *shape[:-1], shape[-1] // 2), bits)
    elif how == "dtype":
        state["a.norm.weight"] = StoredTensor("F16", shape, bits)
    elif how == "extra":
        state |= {
            "a.norm.weight": StoredTensor(dtype, shape, bits),
            "b.weight": StoredTensor(dtype, shape, bits),
        }
    live = engine(state)
    with pytest.raises(CommitRefused, match=rf"Layout.*{'b' if how == 'extra' else 'a.norm'}"):
        stage(tmp_path / "b", live, digest_live(live))


class Stubborn(HostTensor):
    """Memory that does not keep what is written: ``lost`` elements stay as they were."""

    lost = slice(0, 0)

    def put(self, where: Where, bits: np.ndarray) -> None:
        kept = self.flat[self.lost].copy()
        super().put(where, bits)
        self.flat[self.lost] = kept


def stubborn(state: State, name: str, lost: slice) -> Live:
    live = dict(engine(state))
    dtype, shape, bits = state[name]
    live[name] = Stubborn(name, dtype, shape, bits.copy())
    live[name].lost = lost  # type: ignore[attr-defined]
    return live


def test_wrong_digest_on_live_weights_is_undone(tmp_path: Path, old: State, sparse: State) -> None:
    """A write that did not arrive: everything goes back, bit for bit."""
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = stubborn(old, "a.q_proj.weight", slice(0, None))
    update = stage(tmp_path / "b", live, digest_live(live))
    with pytest.raises(CommitRefused, match=r"DigestMismatch.*a\.q_proj\.weight"):
        commit(update, live)
    assert equal(live, old)


def test_what_changed_beside_the_swap_is_not_confirmed(
    tmp_path: Path, old: State, sparse: State
) -> None:
    """Memory that changed between staging and commit: reading back cannot see it."""
    write_bundle(tmp_path / "b", V1, sparse, (V0, old))
    live = engine(old)
    update = stage(tmp_path / "b", live, digest_live(live))
    same = np.flatnonzero(old["a.norm.weight"][2] == sparse["a.norm.weight"][2])[:1]
    live["a.norm.weight"].put(same, live["a.norm.weight"].take(same) ^ 1)
    if not any(change.tensor.name == "a.norm.weight" for change in update.changes):
        pytest.fail("the step must touch the vector")
    commit(update, live)
    wrong = confirm(update, live)
    assert wrong is not None
    assert "a.norm.weight has digest" in wrong
    with pytest.raises(BrokenWeights, match=r"a\.norm\.weight"):
        revert(update, live, wrong)


def test_a_manifest_that_lies_about_a_tile_is_refused_before_anything_is_touched(
    tmp_path: Path, old: State, sparse: State
) -> None:
    for base in ((V0, old), None):
        folder = tmp_path / ("full" if base is None else "delta")
        manifest = write_bundle(folder, V1, sparse, base)
        first = manifest.tile_number(manifest.blocks[0])
        digests = list(manifest.tile_digests)
        digests[first] = digests[first].plus(Digest(1, 0))
        rewrite(folder, tiles=to_bytes(digests), digest=str(total(digests)))
        live = engine(old)
        with pytest.raises(CommitRefused, match=r"DigestMismatch.*would not become"):
            stage(folder, live, digest_live(live))
        assert equal(live, old)
