"""Stock SGLang over two ranks: each holds its slices, both change at one iteration boundary."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, successors
from rose_engines.errors import CommitRefused
from rose_engines.process.client import Generation, TurnClient
from rose_engines.weights.control import ControlClient

pytestmark = pytest.mark.engine

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
GREEDY = {"temperature": 0, "ignore_eos": True}
V1, V2, V3 = (WeightVersion("ranks", 1, n) for n in (1, 2, 3))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    with start_engine(tmp_path_factory.mktemp("ranks"), ranks=2) as started:
        yield started


def follows(tokens: list[int], last: int, step: list[int]) -> bool:
    for token in tokens:
        if token != step[last]:
            return False
        last = token
    return True


async def test_two_ranks_commit_at_one_boundary_and_hold_what_was_published(
    engine: RealEngine, tmp_path: Path
) -> None:
    """Tokens before and after the switch follow their version: no step mixed the two."""
    old, other = state_of(PEAKED), state_of(OTHER)
    draw = np.random.default_rng(3)
    sparse = {
        name: StoredTensor(dtype, shape, np.where(draw.random(bits.size) < 0.02, bits ^ 1, bits))
        for name, (dtype, shape, bits) in other.items()
    }
    write_bundle(tmp_path / "1", V1, old)
    manifest = write_bundle(tmp_path / "2", V2, other, (V1, old))
    last = write_bundle(tmp_path / "3", V3, sparse, (V2, other))
    async with (
        TurnClient(engine.url) as client,
        await ControlClient.connect(engine.control) as control,
        await ControlClient.connect(engine.control.with_name("plugin.1")) as member,
    ):
        await control.stage(tmp_path / "1")
        await control.commit(str(V1))
        staged = await control.stage(tmp_path / "2")
        assert staged.base == write_bundle(tmp_path / "again", V1, old).digest
        count, fenced, reply = 60, 0, Generation("", ())
        await client.slow_down(0.1)  # so that the commit comes before the end
        async for reply in client.stream([104], {"max_new_tokens": count, **GREEDY}):  # noqa: B007
            if not fenced:
                fenced = (await control.commit(str(V2))).fenced_requests
                await client.slow_down(None)
        assert fenced == 1
        assert [span.version for span in reply.spans] == [str(V1), str(V2)]
        tokens, cut = list(reply.output_ids), reply.spans[0].end
        assert len(tokens) == count
        assert follows(tokens[:cut], 104, successors(PEAKED))
        assert follows(tokens[cut:], tokens[cut - 1], successors(OTHER))
        assert (await control.attest()).digest == manifest.digest

        await control.stage(tmp_path / "3")
        assert (await control.commit(str(V3))).digest == last.digest  # an idle engine too
        assert (await control.attest()).digest == last.digest
        leader, other_rank = await control.status(), await member.status()
        assert (other_rank.version, other_rank.digest) == (leader.version, leader.digest)
        assert (other_rank.rank, other_rank.commits) == (1, leader.commits)
        with pytest.raises(CommitRefused, match="NotLeader"):
            await member.commit(str(V3))


def cpu_seconds(engine: RealEngine) -> list[float]:
    """Time of a core that each process of the engine has used, by process."""
    tree = [psutil.Process(engine.process.pid)]
    tree += sorted(tree[0].children(recursive=True), key=lambda process: process.pid)
    return [sum(process.cpu_times()[:2]) for process in tree]


async def used_in(engine: RealEngine, seconds: float) -> list[float]:
    """Time of a core that each process uses in a while."""
    before = cpu_seconds(engine)
    await asyncio.sleep(seconds)
    return [used - began for began, used in zip(before, cpu_seconds(engine), strict=True)]


async def test_both_ranks_stop_at_a_closed_permit_and_none_spins_in_a_collective(
    engine: RealEngine,
) -> None:
    """The leader waits for the permit, the member for the leader; both go on at one boundary."""
    seen, more = 0, asyncio.Event()

    async def read(client: TurnClient) -> None:
        nonlocal seen
        async for _ in client.stream([104], {"max_new_tokens": 1500, **GREEDY}):
            seen += 1
            more.set()

    async def more_than(count: int) -> None:
        async with asyncio.timeout(60):
            while seen <= count:
                more.clear()
                await more.wait()

    async with TurnClient(engine.url) as client:
        reading = asyncio.create_task(read(client))
        await more_than(20)
        computing = await used_in(engine, 2.0)
        engine.holder.close()
        try:
            await asyncio.sleep(1.0)  # what was computing ends with its iteration
            stopped = seen
            waiting = await used_in(engine, 2.0)
            assert seen == stopped
        finally:
            engine.holder.open()
        await more_than(stopped)
        await client.abort_all()
        await reading
    assert stopped < 1500
    busy = [n for n, used in enumerate(computing) if used > 0.1 * max(computing)]
    assert len(busy) >= 2, "both ranks compute"
    for n in busy:  # who spins uses at least as much as who computes
        assert waiting[n] < 0.5 * computing[n]


async def test_a_rank_whose_part_is_damaged_keeps_the_old_version_everywhere(
    engine: RealEngine, tmp_path: Path
) -> None:
    old = state_of(PEAKED)
    version = WeightVersion("ranks", int(time.time()), 0)
    write_bundle(tmp_path / "b", version, old)
    async with await ControlClient.connect(engine.control) as control:
        before = await control.status()
        for block in (tmp_path / "b" / "blocks").iterdir():
            block.write_bytes(block.read_bytes()[:-1])
        with pytest.raises(CommitRefused, match="Corrupt"):
            await control.stage(tmp_path / "b")
        engine.holder.close()
        try:
            write_bundle(tmp_path / "c", version, old)
            await control.stage(tmp_path / "c")
            with pytest.raises(CommitRefused, match="Busy"):
                await control.commit(str(version), timeout_seconds=0.5)
        finally:
            engine.holder.open()
        await asyncio.sleep(0.2)
        assert (await control.status()).version == before.version
        assert (await control.attest()).digest == before.digest
        assert (await control.commit(str(version))).version == str(version)
