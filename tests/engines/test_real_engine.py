"""Stock engines with the plugin: permit, staging, commit, attestation, log-probs, memory.

Both kinds keep the same promises. What one does alone is at the end: SGLang's log tells the sizes
of its prefill chunks, and vLLM refuses what SGLang would sample differently.
"""

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_core.rollouts.requests.logprobs import SCALE
from rose_dev.engine_testing import RealEngine, State, state_of, write_bundle
from rose_dev.models import RECIPES, make_model, successors
from rose_dev.waiting import until
from rose_engines.errors import CommitRefused, EngineRefused
from rose_engines.process.client import Generation, TurnClient
from rose_engines.tensors.safetensors import read_file
from rose_engines.weights.control import ControlClient

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
GREEDY = {"temperature": 0, "ignore_eos": True}
_sequence = itertools.count()


def next_version() -> WeightVersion:
    return WeightVersion("real", int(time.time()), next(_sequence))


# BF16 against 32 bits, of a model with 8 bits of mantissa.
CLOSE = 0.06


SGLANG = pytest.param("real_engine", id="sglang", marks=pytest.mark.engine)
VLLM = pytest.param("vllm_engine", id="vllm", marks=pytest.mark.vllm)


@pytest.fixture(params=[SGLANG, VLLM])
def engine(request: pytest.FixtureRequest) -> RealEngine:
    started: RealEngine = request.getfixturevalue(request.param)
    return started


@dataclass(frozen=True)
class Stream:
    """What outlives whatever is done to its engine meanwhile.

    Attributes:
        tokens: of it.
        pause: seconds before each pass of the engine; 0 = none.
    """

    tokens: int
    pause: float

    @asynccontextmanager
    async def slowed(self, client: TurnClient) -> AsyncIterator[None]:
        """Passes are slow inside."""
        if not self.pause:
            yield
            return
        await client.slow_down(self.pause)
        try:
            yield
        finally:
            await client.slow_down(None)


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> Stream:
    """Of the engine's kind: vLLM cannot be slowed."""
    return Stream(1500, 0) if "vllm" in request.node.callspec.id else Stream(120, 0.03)


@pytest.fixture
async def client(engine: RealEngine) -> AsyncIterator[TurnClient]:
    async with TurnClient(engine.url) as client:
        yield client


@pytest.fixture
async def control(engine: RealEngine) -> AsyncIterator[ControlClient]:
    async with await ControlClient.connect(engine.control) as control:
        yield control


async def make_live(control: ControlClient, folder: Path, state: State) -> WeightVersion:
    """Commit a full state, whatever was live before."""
    version = next_version()
    write_bundle(folder, version, state)
    await control.stage(folder)
    await control.commit(str(version))
    return version


def nudged(state: State, share: float) -> State:
    """The state after a sparse optimizer step: some elements move to a neighbouring value."""
    draw = np.random.default_rng(3)
    moved = {}
    for name, (dtype, shape, bits) in state.items():
        chosen = draw.random(bits.size) < share
        moved[name] = StoredTensor(
            dtype, shape, np.where(chosen, bits ^ 1, bits).astype(bits.dtype)
        )
    return moved


async def exported(control: ControlClient, path: Path) -> State:
    await control.export(path)
    return dict(read_file(path))


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        left[name][:2] == right[name][:2] and np.array_equal(left[name][2], right[name][2])
        for name in left
    )


def cycle(recipe_successors: list[int], last: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        last = recipe_successors[last]
        tokens.append(last)
    return tokens


def reference(model: Path, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of every token but the first, by transformers in 32 bits."""
    import transformers  # noqa: PLC0415  # two seconds, which each worker of a lane would spend

    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = made(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    scores = logits.log_softmax(-1)
    return [float(scores[at, token]) for at, token in enumerate(ids[1:])]


async def test_closed_permit_stops_computing_within_one_iteration(
    engine: RealEngine,
    client: TurnClient,
    control: ControlClient,
    stream: Stream,
    tmp_path: Path,
) -> None:
    await make_live(control, tmp_path / "bundle", state_of(PEAKED))
    received: list[Generation] = []
    enough = asyncio.Event()

    async def read() -> None:
        sampling = {"max_new_tokens": stream.tokens, **GREEDY}
        async for event in client.stream([104], sampling, logprobs=False):
            received.append(event)
            if len(event.output_ids) > 20:
                enough.set()

    async with stream.slowed(client):
        reader = asyncio.create_task(read())
        try:
            await asyncio.wait_for(enough.wait(), 60)
            engine.holder.close()
            closed = await control.status()
            await asyncio.sleep(1.0)  # a running engine would make dozens of iterations
            later = await control.status()
            assert closed.permit_open is False
            assert later.resting
            assert later.iterations - closed.iterations <= 2
            assert not reader.done()
        finally:
            engine.holder.open()
    await asyncio.wait_for(reader, 120)
    assert list(received[-1].output_ids) == cycle(successors(PEAKED), 104, stream.tokens)


async def test_delta_arrives_bit_for_bit_and_is_attested(
    control: ControlClient, tmp_path: Path
) -> None:
    old = state_of(PEAKED)
    new = nudged(old, 0.02)
    base = await make_live(control, tmp_path / "base", old)
    version = next_version()
    manifest = write_bundle(tmp_path / "delta", version, new, (base, old))

    staged = await control.stage(tmp_path / "delta")
    assert 0 < staged.changed_elements < manifest.elements // 20
    committed = await control.commit(str(version))

    assert committed.digest == manifest.digest
    assert (await control.attest()).digest == manifest.digest
    assert (await control.status()).version == str(version)
    assert same(await exported(control, tmp_path / "live.safetensors"), new)


async def test_a_commit_computes_what_a_fresh_load_would(
    control: ControlClient, client: TurnClient, tmp_path: Path
) -> None:
    """As the model that the tensors make: fused parameters hold every part."""
    version = await make_live(control, tmp_path / "other", state_of(OTHER))
    prompt = [104, 101, 7, 250, 33, 9]
    by, result = await client.prompt_logprobs(prompt)
    assert by == str(version)
    assert result == pytest.approx(reference(make_model(OTHER), prompt), abs=CLOSE)


async def test_refusals_leave_the_old_version_serving(
    control: ControlClient, client: TurnClient, tmp_path: Path
) -> None:
    old = state_of(PEAKED)
    base = await make_live(control, tmp_path / "base", old)
    new = nudged(old, 0.02)

    write_bundle(tmp_path / "wrong-base", next_version(), old, (base, new))
    with pytest.raises(CommitRefused, match="WrongBase"):
        await control.stage(tmp_path / "wrong-base")

    write_bundle(tmp_path / "flipped", next_version(), new, (base, old))
    block = next((tmp_path / "flipped" / "blocks").iterdir())
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(bytes(data))
    with pytest.raises(CommitRefused, match="Corrupt"):
        await control.stage(tmp_path / "flipped")

    shape = replace(PEAKED, hidden=64)
    write_bundle(tmp_path / "shape", next_version(), state_of(shape))
    with pytest.raises(CommitRefused, match=r"Layout.*model\.embed_tokens\.weight"):
        await control.stage(tmp_path / "shape")

    with pytest.raises(CommitRefused, match="NotStaged"):
        await control.commit("real@0.99")
    assert same(await exported(control, tmp_path / "live.safetensors"), old)
    reply = await client.generate([104], {"max_new_tokens": 8, **GREEDY})
    assert [span.version for span in reply.spans] == [str(base)]
    assert list(reply.output_ids) == cycle(successors(PEAKED), 104, 8)


async def test_generation_goes_on_across_a_commit_with_true_spans_and_no_old_keys(
    control: ControlClient, client: TurnClient, stream: Stream, tmp_path: Path
) -> None:
    """Each token follows the weights that its span names: the two have different successors."""
    first = await make_live(control, tmp_path / "first", state_of(PEAKED))
    second = next_version()
    write_bundle(tmp_path / "second", second, state_of(OTHER))
    await control.stage(tmp_path / "second")
    prompt = [5, *range(2, 250), *range(2, 50)]
    once = {"max_new_tokens": 1, **GREEDY}
    assert (await client.generate(prompt, once)).meta["cached_tokens"] == 0
    assert (await client.generate(prompt, once)).meta["cached_tokens"] >= 128

    count, fenced, reply = stream.tokens, 0, Generation("", ())
    async with stream.slowed(client):
        async for reply in client.stream([104], {"max_new_tokens": count, **GREEDY}):  # noqa: B007
            if not fenced:
                fenced = (await control.commit(str(second))).fenced_requests
    assert fenced == 1
    assert [span.version for span in reply.spans] == [str(first), str(second)]
    cut = reply.spans[0].end
    assert (reply.spans[0].start, reply.spans[1].start, reply.spans[1].end) == (0, cut, count)
    before = cycle(successors(PEAKED), 104, cut)
    assert list(reply.output_ids) == before + cycle(successors(OTHER), before[-1], count - cut)
    assert len(reply.logprobs) == count
    # KV of the old weights is not reused: neither prompt finds anything.
    for again in (prompt, [104, *reply.output_ids[:cut]][:500]):
        assert (await client.generate(again, once)).meta["cached_tokens"] == 0


async def test_a_commit_waits_for_an_open_permit_and_an_idle_engine_is_woken_by_it(
    engine: RealEngine, control: ControlClient, tmp_path: Path
) -> None:
    version = next_version()
    write_bundle(tmp_path / "bundle", version, state_of(OTHER))
    await control.stage(tmp_path / "bundle")
    engine.holder.close()
    try:
        with pytest.raises(CommitRefused, match="Busy"):
            await control.commit(str(version), timeout_seconds=1.0)
        assert (await control.status()).staged == str(version)
        waiting = asyncio.create_task(control.commit(str(version), timeout_seconds=60.0))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    finally:
        engine.holder.open()
    assert (await asyncio.wait_for(waiting, 60)).version == str(version)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        # Of what is sampled from before tokens are dropped, as SGLang's are.
        {"temperature": 2.0, "top_k": 3, "top_p": 0.8},
    ],
)
async def test_log_probs_are_of_the_logits_over_the_temperature_before_any_filter(
    control: ControlClient, client: TurnClient, tmp_path: Path, sampling: dict[str, float]
) -> None:
    await make_live(control, tmp_path / "base", state_of(PEAKED))
    prompt = [104, 101, 7]
    reply = await client.generate(prompt, {"max_new_tokens": 24, "ignore_eos": True, **sampling})
    assert reply.meta[SCALE] == "temperature"
    ids = [*prompt, *reply.output_ids]
    wanted = reference(make_model(PEAKED), ids, sampling["temperature"])[len(prompt) - 1 :]
    assert list(reply.logprobs) == pytest.approx(wanted, abs=CLOSE)


async def test_memory_is_given_back_and_taken_back_with_the_weights_of_the_folder(
    engine: RealEngine, control: ControlClient, client: TurnClient, tmp_path: Path
) -> None:
    """Every request ends, nothing is computed meanwhile, and the digest says what came back."""
    await make_live(control, tmp_path / "other", state_of(OTHER))
    core = (await control.status()).pid
    held = psutil.Process(core).memory_info().rss
    stream = client.stream([104], {"max_new_tokens": 4000, **GREEDY})
    await anext(stream)
    released = await control.release()
    left = [event async for event in stream]
    assert left[-1].finish_reason is not None
    assert left[-1].finish_reason["type"] == "abort"
    assert released.claimed_bytes > 0
    assert psutil.Process(core).memory_info().rss < held - released.claimed_bytes // 2
    assert (await control.status()).phase == "Dormant"
    active = await control.activate()
    assert active.version == "base"
    assert active.digest == (await control.attest()).digest
    assert same(await exported(control, tmp_path / "live"), state_of(PEAKED))
    reply = await client.generate([104], {"max_new_tokens": 8, **GREEDY})
    assert list(reply.output_ids) == cycle(successors(PEAKED), 104, 8)
    assert os.getpgid(core) == engine.process.pid


@pytest.mark.parametrize("engine", [SGLANG], indirect=True)
async def test_the_next_prefill_is_cut_as_the_permit_says(
    engine: RealEngine, client: TurnClient
) -> None:
    log = engine.folder / "engine.log"

    async def chunks() -> list[int]:
        """Tokens of each prefill batch of one long prompt that no cache knows."""
        begun = log.stat().st_size
        prompt = [2 + (next(_sequence) * 7 + 31 * n) % 250 for n in range(400)]
        await client.generate(prompt, GREEDY | {"max_new_tokens": 1})

        def reported() -> list[int]:
            text = log.read_bytes()[begun:].decode()
            return [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", text)]

        await until(lambda: sum(reported()) >= len(prompt))  # its log may be behind its answer
        return reported()

    permit = engine.holder.permit
    whole = await chunks()
    permit.divide_chunks(4)
    try:
        short = await chunks()
    finally:
        permit.divide_chunks(1)
    assert sum(whole) == sum(short) == 400
    assert max(short) <= 512 // 4 < max(whole)
    assert max(await chunks()) == max(whole), "and whole again"


@pytest.mark.parametrize("engine", [VLLM], indirect=True)
async def test_what_sglang_would_sample_differently_is_refused_by_name(
    client: TurnClient,
) -> None:
    with pytest.raises(EngineRefused, match="repetition_penalty") as refused:
        await client.generate([104], {"max_new_tokens": 2, "repetition_penalty": 1.2})
    assert refused.value.status == 400
    with pytest.raises(EngineRefused, match="vocab"):
        await client.generate([1 << 20], {"max_new_tokens": 2})
    assert await client.ready()
