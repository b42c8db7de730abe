"""Stock SGLang with the plugin: permit, staging, commit, attestation, on live weights."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, State, state_of, write_bundle
from rose_dev.models import RECIPES, successors
from rose_dev.waiting import until
from rose_engines.errors import CommitRefused
from rose_engines.safetensors import read_file
from rose_engines.sglang.client import Generation, SGLangClient
from rose_engines.sglang.control import ControlClient

pytestmark = pytest.mark.engine

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
GREEDY = {"temperature": 0, "ignore_eos": True}
_sequence = itertools.count()


def next_version() -> WeightVersion:
    return WeightVersion("real", int(time.time()), next(_sequence))


@pytest.fixture
async def client(real_engine: RealEngine) -> AsyncIterator[SGLangClient]:
    async with SGLangClient(real_engine.url) as client:
        yield client


@pytest.fixture
async def control(real_engine: RealEngine) -> AsyncIterator[ControlClient]:
    async with await ControlClient.connect(real_engine.control) as control:
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
        moved[name] = (dtype, shape, np.where(chosen, bits ^ 1, bits).astype(bits.dtype))
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


async def test_closed_permit_stops_computing_within_one_iteration(
    real_engine: RealEngine, client: SGLangClient, control: ControlClient, tmp_path: Path
) -> None:
    await make_live(control, tmp_path / "bundle", state_of(PEAKED))
    received: list[Generation] = []
    enough = asyncio.Event()

    async def read() -> None:
        sampling = {"max_new_tokens": 1000, **GREEDY}
        async for event in client.stream([104], sampling, logprobs=False):
            received.append(event)
            if len(event.output_ids) > 20:
                enough.set()

    reader = asyncio.create_task(read())
    try:
        await asyncio.wait_for(enough.wait(), 60)
        real_engine.holder.close()
        closed = await control.status()
        await asyncio.sleep(1.0)  # a running engine would make hundreds of iterations
        later = await control.status()
        assert closed.permit_open is False
        assert later.iterations - closed.iterations <= 2
        assert not reader.done()
    finally:
        real_engine.holder.open()
    await asyncio.wait_for(reader, 120)
    assert list(received[-1].output_ids) == cycle(successors(PEAKED), 104, 1000)


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


async def test_refusals_leave_the_old_version_serving(
    control: ControlClient, client: SGLangClient, tmp_path: Path
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


async def test_generation_goes_on_across_a_commit_with_true_spans(
    control: ControlClient, client: SGLangClient, tmp_path: Path
) -> None:
    """Each token follows the weights that its span names: the two have different successors."""
    first = await make_live(control, tmp_path / "first", state_of(PEAKED))
    second = next_version()
    write_bundle(tmp_path / "second", second, state_of(OTHER))
    await control.stage(tmp_path / "second")

    count, fenced, reply = 1500, 0, Generation("", ())
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

    # KV of the old weights is not reused: the same prompt starts from nothing.
    prompt = [104, *reply.output_ids[:cut]][:500]
    again = await client.generate(prompt, {"max_new_tokens": 1, **GREEDY})
    assert again.meta["cached_tokens"] == 0


async def test_the_next_prefill_is_cut_as_the_permit_says(
    real_engine: RealEngine, client: SGLangClient
) -> None:
    log = real_engine.folder / "engine.log"

    async def chunks() -> list[int]:
        """Tokens of each prefill batch of one long prompt that no cache knows."""
        begun = log.stat().st_size
        prompt = [2 + (next(_sequence) * 7 + 31 * n) % 250 for n in range(400)]
        await client.generate(prompt, GREEDY | {"max_new_tokens": 1})

        def told() -> list[int]:
            text = log.read_bytes()[begun:].decode()
            return [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", text)]

        await until(lambda: sum(told()) >= len(prompt))  # its log may be behind its answer
        return told()

    permit = real_engine.holder.permit
    whole = await chunks()
    permit.divide_chunks(4)
    try:
        short = await chunks()
    finally:
        permit.divide_chunks(1)
    assert sum(whole) == sum(short) == 400
    assert max(short) <= 512 // 4 < max(whole)
    assert max(await chunks()) == max(whole), "and whole again"


async def test_commit_waits_for_an_open_permit(
    real_engine: RealEngine, control: ControlClient, tmp_path: Path
) -> None:
    version = next_version()
    write_bundle(tmp_path / "bundle", version, state_of(OTHER))
    await control.stage(tmp_path / "bundle")
    real_engine.holder.close()
    try:
        with pytest.raises(CommitRefused, match="Busy"):
            await control.commit(str(version), timeout_seconds=1.0)
        assert (await control.status()).staged == str(version)
    finally:
        real_engine.holder.open()
    assert (await control.commit(str(version))).version == str(version)
