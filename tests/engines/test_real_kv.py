"""KV policies in a stock SGLang: what it says it had cached, and what it sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, successors
from rose_engines.sglang import kv
from rose_engines.sglang.client import Generation, SGLangClient
from rose_engines.sglang.control import Committed, ControlClient

pytestmark = pytest.mark.engine

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
FIRST, SECOND = (WeightVersion("kv", 1, number) for number in range(2))
GREEDY = {"temperature": 0, "ignore_eos": True}
STREAMS = 3
# Enough that every stream still runs at the commit; ranks that share cores are slow.
TOKENS = {1: 1000, 2: 250}


async def streams_across_a_commit(
    client: SGLangClient, control: ControlClient, tokens: int
) -> tuple[list[Generation], Committed]:
    """Some streams run, the staged version is committed, they run on."""
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> Generation:
        last = Generation("", ())
        async for last in client.stream(
            [104, *range(number + 1)], {**GREEDY, "max_new_tokens": tokens}
        ):
            if len(last.new_ids) == len(last.output_ids):
                begun.release()
        return last

    tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    for _ in tasks:
        await asyncio.wait_for(begun.acquire(), 120)
    committed = await control.commit(str(SECOND))
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 240)), committed


def check(reply: Generation, tokens: int) -> None:
    """No token is lost or doubled, and each follows the weights that its span names."""
    assert [span.version for span in reply.spans] == [str(FIRST), str(SECOND)]
    assert len(reply.output_ids) == len(reply.logprobs) == tokens
    cut, new = reply.spans[0].end, successors(OTHER)
    # The first token after the splice still depends on the prompt's last one alone.
    pairs = zip(reply.output_ids[cut - 1 :], reply.output_ids[cut:], strict=False)
    assert all(new[before] == after for before, after in pairs)


async def cached(client: SGLangClient, prompt: list[int], own: str) -> int:
    reply = await client.generate(prompt, {**GREEDY, "max_new_tokens": 1}, extra_key=own)
    return int(reply.meta["cached_tokens"])


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [*((policy, 1) for policy in kv.POLICIES), (kv.RECOMPUTE, 2)],
)
async def test_what_a_commit_does_to_cached_kv(tmp_path: Path, policy: str, ranks: int) -> None:
    spec = EngineSpec("test", PEAKED.name, kv_tokens=8192, max_running=4, kv_policy=policy)
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(PEAKED)))
    prompt = [5, *range(200)]
    with start_engine(tmp_path, spec=spec, version=str(FIRST), ranks=ranks) as engine:
        async with (
            SGLangClient(engine.url) as client,
            await ControlClient.connect(engine.control) as control,
        ):
            await control.stage(tmp_path / "b")
            assert await cached(client, prompt, "trajectory") == 0
            assert await cached(client, prompt, "trajectory") > 0
            replies, committed = await streams_across_a_commit(client, control, TOKENS[ranks])
            assert committed.fenced_requests == STREAMS
            for reply in replies:
                check(reply, TOKENS[ranks])
            recomputes = policy == kv.RECOMPUTE
            assert committed.retracted_requests == (STREAMS if recomputes else 0)
            assert (committed.recomputed_tokens > 0) is recomputes
            # A later turn of the trajectory, and one of another that has the same prompt.
            assert (await cached(client, prompt, "trajectory") > 0) is (policy == kv.REUSE)
            assert await cached(client, prompt, "another") == 0
