"""The Publisher against a real store service in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta import Manifest
from rose_core.delta.bits import Bits
from rose_core.identity import WeightVersion
from rose_trainer.errors import BadState, NotPublished, PublishFailed
from rose_trainer.publisher import Publisher
from rose_weights.bundle import Bundle
from rose_weights.errors import Fenced, StoreFailed
from rose_weights.messages import Description
from rose_weights.receive.client import WeightsClient
from rose_weights.serve.service import WeightService
from rose_weights.store.folder import Folder
from rose_weights.store.state import RunState
from rose_weights.store.store import Store
from rose_wire.rpc import Server
from tests.weights.models import apply_bundle


class RunningStore:
    """A store service on a free port, in a thread."""

    def __init__(self, root: Path, token: str = "t") -> None:  # noqa: S107
        self.store = Store(root)
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = self._run(self._start())

    async def _start(self) -> str:
        self._server = Server(token=self._token)
        self._service = WeightService(self.store)
        self._service.bind(self._server)
        return f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    async def _stop(self) -> None:
        await self._server.stop()
        await self._service.close()

    def _run(self, coroutine: object) -> str:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)  # type: ignore[arg-type]

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def pull(self, folder: Path, have: WeightVersion | None = None, digest: str = "") -> Manifest:
        async def pull() -> Manifest:
            async with WeightsClient(self.address, token=self._token) as client:
                return await client.pull("run", folder, have=have, digest=digest)

        return asyncio.run(pull())

    def describe(self) -> Description:
        async def ask() -> Description:
            async with WeightsClient(self.address, token=self._token) as client:
                return await client.describe("run")

        return asyncio.run(ask())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningStore]:
    store = RunningStore(tmp_path / "store")
    yield store
    store.close()


def small_model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    embed = torch.randn(300, 64).to(torch.bfloat16)
    return {
        "model.embed_tokens.weight": embed,
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 128).to(torch.bfloat16),
        "model.norm.weight": torch.ones(64),
        "lm_head.weight": embed,
    }


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, Bits]:
    kinds = {2: torch.int16, 4: torch.int32}
    return {
        name: np.frombuffer(
            tensor.contiguous().view(kinds[tensor.element_size()]).numpy().tobytes(),
            f"u{tensor.element_size()}",
        ).copy()
        for name, tensor in tensors.items()
        if name != "lm_head.weight"
    }


def test_versions_follow_the_tensors_bit_for_bit(running: RunningStore, tmp_path: Path) -> None:
    model = small_model(1)
    held = bits_of(model)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        first = publisher.wait(publisher.publish(0), 60)
        assert first.version == WeightVersion("run", 1, 0)
        assert first.changes == first.elements == 300 * 64 + 64 * 128 + 64
        for step in range(1, 5):
            model["model.norm.weight"][step] = float("nan") if step == 2 else -0.0
            model["model.embed_tokens.weight"][step] *= 1.01
            version = publisher.publish(step)
        last = publisher.wait(version, 60)
        assert publisher.head == version
    assert 0 < last.changes < 100
    assert 0 < last.encode_seconds < last.seconds
    kept = {info.version: info.encode_seconds for info in running.describe().versions}
    assert kept[last.version] == last.encode_seconds
    manifest = running.pull(tmp_path / "b", first.version, first.digest)
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    apply_bundle(held, Bundle(tmp_path / "b"))
    wanted = bits_of(model)
    assert all(np.array_equal(held[name], wanted[name]) for name in wanted)
    assert manifest.digest == last.digest


def test_an_engine_with_the_same_model_transfers_nothing(
    running: RunningStore, tmp_path: Path
) -> None:
    with Publisher(running.address, "run", token="t") as publisher:
        first = publisher.wait(publisher.publish(0, small_model(1)), 60)
    manifest = running.pull(tmp_path / "b", None, first.digest)
    assert manifest.target == first.version
    assert manifest.blocks == ()


def test_a_resumed_trainer_fences_the_old_one_and_continues_from_its_checkpoint(
    running: RunningStore, tmp_path: Path
) -> None:
    model = small_model(1)
    old = Publisher(running.address, "run", token="t")
    old.wait(old.publish(0, model), 60)
    model["model.norm.weight"][0] = 7.0
    at = old.wait(old.publish(1, model), 60)
    held = bits_of(model)
    resumed = small_model(1)
    with Publisher(running.address, "run", token="t") as new:
        version = new.publish(0, resumed)
        assert version == WeightVersion("run", 2, 0)
        assert new.wait(version, 60).bytes == 0
        with pytest.raises(PublishFailed) as failed:
            old.wait(old.publish(2, model), 60)
        assert isinstance(failed.value.__cause__, Fenced)
        resumed["model.norm.weight"][5] = 3.0
        new.wait(new.publish(1, resumed), 60)
    old.close(drain=False)
    manifest = running.pull(tmp_path / "b", at.version, at.digest)
    assert manifest.base == at.version
    assert manifest.changes == 2
    apply_bundle(held, Bundle(tmp_path / "b"))
    assert np.array_equal(held["model.norm.weight"], bits_of(resumed)["model.norm.weight"])


def test_a_manifest_that_rots_at_the_store_is_kept_again_with_the_next_publish(
    running: RunningStore, tmp_path: Path
) -> None:
    model = small_model(1)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        first = publisher.wait(publisher.publish(0), 60)
        kept = running.store.state("run").versions[-1]
        path = Folder(tmp_path / "store").manifest_path("run", kept.manifest)
        path.write_bytes(b"torn")
        model["model.norm.weight"][0] = 7.0
        last = publisher.wait(publisher.publish(1), 60)
    assert last.changes == 1
    manifest = running.pull(tmp_path / "b", first.version, first.digest)
    assert (manifest.base, manifest.digest) == (first.version, last.digest)


def test_a_store_whose_disk_is_full_is_asked_again(
    running: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter(["full", "full"])
    opened = Store.open_incarnation

    def refusing(store: Store, run: str, publisher: str) -> RunState:
        if next(refusals, None):
            raise StoreFailed("cannot open (run): No space left on device")
        return opened(store, run, publisher)

    monkeypatch.setattr(Store, "open_incarnation", refusing)
    with Publisher(running.address, "run", token="t") as publisher:
        assert publisher.incarnation == 1
    assert next(refusals, None) is None


def test_bad_tensors_are_refused_and_nothing_is_lost(running: RunningStore) -> None:
    model = small_model(1)
    with Publisher(running.address, "run", token="t") as publisher:
        with pytest.raises(BadState, match="no tensors"):
            publisher.publish(0, {})
        publisher.publish(0, model)
        with pytest.raises(BadState, match="missing"):
            publisher.publish(1, {"model.norm.weight": torch.ones(64)})
        with pytest.raises(BadState, match="at first"):
            publisher.publish(1, {**model, "model.norm.weight": torch.ones(65)})
        with (
            Publisher(running.address, "other", token="t") as other,
            pytest.raises(BadState, match="complex"),
        ):
            other.publish(0, {"x": torch.ones(2, dtype=torch.complex64)})
        published = publisher.wait(publisher.publish(1, model), 60)
        assert published.version.sequence == 1
        assert published.changes == 0
        with pytest.raises(NotPublished):
            publisher.wait(WeightVersion("run", 1, 9), 1)


def test_masters_are_cast_on_the_way(running: RunningStore, tmp_path: Path) -> None:
    master = torch.nn.Linear(32, 16, bias=False)
    with Publisher(running.address, "run", token="t", dtype=torch.bfloat16) as publisher:
        publisher.wait(publisher.publish(0, master.state_dict()), 60)
    manifest = running.pull(tmp_path / "b")
    assert [tensor.dtype for tensor in manifest.tensors] == ["BF16"]
    held = {"weight": np.zeros(32 * 16, np.uint16)}
    apply_bundle(held, Bundle(tmp_path / "b"))
    wanted = bits_of({"weight": master.weight.detach().to(torch.bfloat16)})
    assert np.array_equal(held["weight"], wanted["weight"])


def test_a_wrong_token_is_a_clear_refusal(running: RunningStore) -> None:
    with pytest.raises(PublishFailed, match="bearer token"):
        Publisher(running.address, "run", token="wrong")
