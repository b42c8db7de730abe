"""``rose weights``: serving until a signal, and looking into what is on disk."""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import subprocess
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rose_dev.process_testing import CLI, spawn_process
from rose_weights.checkpoint import Checkpoint
from rose_weights.errors import Damaged
from rose_weights.main import main
from rose_weights.receive.client import WeightsClient
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve import tenants
from rose_weights.store.blocks import Blocks
from rose_weights.store.store import Store
from tests.weights.models import SPECS, Model
from tests.weights.test_service import publish, start, version

DEADLINE = 60.0


def write_checkpoint(path: Path, model: Model) -> None:
    """A safetensors file, by hand: length, JSON header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in SPECS:
        size = model.state[spec.name].nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    data = b"".join(model.state[spec.name].tobytes() for spec in SPECS)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three versions, the first and last as checkpoints, and a bundle between."""
    root = tmp_path_factory.mktemp("weights")

    async def make() -> None:
        running = await start(root / "store")
        model = Model(seed=1)
        write_checkpoint(root / "first", model)
        async with (
            WeightsWriter(running.address, token="t") as writer,
            WeightsClient(running.address, token="t") as client,
        ):
            found = await publish(writer, model, 3)
            await client.pull("run", root / "bundle", have=version(0), digest=found[0].digest)
        write_checkpoint(root / "last", model)
        await running.stop()

    asyncio.run(make())
    return root


def test_a_store_and_a_bundle_can_be_looked_at(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(places / "store")]) == 0
    text = capsys.readouterr().out
    assert "run run: head run@1.2, fence 1 (test)" in text
    assert "run@1.0  step 0  full" in text
    assert "from run@1.1" in text
    assert main(["inspect", str(places / "bundle")]) == 0
    text = capsys.readouterr().out
    assert "run@1.0 -> run@1.2 (step 20)" in text
    assert "bytes per change" in text
    assert main(["inspect", str(places / "bundle" / "manifest.msgpack")]) == 0
    assert "STEPS" in capsys.readouterr().out


def test_a_bundle_is_verified_against_a_checkpoint(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(places / "bundle"), "--base"]
    assert main([*arguments, str(places / "first")]) == 0
    assert "after applying" in capsys.readouterr().out
    assert main([*arguments, str(places / "last")]) == 1
    assert "is not what base run@1.0 had" in capsys.readouterr().out


def test_damage_is_reported_by_tensor_and_tile(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(places / "store")]) == 0
    assert "good" in capsys.readouterr().out
    store = Store(places / "store")
    victim = store.manifest(store.state("run").versions[-1]).blocks[0]
    path = Blocks(places / "store" / "blocks").path(victim.sha256)
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1])
        assert main(["verify", str(places / "store")]) == 1
        assert "model.embed_tokens.weight tile 0" in capsys.readouterr().out
    finally:
        path.write_bytes(whole)


def test_two_checkpoints_are_compared_bit_by_bit(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(places / "first"), str(places / "last")]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, last = (Checkpoint(places / name) for name in ("first", "last"))
    changed = sum(
        int(np.count_nonzero(first.bits(name) != last.bits(name))) for name in first.names()
    )
    assert lines[-1].startswith(f"{changed} of ")
    assert main(["diff", str(places / "first"), str(places / "first")]) == 0
    assert capsys.readouterr().out.startswith("0 of ")


def test_a_store_without_that_run_is_no_silence(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(places / "store"), "--run", "nun"]) == 1
    assert "no run 'nun' in this store; it has run" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("no run yet") == 2


def test_what_is_nothing_of_ours_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is no store, bundle or manifest" in capsys.readouterr().err
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(Damaged, match=r"holds no \*.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(Damaged, match="is no safetensors file"):
        Checkpoint(tmp_path)
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize("verb", [["serve"], ["relay", "--upstream", "127.0.0.1:1"]])
def test_a_folder_that_cannot_be_written_is_refused_before_serving(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--root", "/proc/nope", "--address", "127.0.0.1:0", "--http-port", "0"]
    assert main([*verb, *flags]) == 1
    assert "--root /proc/nope cannot be written" in capsys.readouterr().err


async def test_serving_until_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    credential = tenants.grant(file, "team", publish=("run",), read=("run",))
    process = await spawn_process(
        CLI,
        "weights",
        "serve",
        "--root",
        str(tmp_path / "store"),
        "--address",
        "127.0.0.1:0",
        "--http-port",
        "0",
        "--tenants",
        str(file),
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), DEADLINE)).decode()
        grpc_port, http_port = (
            int(word.strip(",\n")) for word in line.split() if word[0].isdigit()
        )
        async with WeightsWriter(f"127.0.0.1:{grpc_port}", token=credential) as writer:
            found = await publish(writer, Model(seed=1), 2)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{http_port}/metrics") as answer:
                text = await answer.text()
            async with session.get(f"http://127.0.0.1:{http_port}/healthz") as answer:
                assert await answer.text() == "ok\n"
        assert 'rose_weights_head_sequence{run="run"} 1.0' in text
        assert 'rose_weights_commits_total{outcome="Published",run="run"} 2.0' in text
        assert 'rose_weights_refusals_total{error="Fenced"} 0.0' in text, "the first one is a rise"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 0
        assert time.monotonic() - began < DEADLINE
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    # What was published is there after a restart.
    assert Store(tmp_path / "store").state("run").head == found[-1].version
