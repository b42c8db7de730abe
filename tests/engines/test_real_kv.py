"""KV policies in stock engines: what they say they had cached, and what they sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, successors
from rose_dev.vllm_testing import start_vllm
from rose_engines.kv import policy as kv_policy
from rose_engines.process.client import Generation, TurnClient
from rose_engines.weights.calls import Committed
from rose_engines.weights.control import ControlClient

SGLANG, VLLM = pytest.mark.engine, pytest.mark.vllm
Started = AbstractContextManager[RealEngine]

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
FIRST, SECOND = (WeightVersion("kv", 1, number) for number in range(2))
GREEDY = {"temperature": 0, "ignore_eos": True}
STREAMS = 3


async def streams_across_a_commit(
    client: TurnClient, control: ControlClient, tokens: int, pause: float
) -> tuple[list[Generation], Committed]:
    """Some streams run, the staged version is committed, they run on.

    Args:
        client, control: of one engine.
        tokens: of a stream, enough that each still runs at the commit.
        pause: seconds before each pass of the engine until then; 0 = none.
    """
    if pause:
        await client.slow_down(pause)
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> Generation:
        last = None
        async for event in client.stream(
            [104, *range(number + 1)], {**GREEDY, "max_new_tokens": tokens}
        ):
            if last is None:
                begun.release()
            last = event
        assert last is not None
        return last

    tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    for _ in tasks:
        await asyncio.wait_for(begun.acquire(), 120)
    committed = await control.commit(str(SECOND))
    if pause:
        await client.slow_down(None)
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 240)), committed


def check(reply: Generation, tokens: int) -> None:
    """No token is lost or doubled, and each follows the weights that its span names."""
    assert [span.version for span in reply.spans] == [str(FIRST), str(SECOND)]
    assert len(reply.output_ids) == len(reply.logprobs) == tokens
    cut, new = reply.spans[0].end, successors(OTHER)
    # The first token after the splice still depends on the prompt's last one alone.
    pairs = zip(reply.output_ids[cut - 1 :], reply.output_ids[cut:], strict=False)
    assert all(new[before] == after for before, after in pairs)


async def cached(client: TurnClient, prompt: list[int], own: str) -> int:
    reply = await client.generate(prompt, {**GREEDY, "max_new_tokens": 1}, extra_key=own)
    return int(reply.meta["cached_tokens"])


@pytest.mark.parametrize(
    ("policy", "started", "tokens", "pause"),
    [
        *(pytest.param(one, start_engine, 120, 0.05, marks=SGLANG) for one in kv_policy.POLICIES),
        # Ranks that share cores are slow.
        pytest.param(kv_policy.RECOMPUTE, partial(start_engine, ranks=2), 60, 0.1, marks=SGLANG),
        # ``Keep`` is what the shared engine of ``test_real_engine`` does; vLLM cannot be slowed.
        *(
            pytest.param(one, start_vllm, 1000, 0, marks=VLLM)
            for one in (kv_policy.RECOMPUTE, kv_policy.REUSE)
        ),
    ],
)
async def test_what_a_commit_does_to_cached_kv(
    tmp_path: Path, policy: str, started: Callable[..., Started], tokens: int, pause: float
) -> None:
    spec = EngineSpec("test", PEAKED.name, kv_tokens=8192, max_running=4, kv_policy=policy)
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(PEAKED)))
    prompt = [5, *range(256)]  # vLLM keeps whole blocks of 128
    with started(tmp_path, spec=spec, version=str(FIRST)) as engine:
        async with (
            TurnClient(engine.url) as client,
            await ControlClient.connect(engine.control) as control,
        ):
            await control.stage(tmp_path / "b")
            assert await cached(client, prompt, "trajectory") == 0
            assert await cached(client, prompt, "trajectory") > 0
            replies, committed = await streams_across_a_commit(client, control, tokens, pause)
            assert committed.fenced_requests == STREAMS
            for reply in replies:
                check(reply, tokens)
            recomputes = policy == kv_policy.RECOMPUTE
            assert committed.retracted_requests == (STREAMS if recomputes else 0)
            assert (committed.recomputed_tokens > 0) is recomputes
            # A later turn of the trajectory, and one of another that has the same prompt.
            assert (await cached(client, prompt, "trajectory") > 0) is (policy == kv_policy.REUSE)
            assert await cached(client, prompt, "another") == 0
