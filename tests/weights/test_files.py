"""Versions from files and back: checkpoints, and delta directories of slime and miles."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from rose_core.delta.safetensors import StoredTensor
from rose_weights.bundle import Bundle
from rose_weights.checkpoint import Checkpoint, write_safetensors
from rose_weights.main import main
from rose_weights.receive.client import WeightsClient
from rose_weights.send.deltadirs import INDEX, DeltaDir, Encoding
from rose_weights.send.importing import publish
from tests.weights.models import SPECS, Model, apply_bundle
from tests.weights.test_service import start, version


def write_checkpoint(path: Path, model: Model) -> Path:
    path.mkdir(parents=True)
    state = {
        spec.name: StoredTensor(spec.dtype, spec.shape, model.state[spec.name]) for spec in SPECS
    }
    write_safetensors(path / "model.safetensors", state)
    return path


@pytest.fixture
def model() -> Model:
    return Model(seed=1)


@pytest.fixture
def pair(tmp_path: Path, model: Model) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    old = write_checkpoint(tmp_path / "old", model)
    model.change(seed=3)
    return old, write_checkpoint(tmp_path / "new", model)


def bundled(pair: tuple[Path, Path], out: Path) -> Bundle:
    assert main(["import", *map(str, pair), "--run", "run", "--out", str(out)]) == 0
    return Bundle(out)


def test_two_checkpoints_become_a_bundle(
    pair: tuple[Path, Path], tmp_path: Path, model: Model
) -> None:
    bundle = bundled(pair, tmp_path / "b")
    first = Checkpoint(pair[0])
    held = {name: first.bits(name).copy() for name in first.names()}
    apply_bundle(held, bundle)
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())
    assert main(["verify", str(tmp_path / "b"), "--base", str(pair[0])]) == 0


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["adler32", "xxh3-128"])
def test_a_bundle_written_as_a_delta_directory_reads_back(
    pair: tuple[Path, Path], tmp_path: Path, model: Model, encoding: Encoding, checksum: str
) -> None:
    bundled(pair, tmp_path / "b")
    arguments = ["export", str(tmp_path / "b"), str(pair[0]), str(tmp_path / "d"), "--number", "7"]
    assert main([*arguments, "--encoding", encoding, "--checksum", checksum]) == 0
    found = DeltaDir.open(tmp_path / "d" / "weight_v000007")
    assert (found.version, found.base_version, found.encoding) == (7, 6, encoding)
    before = Checkpoint(pair[0])
    after = dict(found.apply(lambda name: before.bits(name).view(np.uint8)))
    for name, bits in after.items():
        assert bits.tobytes() == model.state[name].tobytes()
    unchanged = set(before.names()) - set(after)
    assert all(np.array_equal(before.bits(name), model.state[name]) for name in unchanged)


def test_a_directory_written_by_its_description_is_published(
    pair: tuple[Path, Path], tmp_path: Path, model: Model
) -> None:
    folder = tmp_path / "weight_v000001"
    folder.mkdir()
    old = Checkpoint(pair[0])
    frames, sums = {}, {}
    for name, bits in model.state.items():
        xor = np.frombuffer(old.bits(name).tobytes(), np.uint8) ^ bits.view(np.uint8).reshape(-1)
        frame = np.frombuffer(zstandard.compress(xor.tobytes(), 1), np.uint8)
        frames[name] = StoredTensor("U8", frame.shape, frame)
        sums[name] = f"{zlib.adler32(bits.tobytes()):08x}"
    write_safetensors(folder / "model-00000-of-00001.safetensors", frames, sums)
    about = {"version": "000001", "base_version": "000000", "delta_encoding": "xor"}
    about |= {"compression_format": "zstd", "checksum_format": "adler32"}
    files = dict.fromkeys(frames, "model-00000-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": about, "weight_map": files}))

    async def through_a_store() -> dict[str, np.ndarray]:
        running = await start(tmp_path / "store")
        found = await publish([pair[0], folder], running.address, "run", token="t")
        async with WeightsClient(running.address, token="t") as client:
            await client.pull("run", tmp_path / "b", have=version(0), digest=found[0].digest)
        await running.stop()
        held = {name: old.bits(name).copy() for name in old.names()}
        apply_bundle(held, Bundle(tmp_path / "b"))
        return held

    held = asyncio.run(through_a_store())
    assert all(np.array_equal(held[name], bits) for name, bits in model.state.items())


def test_a_delta_on_another_base_is_refused_by_its_checksum(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled(pair, tmp_path / "b")
    main(["export", str(tmp_path / "b"), str(pair[0]), str(tmp_path), "--number", "1"])
    delta = str(tmp_path / "weight_v000001")
    arguments = ["import", str(pair[1]), delta, "--run", "run", "--out", str(tmp_path / "c")]
    assert main(arguments) == 1
    assert "is that what you have?" in capsys.readouterr().err


def test_another_model_and_an_unknown_kind_are_refused_by_name(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(
        other / "x.safetensors", {"w": StoredTensor("BF16", (2,), np.zeros(2, np.uint16))}
    )
    arguments = ["import", str(pair[0]), str(other), "--run", "run", "--out", str(tmp_path / "c")]
    assert main(arguments) == 1
    assert "is another model" in capsys.readouterr().err
    strange = tmp_path / "weight_v000002"
    strange.mkdir()
    about = {"version": "2", "base_version": "1", "delta_encoding": "xor"}
    about |= {"compression_format": "zstd", "checksum_format": "blake3"}
    (strange / INDEX).write_text(json.dumps({"metadata": about, "weight_map": {}}))
    arguments[2] = str(strange)
    assert main(arguments) == 1
    assert "blake3" in capsys.readouterr().err
