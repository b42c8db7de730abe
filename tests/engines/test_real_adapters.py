"""LoRA adapters of PEFT on a stock SGLang: what it computes, attests and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.adapters import BASE, SCALE, TARGETS
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_core.wire.sync import AdapterSpec, EngineSpec
from rose_dev.engine_testing import RealEngine, start_engine, write_bundle
from rose_engines.errors import CommitRefused
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient
from rose_trainer.lora import Adapter
from rose_trainer.publisher import Publisher
from rose_weights.receive.client import WeightsClient
from rose_weights.serve.service import WeightService
from rose_weights.store.store import Store
from rose_wire.rpc import Server
from tests.engines.adapter_models import RANK, logprobs, logprobs_of, make_base, state, trained

pytestmark = [
    pytest.mark.engine,
    # PEFT asks transformers by a name that transformers calls old.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PROMPT = list(b"an adapter is a run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    spec = EngineSpec(
        "test", "tiny32", kv_tokens=4096, max_running=4, adapter=AdapterSpec(RANK, TARGETS)
    )
    more = ["--dtype", "float32"]
    with start_engine(tmp_path_factory.mktemp("engine"), folder, spec, more=more) as engine:
        yield engine


@pytest.fixture
async def control(engine: RealEngine) -> AsyncIterator[ControlClient]:
    async with await ControlClient.connect(engine.control) as control:
        yield control


async def test_versions_come_and_go_as_the_merged_models_and_the_base_stays(
    engine: RealEngine, control: ControlClient, folder: Path, tmp_path: Path
) -> None:
    import transformers  # noqa: PLC0415  # two seconds, which each worker of a lane would spend

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = logprobs(base, PROMPT)
    assert np.abs(await logprobs_of(engine, PROMPT) - wanted).max() < 1e-3
    adapter, first, second = Adapter(folder, torch.float32), trained(folder, 1), trained(folder, 2)
    versions = [WeightVersion("adapter", 1, number) for number in range(2)]
    before = state(adapter, first)
    write_bundle(tmp_path / "0", versions[0], before)
    write_bundle(tmp_path / "1", versions[1], state(adapter, second), (versions[0], before))
    found = []
    for number, model in enumerate((first, second)):
        staged = await control.stage(tmp_path / str(number))
        committed = await control.commit(staged.version)
        attested = await control.attest()
        assert attested.version == str(versions[number])
        assert attested.digest == committed.digest == staged.digest
        merged = logprobs(model.merge_and_unload(), PROMPT)
        found.append(await logprobs_of(engine, PROMPT))
        assert np.abs(found[-1] - merged).max() < 1e-3
        assert np.abs(found[-1] - wanted).max() > 0.05  # the base alone would say something else
    assert np.abs(found[0] - found[1]).max() > 0.05


async def test_a_factor_of_rslora_is_the_versions_own(
    engine: RealEngine, control: ControlClient, folder: Path, tmp_path: Path
) -> None:
    model = trained(folder, 3, use_rslora=True)
    version, adapter = WeightVersion("rs", 1, 0), Adapter(folder, torch.float32)
    write_bundle(tmp_path / "b", version, state(adapter, model))
    await control.commit((await control.stage(tmp_path / "b")).version)
    wanted = logprobs(model.merge_and_unload(), PROMPT)
    assert np.abs(await logprobs_of(engine, PROMPT) - wanted).max() < 1e-3


async def test_an_engine_follows_a_trainer_through_the_store(
    engine: RealEngine, control: ControlClient, folder: Path, tmp_path: Path
) -> None:
    server, service = Server(token="t"), WeightService(Store(tmp_path / "store"))
    service.bind(server)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    adapter, model = Adapter(folder, torch.float32), trained(folder, 6)
    layer = model.base_model.model.model.layers[1].mlp.up_proj

    def train() -> None:
        with Publisher(address, "lora", token="t") as publisher:
            publisher.publish(1, adapter.tensors(model))
            with torch.no_grad():
                layer.lora_B["default"].weight[:40].add_(0.5)
            publisher.wait(publisher.publish(2, adapter.tensors(model)))

    async with WeightsClient(address, token="t", holder="engine") as client:
        await asyncio.to_thread(train)
        whole = await client.pull("lora", tmp_path / "whole")
        assert (
            sum(block.size for block in whole.blocks)
            < 4
            * sum(
                parameter.numel()
                for name, parameter in model.named_parameters()
                if ".lora_" in name
            )
            + 1000
        )
        staged = await control.stage(tmp_path / "whole")
        await control.commit(staged.version)
    attested = await control.attest()
    assert (attested.version, attested.digest) == (str(whole.target), whole.digest)
    await server.stop()
    await service.close()
    wanted = logprobs(model.merge_and_unload(), PROMPT)
    assert np.abs(await logprobs_of(engine, PROMPT) - wanted).max() < 1e-3


async def test_turns_carry_the_adapters_version(
    engine: RealEngine, control: ControlClient, folder: Path, tmp_path: Path
) -> None:
    version = WeightVersion("turns", 1, 0)
    write_bundle(tmp_path / "b", version, state(Adapter(folder, torch.float32), trained(folder, 4)))
    await control.commit((await control.stage(tmp_path / "b")).version)
    async with TurnClient(engine.url) as client:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        events = [event async for event in client.stream(PROMPT, sampling)]
    assert {span.version for span in events[-1].spans} == {str(version)}


async def test_another_base_and_another_rank_are_refused_before_anything_is_written(
    engine: RealEngine, control: ControlClient, folder: Path, tmp_path: Path
) -> None:
    good = state(Adapter(folder, torch.float32), trained(folder, 5))
    before = (await control.attest()).digest
    other = {**good, BASE: StoredTensor("I64", (2,), good[BASE].bits ^ np.uint64(1))}
    write_bundle(tmp_path / "base", WeightVersion("other", 1, 0), other)
    with pytest.raises(CommitRefused, match="for the base with digest"):
        await control.stage(tmp_path / "base")
    name = next(name for name in good if ".lora_A." in name)
    dtype, (rank, width), bits = good[name]
    small = {**good, name: StoredTensor(dtype, (rank - 1, width), bits[: (rank - 1) * width])}
    write_bundle(tmp_path / "rank", WeightVersion("other", 1, 0), small)
    with pytest.raises(CommitRefused, match="Layout"):
        await control.stage(tmp_path / "rank")
    without = {key: one for key, one in good.items() if key != SCALE}
    write_bundle(tmp_path / "scale", WeightVersion("other", 1, 0), without)
    with pytest.raises(CommitRefused, match="Layout"):
        await control.stage(tmp_path / "scale")
    assert (await control.attest()).digest == before
