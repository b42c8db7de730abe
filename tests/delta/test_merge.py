"""Merged deltas equal their chain, forwards and backwards; the lineage finds the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta import (
    Hop,
    LineageError,
    Manifest,
    NumberFormat,
    TileChanges,
    compose,
    inverse,
    name_of,
    then,
)
from rose_core.delta.bits import Bits
from rose_core.delta.codec import find_changes
from rose_core.delta.lineage import VersionLink, VersionPath, ancestors, full_way, retain, way
from rose_core.identity import WeightVersion
from tests.delta.strategies import SLOW_MACHINE, kind_and_pair
from tests.weights.models import Model


def version(sequence: int, incarnation: int = 1) -> WeightVersion:
    return WeightVersion("run", incarnation, sequence)


class Chain:
    """Published versions, their blocks, and what the state was."""

    def __init__(self, length: int, *, whole_norm: bool = True) -> None:
        self.model = Model(seed=3)
        first, self.blocks = self.model.full("run", 1)
        self.manifests = [first]
        self.states = [self.model.copy()]
        for number in range(1, length):
            self.model.change(seed=number, whole_norm=whole_norm)
            manifest, blocks = self.model.delta(version(number))
            self.manifests.append(manifest)
            self.blocks.update(blocks)
            self.states.append(self.model.copy())

    def compose(self, hops: list[Hop]) -> Manifest:
        made: list[bytes] = []
        manifest = compose(hops, lambda block: self.blocks[block.sha256], made.append)
        for data in made:
            self.blocks[name_of(data)] = data
        return Manifest.decode(manifest.encode())

    def apply(self, manifest: Manifest, state: dict[str, Bits]) -> dict[str, Bits]:
        held = {name: bits.copy() for name, bits in state.items()}
        for block in manifest.blocks:
            tensor = manifest.tensors[block.tensor]
            changes = manifest.read(block, self.blocks[block.sha256])
            where = manifest.positions(block, changes)
            held[tensor.name][where] = changes.resolve(held[tensor.name][where], tensor.kind)
        return held


def same(one: dict[str, Bits], two: dict[str, Bits]) -> bool:
    return all(np.array_equal(one[name], two[name]) for name in two)


def equal(one: TileChanges | None, two: TileChanges) -> bool:
    if one is None:
        return False
    sides = ((one.indices, two.indices), (one.steps, two.steps), (one.values, two.values))
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in sides)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain(6)


def test_one_merged_delta_equals_the_chain(chain: Chain) -> None:
    merged = chain.compose([Hop(manifest) for manifest in chain.manifests[1:]])
    assert merged.base == version(0)
    assert merged.base_tiles == chain.manifests[0].tiles
    assert merged.tiles == chain.manifests[-1].tiles
    assert same(chain.apply(merged, chain.states[0]), chain.states[-1])
    assert merged.block_bytes < sum(m.block_bytes for m in chain.manifests[1:])


def test_a_full_manifest_moves_on(chain: Chain) -> None:
    full = chain.compose([Hop(manifest) for manifest in chain.manifests[:4]])
    assert full.base is None
    nothing = {name: np.zeros_like(bits) for name, bits in chain.states[0].items()}
    assert same(chain.apply(full, nothing), chain.states[3])


def test_untouched_blocks_are_listed_as_they_are(chain: Chain) -> None:
    alone = chain.compose([Hop(chain.manifests[2])])
    assert alone.blocks == chain.manifests[2].blocks


def test_steps_can_be_taken_back_but_dense_blocks_cannot(chain: Chain) -> None:
    sparse = Chain(4, whole_norm=False)
    back = [Hop(manifest, back=True) for manifest in reversed(sparse.manifests[1:])]
    merged = sparse.compose(back)
    assert merged.tiles == sparse.manifests[0].tiles
    assert same(sparse.apply(merged, sparse.states[3]), sparse.states[0])
    with pytest.raises(LineageError, match="without its base"):
        chain.compose([Hop(manifest, back=True) for manifest in reversed(chain.manifests[1:])])


def test_ways_that_do_not_connect_are_refused(chain: Chain) -> None:
    with pytest.raises(LineageError, match="the way breaks"):
        chain.compose([Hop(chain.manifests[1]), Hop(chain.manifests[3])])
    with pytest.raises(LineageError, match="empty way"):
        chain.compose([])
    with pytest.raises(LineageError, match="nothing behind it"):
        chain.compose([Hop(chain.manifests[1], back=True), Hop(chain.manifests[0], back=True)])


@given(kind_and_pair(most=80), st.integers(0, 2**32))
@settings(SLOW_MACHINE, max_examples=100)
def test_changes_form_a_group(case: tuple[NumberFormat, Bits, Bits], seed: int) -> None:
    kind, a, b = case
    c = b.copy()
    random = np.random.default_rng(seed)
    chosen = random.random(len(c)) < 0.3
    c[chosen] = a[chosen]  # some changes are taken back
    c[random.random(len(c)) < 0.1] ^= c.dtype.type(1)
    one, two = find_changes(a, b, kind), find_changes(b, c, kind)
    direct = find_changes(a, c, kind)
    merged = then(one if len(one) else None, two if len(two) else None, kind)
    if merged is None:
        assert not len(direct)
    else:
        assert equal(merged, direct)
    if len(one):
        assert then(one, inverse(one), kind) is None
    dense = TileChanges(values=b)
    assert equal(then(dense, two if len(two) else None, kind), TileChanges(values=c))
    assert then(one, dense, kind) is dense
    assert then(None, None, kind) is None


LINEAGE = {
    version(0): VersionLink(None, full=True),
    version(1): VersionLink(version(0), full=False),
    version(2): VersionLink(version(1), full=False),
    version(3): VersionLink(version(2), full=False),
    version(0, 2): VersionLink(version(1), full=False),
    version(1, 2): VersionLink(version(0, 2), full=False),
}


def test_the_way_goes_through_the_common_ancestor() -> None:
    assert way(version(1), version(3), LINEAGE).forward == (version(2), version(3))
    branch = way(version(3), version(1, 2), LINEAGE)
    assert branch.back == (version(3), version(2))
    assert branch.forward == (version(0, 2), version(1, 2))
    assert branch.hops == 4
    assert way(version(2), version(2), LINEAGE) == VersionPath()


def test_without_a_way_the_full_state_is_taken() -> None:
    found = full_way(version(1, 2), LINEAGE)
    assert found.anchor == version(0)
    assert found.forward == (version(1), version(0, 2), version(1, 2))
    other = WeightVersion("run", 9, 9)
    with pytest.raises(LineageError, match="not kept"):
        way(version(0), other, LINEAGE)
    with pytest.raises(LineageError, match="no delta leads"):
        way(other, version(3), LINEAGE)
    bare = {
        version(0): VersionLink(None, full=False),
        version(1): VersionLink(version(0), full=False),
    }
    with pytest.raises(LineageError, match="cannot be had in full"):
        full_way(version(1), bare)


def test_a_broken_lineage_ends() -> None:
    circle = {
        version(0): VersionLink(version(1), full=False),
        version(1): VersionLink(version(0), full=False),
    }
    assert ancestors(version(1), circle) == [version(1), version(0)]


def test_retention_keeps_the_first_version_and_every_branch_reachable() -> None:
    kept = retain({version(3), version(1, 2)}, LINEAGE)
    assert kept.keep == {version(0), version(1), version(3), version(1, 2)}
    assert kept.rebase == {version(3): version(1), version(1, 2): version(1)}
    assert retain({version(3)}, LINEAGE).rebase == {version(3): version(0)}
    assert retain(set(), LINEAGE).keep == set()


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.integers(0, 2**32))
@settings(SLOW_MACHINE, max_examples=80)
def test_whatever_is_wanted_stays_reachable(length: int, wanted: set[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    lineage = {version(0): VersionLink(None, full=True)}
    for number in range(1, length):
        lineage[version(number)] = VersionLink(version(int(random.integers(0, number))), full=False)
    asked = {version(number) for number in wanted if number < length}
    kept = retain(asked, lineage)
    after = {
        name: VersionLink(kept.rebase.get(name, lineage[name].base), lineage[name].full)
        for name in kept.keep
    }
    assert asked <= after.keys()
    for one in asked:
        assert full_way(one, after).anchor == version(0)
        for two in asked:
            assert set(way(one, two, after).forward) <= after.keys()
