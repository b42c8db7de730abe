"""Blocks coded on their base: for receivers that say they read them, and nobody else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rose_core.delta import Codec, Manifest
from rose_weights import inspection
from rose_weights.bundle import Bundle
from rose_weights.errors import BadManifest
from rose_weights.messages import CommitRequest, PlanRequest, VersionInfo
from rose_weights.send.publishing import WeightsWriter
from rose_weights.store.folder import Folder
from tests.weights.models import Model, apply_bundle
from tests.weights.test_service import connected, version

EVERYTHING = tuple(map(int, Codec))


def change(model: Model, seed: int) -> None:
    """As optimizers do, only the other way round: the exponent says how likely a value moves."""
    random = np.random.default_rng(seed)
    for name, bits in model.state.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight")):
            some = (bits >> 7) & 0xFF >= 250
            bits[some & (random.random(len(bits)) < 0.3)] += 1


async def published(writer: WeightsWriter, model: Model, count: int) -> list[VersionInfo]:
    """Versions whose deltas are there in both forms."""
    await writer.open("run", "test")
    manifest, blocks = model.full("run", 1)
    found = [await writer.publish(manifest, blocks, None)]
    for number in range(1, count):
        change(model, number)
        manifest, blocks = model.delta(version(number))
        assert model.on_base is not None
        found.append(
            await writer.publish(manifest, blocks, version(number - 1), on_base=model.on_base)
        )
    return found


def codecs(manifest: Manifest) -> set[int]:
    return {block.codec for block in manifest.blocks}


async def test_who_reads_them_gets_them_and_who_does_not_say_never_does(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s") as (_, writer, client):
        before = model.copy()
        (first, _) = await published(writer, model, 2)
        had, digest = first.version, first.digest
        for readable, wanted in ((EVERYTHING, True), ((1, 2, 3), False), (None, False)):
            folder = tmp_path / str(readable)
            if readable is None:
                manifest = await client.pull("run", folder, have=had, digest=digest)
            else:
                manifest = await client.pull(
                    "run", folder, have=had, digest=digest, codecs=readable
                )
            assert (Codec.RICE in codecs(manifest)) is wanted
            held = {name: bits.copy() for name, bits in before.items()}
            apply_bundle(held, Bundle(folder))
            assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
        assert inspection.verify(tmp_path / "s")[1]


async def test_who_reads_them_gets_the_others_where_their_list_is_damaged(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path / "s") as (running, writer, client):
        first, _ = await published(writer, model, 2)
        kept = running.store.state("run").versions[-1]
        Folder(tmp_path / "s").manifest_path("run", kept.on_base).write_bytes(b"torn")
        had, digest = first.version, first.digest
        manifest, _ = await client.plan("run", have=had, digest=digest, codecs=EVERYTHING)
        assert manifest.name == kept.manifest


async def test_what_must_be_merged_is_made_of_the_others(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, writer, client):
        found = await published(writer, Model(seed=1), 3)
        manifest, merged = await client.plan(
            "run", have=version(0), digest=found[0].digest, codecs=EVERYTHING
        )
        assert (merged, Codec.RICE in codecs(manifest)) == (2, False)
        back, _ = await client.plan(
            "run", have=version(2), digest=found[2].digest, want=version(1), codecs=EVERYTHING
        )
        assert (back.target, Codec.RICE in codecs(back)) == (version(1), False)


async def test_folding_keeps_what_is_still_listed_and_drops_the_rest(tmp_path: Path) -> None:
    async with connected(tmp_path, window=2) as (running, writer, client):
        found = await published(writer, Model(seed=1), 6)
        await running.service.close()
        manifest, _ = await client.plan(
            "run", have=version(4), digest=found[4].digest, codecs=EVERYTHING
        )
        assert Codec.RICE in codecs(manifest)
        for block in manifest.blocks:
            running.store.blocks.get(block.sha256)
        assert inspection.verify(tmp_path)[1]


async def test_a_version_that_could_not_be_merged_is_refused(tmp_path: Path) -> None:
    model = Model(seed=1)
    async with connected(tmp_path) as (running, writer, _):
        await published(writer, model, 1)
        change(model, 1)
        manifest, blocks = model.delta(version(1))
        smaller = model.on_base
        assert smaller is not None
        with pytest.raises(BadManifest, match="cannot be merged"):
            await writer.publish(smaller, blocks, version(0))
        other = msgspec.structs.replace(smaller, step=77)
        with pytest.raises(BadManifest, match="do not make the same version"):
            await writer.publish(manifest, blocks, version(0), on_base=other)
        assert running.store.state("run").head == version(0)


def test_peers_without_the_fields_are_understood() -> None:
    old_plan = msgspec.msgpack.encode({"run": "run"})
    assert Codec.RICE not in msgspec.msgpack.decode(old_plan, type=PlanRequest).codecs
    old_commit = msgspec.msgpack.encode({"manifest": b"m", "expected": None})
    assert msgspec.msgpack.decode(old_commit, type=CommitRequest).on_base == b""
