"""A stock SGLang that loads patched checkpoints, as one does whose layout is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rose_core.delta.probe import PROMPT
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, successors
from rose_engines.errors import CommitRefused
from rose_engines.process.client import TurnClient
from rose_engines.sglang.arguments import FALLBACK_VARIABLE
from rose_engines.weights.control import ControlClient

pytestmark = pytest.mark.engine

PEAKED = RECIPES["tiny-peaked"]
OTHER = replace(PEAKED, seed=7)
FIRST, SECOND = (WeightVersion("reload", 1, number) for number in range(2))


@pytest.fixture
def engine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealEngine]:
    monkeypatch.setenv(FALLBACK_VARIABLE, "disk-always")
    with start_engine(tmp_path_factory.mktemp("reload"), version=str(FIRST)) as started:
        yield started


def cycle(successor: list[int], last: int, count: int) -> list[int]:
    found = []
    for _ in range(count):
        last = successor[last]
        found.append(last)
    return found


async def test_a_running_stream_goes_over_to_what_was_loaded(
    engine: RealEngine, tmp_path: Path
) -> None:
    """Both states have other successors, so every token says which weights sampled it."""
    old, new = state_of(PEAKED), state_of(OTHER)
    manifest = write_bundle(tmp_path / "there", SECOND, new, (FIRST, old))
    count, committed, reply = 120, None, None
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": count}
    async with (
        TurnClient(engine.url) as client,
        await ControlClient.connect(engine.control) as control,
    ):
        assert (await control.status()).attests == "Copy"
        await control.stage(tmp_path / "there")
        before = await client.prompt_logprobs(PROMPT)
        assert before[0] == str(FIRST)
        await client.slow_down(0.05)  # so that the commit comes before the end
        async for reply in client.stream([104], sampling):  # noqa: B007
            if committed is None:
                committed = await control.commit(str(SECOND))
                await client.slow_down(None)
        assert committed is not None
        assert committed.digest == manifest.digest
        assert reply is not None
        assert [span.version for span in reply.spans] == [str(FIRST), str(SECOND)]
        cut = reply.spans[0].end
        first = cycle(successors(PEAKED), 104, cut)
        assert list(reply.output_ids) == first + cycle(successors(OTHER), first[-1], count - cut)
        after = await client.prompt_logprobs(PROMPT)
        assert after[0] == str(SECOND)
        assert len(after[1]) == len(PROMPT) - 1
        assert all(map(math.isfinite, after[1]))
        assert after[1] != before[1]
        with pytest.raises(CommitRefused, match="Unsupported"):
            await control.export(tmp_path / "live.safetensors")
