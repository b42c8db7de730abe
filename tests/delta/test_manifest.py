import msgspec
import numpy as np
import pytest

from rose_core.delta import Builder, Manifest, ManifestError, TensorSpec, number_format, table
from rose_core.delta.manifest import BlockEntry
from rose_core.identity import WeightVersion
from tests.weights.models import Model

V0, V1 = WeightVersion("run", 1, 0), WeightVersion("run", 1, 1)


@pytest.fixture(scope="module")
def pair() -> tuple[Manifest, Manifest]:
    model = Model(seed=0)
    full, _ = model.full("run", 1)
    model.change(seed=1)
    delta, _ = model.delta(V1)
    return full, delta


def test_a_manifest_comes_back(pair: tuple[Manifest, Manifest]) -> None:
    for manifest in pair:
        again = Manifest.decode(manifest.encode())
        assert again == manifest
        assert again.name == manifest.name
    full, delta = pair
    assert full.base is None
    assert full.changes == full.elements
    assert delta.base == full.target
    assert delta.base_digest == full.digest
    assert 0 < delta.changes < delta.elements / 10
    assert delta.tensors[-1].offset + 8 == delta.state_bytes


def test_the_digest_is_the_same_however_the_state_was_reached(
    pair: tuple[Manifest, Manifest],
) -> None:
    model = Model(seed=0)
    model.full("run", 1)
    model.change(seed=1)
    fresh, _ = Model.full(model, "run", 1)
    assert fresh.digest == pair[1].digest
    assert fresh.tiles == pair[1].tiles


CONTRADICTIONS = {
    "format": {"format": "rose-delta/9"},
    "bytes of target digests": {"tiles": b""},
    "bytes of base digests": {"base_tiles": b""},
    "target digest is not the sum": {"digest": "0" * 32},
    "base digest is not the sum": {"base_digest": "0" * 32},
    "cannot be": {"tied": {"lm_head.weight": "no.such.tensor"}},
}


@pytest.mark.parametrize(("text", "fields"), CONTRADICTIONS.items())
def test_contradictions_are_refused(
    pair: tuple[Manifest, Manifest], text: str, fields: dict[str, object]
) -> None:
    wrong = msgspec.structs.replace(pair[1], **fields)
    with pytest.raises(ManifestError, match=text):
        Manifest.decode(wrong.encode())


def test_impossible_blocks_are_refused(pair: tuple[Manifest, Manifest]) -> None:
    delta = pair[1]
    first, *rest = delta.blocks
    for blocks in (
        (*rest, first),
        (first, first),
        (BlockEntry(99, 0, 3, 1, 1, bytes(32)),),
        (BlockEntry(0, 99, 3, 1, 1, bytes(32)),),
        (BlockEntry(0, 0, 3, 1, 1, b"short"),),
    ):
        wrong = msgspec.structs.replace(delta, blocks=tuple(blocks))
        with pytest.raises(ManifestError):
            Manifest.decode(wrong.encode())
    missing = msgspec.structs.replace(pair[0], blocks=pair[0].blocks[1:])
    with pytest.raises(ManifestError, match="full, yet"):
        Manifest.decode(missing.encode())


def test_impossible_tensors_are_refused(pair: tuple[Manifest, Manifest]) -> None:
    delta = pair[1]
    first, second, *rest = delta.tensors
    for tensors in (
        (first, first, *rest),
        (second, first, *rest),
        (msgspec.structs.replace(first, shape=(-1, 96)), second, *rest),
        (msgspec.structs.replace(first, tile_rows=0), second, *rest),
        (msgspec.structs.replace(first, dtype="Q9"), second, *rest),
    ):
        wrong = msgspec.structs.replace(delta, tensors=tuple(tensors))
        with pytest.raises(ManifestError):
            Manifest.decode(wrong.encode())


def test_bytes_that_are_no_manifest_are_refused() -> None:
    for data in (b"", b"\x00" * 40, b"not a manifest"):
        with pytest.raises(ManifestError, match="not a manifest"):
            Manifest.decode(data)


def test_a_bare_manifest_lists_no_blocks() -> None:
    tensors = table([TensorSpec("w", "BF16", (4, 4))])
    builder = Builder(tensors, None, lambda _: pytest.fail("a block"))
    builder.add(None, np.arange(16, dtype=np.uint16), blocks=False)
    manifest = Manifest.decode(builder.finish(V0).encode())
    assert manifest.bare
    assert manifest.blocks == ()


def test_the_builder_refuses_other_tensors(pair: tuple[Manifest, Manifest]) -> None:
    tensors = table([TensorSpec("w", "BF16", (4, 4))])
    with pytest.raises(ManifestError, match="not those of base"):
        Builder(tensors, pair[0], lambda _: None)
    builder = Builder(tensors, None, lambda _: None)
    with pytest.raises(ManifestError, match="17 elements"):
        builder.add(None, np.zeros(17, np.uint16))
    with pytest.raises(ManifestError, match="0 of 1 tensors"):
        builder.finish(V0)


def test_an_unknown_element_type_says_what_is_known() -> None:
    with pytest.raises(ManifestError, match="BF16"):
        number_format("NVFP4")
