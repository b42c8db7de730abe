"""Publishes runs straight into a store, as the service does for a publisher."""

from __future__ import annotations

import numpy as np

from rose_core.delta import Manifest
from rose_core.identity import WeightVersion
from rose_weights.store.planning import FetchPlanner
from rose_weights.store.state import RunState
from rose_weights.store.store import Store
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
    manifest, _ = FetchPlanner(store).plan("run")
    wanted = states[manifest.digest]
    held = {name: np.zeros_like(bits) for name, bits in wanted.items()}
    apply_manifest(held, manifest, lambda block: store.blocks.get(block.sha256))
    assert all(np.array_equal(held[name], wanted[name]) for name in wanted)


def check_repeated(store: Store, states: dict[str, dict[str, np.ndarray]]) -> None:
    """After a crash, what there is is whole, and the publisher's second try ends at the last."""
    if store.runs():
        check_head(store, states)
    publish_three(store, states)
    check_head(store, states)
    head = store.state("run").head
    assert head is not None
    assert head.sequence == 2


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
