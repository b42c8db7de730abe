"""Eight runs on one engine of stock SGLang: each its own versions, and none of another's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_core.adapters import BASE, SCALE, TARGETS
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import BASE_LABEL, WeightVersion
from rose_core.wire.sync import AdapterSpec, EngineSpec
from rose_dev.engine_testing import RealEngine, State, start_engine, write_bundle
from rose_engines.errors import CommitRefused, EngineError
from rose_engines.process.client import Generation, TurnClient
from rose_engines.weights.calls import Status
from rose_engines.weights.control import ControlClient
from rose_trainer.lora import Adapter
from tests.engines.adapter_models import RANK, logprobs, logprobs_of, make_base, state, trained

pytestmark = [
    pytest.mark.engine,
    # PEFT asks transformers by a name that transformers calls old.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

SLOTS = 8
RUNS = [f"run-{number}" for number in range(SLOTS)]
PROMPT = list(b"eight runs, one base")
GREEDY = {"temperature": 0, "ignore_eos": True}
SPEC = EngineSpec(
    "test",
    "tiny32",
    kv_tokens=16384,
    max_running=SLOTS,
    adapter=AdapterSpec(RANK, TARGETS, SLOTS),
)


@dataclass
class Trained:
    """What was published of each run."""

    folder: Path
    engine: RealEngine
    models: dict[str, Any] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    versions: dict[str, WeightVersion] = field(default_factory=dict)

    async def publish(self, run: str, seed: int, into: Path) -> str:
        """Bring a run's next version to the engine, as weight-sync does; its attested digest."""
        model = trained(self.folder, seed)
        before = self.versions.get(run)
        version = WeightVersion(run, 1, before.sequence + 1 if before else 0)
        bits = state(Adapter(self.folder, torch.float32), model)
        base = (before, self.states[run]) if before else None
        write_bundle(into / str(version), version, bits, base)
        async with await ControlClient.connect(self.engine.control, run) as control:
            await control.bind(run, first=run == RUNS[0])
            staged = await control.stage(into / str(version))
            committed = await control.commit(staged.version)
            attested = await control.attest()
        assert (attested.version, attested.digest) == (str(version), staged.digest)
        assert committed.digest == attested.digest
        self.models[run] = model.merge_and_unload()
        self.states[run], self.versions[run] = bits, version
        return attested.digest

    def check(self, run: str, done: Generation, model: Any = None) -> None:  # noqa: ANN401
        """Its log-probs are those of the merged model, token by token."""
        wanted = logprobs(model or self.models[run], [*PROMPT, *done.output_ids])
        assert done.logprobs
        assert np.abs(wanted[len(PROMPT) - 1 :] - np.array(done.logprobs)).max() < 1e-3


async def turn(engine: RealEngine, key: str, tokens: int = 24) -> Generation:
    async with TurnClient(engine.url) as client:
        return await client.generate(PROMPT, {**GREEDY, "max_new_tokens": tokens}, extra_key=key)


async def refused(engine: RealEngine, key: str) -> bool:
    """Whether the engine says that it has no adapter of that run, and samples nothing."""
    finish = (done := await turn(engine, key)).finish_reason or {}
    text = str(finish.get("message"))
    return not done.output_ids and finish.get("status_code") == 503 and "no adapter of run" in text


async def unbound(control: ControlClient, run: str) -> Status:
    """Ask until its last request has ended."""
    for _ in range(50):
        try:
            return await control.unbind(run)
        except CommitRefused as refused:
            if refused.reason != "Busy":
                raise
        await asyncio.sleep(0.1)
    raise AssertionError(run)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = make_base(tmp_path_factory.mktemp("model"))
    more = ["--dtype", "float32"]
    with start_engine(tmp_path_factory.mktemp("engine"), folder, SPEC, more=more) as engine:
        made = Trained(folder, engine)
        into = tmp_path_factory.mktemp("bundles")
        for seed, run in enumerate(RUNS, 1):
            asyncio.run(made.publish(run, seed, into))
        yield made


@pytest.fixture
async def control(shared: Trained) -> AsyncIterator[ControlClient]:
    async with await ControlClient.connect(shared.engine.control) as control:
        yield control


async def test_turns_of_eight_runs_at_once_are_each_their_own_merged_model(shared: Trained) -> None:
    done = await asyncio.gather(*(turn(shared.engine, str(shared.versions[run])) for run in RUNS))
    for run, one in zip(RUNS, done, strict=True):
        shared.check(run, one)
        assert {span.version for span in one.spans} == {str(shared.versions[run])}
    assert len({one.logprobs for one in done}) == SLOTS  # no two of them are the same model


async def test_each_run_is_attested_by_itself(shared: Trained) -> None:
    digests = set()
    for run in RUNS:
        async with await ControlClient.connect(shared.engine.control, run) as control:
            attested = await control.attest()
            assert attested.version == str(shared.versions[run])
            digests.add(attested.digest)
    assert len(digests) == SLOTS


async def test_a_run_takes_the_memory_of_its_adapter(
    shared: Trained, control: ControlClient
) -> None:
    status = await control.status()
    assert sorted(status.runs) == RUNS
    own = sum(
        bits.nbytes
        for name, (_, _, bits) in shared.states["run-0"].items()
        if name not in {BASE, SCALE}
    )
    assert own <= status.adapter_bytes <= 1.05 * own


async def test_publishing_to_one_run_leaves_turns_and_caches_of_the_others_alone(
    shared: Trained, tmp_path: Path
) -> None:
    first, rest = RUNS[0], RUNS[1:]
    before = {run: str(shared.versions[run]) for run in RUNS}
    old = shared.models[first]
    warm = await turn(shared.engine, before[rest[0]], 1)
    assert warm.meta["prompt_tokens"] == len(PROMPT)
    running = [asyncio.create_task(turn(shared.engine, before[run], 160)) for run in (first, *rest)]
    await asyncio.sleep(0.5)
    await shared.publish(first, 101, tmp_path)
    done = await asyncio.gather(*running)
    for run, one in zip(rest, done[1:], strict=True):
        assert [span.version for span in one.spans] == [before[run]]
        shared.check(run, one)
    spans = done[0].spans
    assert [span.version for span in spans] in (
        [before[first], str(shared.versions[first])],
        [before[first]],
    )
    held = spans[0].end
    wanted = logprobs(old, [*PROMPT, *done[0].output_ids[:held]])[len(PROMPT) - 1 :]
    assert np.abs(wanted - np.array(done[0].logprobs[:held])).max() < 1e-3
    again = await turn(shared.engine, before[rest[0]], 1)
    assert again.meta["cached_tokens"] >= len(PROMPT) - 1  # its keys are still there
    fresh = await turn(shared.engine, str(shared.versions[first]))
    assert fresh.meta["cached_tokens"] == 0  # and none of the old version's are used
    shared.check(first, fresh)


async def test_a_run_goes_and_another_comes_while_the_others_run(
    shared: Trained, control: ControlClient, tmp_path: Path
) -> None:
    gone = RUNS[-1]
    with pytest.raises(CommitRefused, match="no slot is left"):
        await control.bind("run-new")
    stays = asyncio.create_task(turn(shared.engine, str(shared.versions[RUNS[1]]), 120))
    cut = asyncio.create_task(turn(shared.engine, str(shared.versions[gone]), 4000))
    await asyncio.sleep(1.0)
    status = await unbound(control, gone)
    assert gone not in status.runs
    ended = await cut
    assert ended.finish_reason is not None
    assert ended.finish_reason["type"] == "abort"
    shared.check(gone, ended)
    assert {span.version for span in ended.spans} == {str(shared.versions[gone])}
    assert await refused(shared.engine, str(shared.versions[gone]))
    import transformers  # noqa: PLC0415  # two seconds, which each worker of a lane would spend

    base = transformers.AutoModelForCausalLM.from_pretrained(shared.folder, dtype=torch.float32)
    await control.bind("run-new")
    alone = await turn(shared.engine, "run-new@0.0")
    shared.check("run-new", alone, base)  # nothing is left of who had the slot
    assert [span.version for span in alone.spans] == [BASE_LABEL]
    await shared.publish("run-new", 102, tmp_path)
    shared.check("run-new", await turn(shared.engine, str(shared.versions["run-new"])))
    shared.check(RUNS[1], await stays)
    await unbound(control, "run-new")
    del shared.versions[gone], shared.states[gone]
    await shared.publish(gone, SLOTS, tmp_path)


async def test_a_bundle_of_another_run_and_another_rank_are_refused(
    shared: Trained, tmp_path: Path
) -> None:
    bits = shared.states["run-1"]
    write_bundle(tmp_path / "b", WeightVersion("run-1", 1, 7), bits)
    async with await ControlClient.connect(shared.engine.control, "run-2") as control:
        with pytest.raises(CommitRefused, match="is no version of run run-2"):
            await control.stage(tmp_path / "b")
        name = next(name for name in bits if ".lora_A." in name)
        dtype, (rank, width), flat = bits[name]
        small = {**bits, name: StoredTensor(dtype, (rank - 1, width), flat[: (rank - 1) * width])}
        write_bundle(tmp_path / "rank", WeightVersion("run-2", 1, 7), small)
        with pytest.raises(CommitRefused, match="Layout"):
            await control.stage(tmp_path / "rank")
    async with await ControlClient.connect(shared.engine.control, "run-unknown") as control:
        with pytest.raises(CommitRefused, match="bind it first"):
            await control.stage(tmp_path / "b")


async def test_who_names_no_run_gets_the_first_slots(shared: Trained) -> None:
    wanted = logprobs(shared.models[RUNS[0]], PROMPT)
    assert np.abs(await logprobs_of(shared.engine, PROMPT) - wanted).max() < 1e-3


async def test_an_engine_that_was_killed_has_no_adapters_until_they_come_again(
    shared: Trained, tmp_path: Path
) -> None:
    """The last of this file: the engine that the others share ends here."""
    key = str(shared.versions["run-1"])
    cut = asyncio.create_task(turn(shared.engine, key, 4000))
    await asyncio.sleep(1.0)
    os.killpg(shared.engine.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await cut
    more = ["--dtype", "float32"]
    with start_engine(tmp_path, shared.folder, SPEC, more=more) as engine:
        async with await ControlClient.connect(engine.control) as control:
            assert not (await control.status()).runs
        assert await refused(engine, key)
        made = Trained(shared.folder, engine)
        await made.publish("run-1", 1, tmp_path)
        made.check("run-1", await turn(engine, str(made.versions["run-1"])))
