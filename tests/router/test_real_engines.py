"""A real SGLang dies in the middle of a turn; the caller's stream goes on as if nothing was."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from rose_core.rollouts.spans import Span, covers
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.models import make_named
from rose_router.config import Settings
from rose_router.main import running
from tests.router.owners import owner

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

VERSION = "run@1.0"
PROMPT = [5, 17, 42, 99, 7]
TOKENS = 200


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """Two engines with the same weights, started side by side."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    make_named("tiny-peaked")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(_start, stack, tmp_path_factory.mktemp(name)) for name in ("one", "two")
        ]
        yield [future.result() for future in starting]


def _start(stack: ExitStack, folder: Path) -> RealEngine:
    return stack.enter_context(start_engine(folder, version=VERSION))


def update_of(engine: RealEngine, name: str) -> EngineUpdate:
    return EngineUpdate(
        engine=name,
        kind=EngineKind.BORROWED,
        lease="team/grpo",
        url=engine.url,
        gate_open=True,
        cap=4,
        version=VERSION,
    )


def request(**fields: object) -> dict[str, object]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        **fields,
    }


async def test_a_killed_engine_is_not_noticed_by_the_caller(engines: list[RealEngine]) -> None:
    first, second = engines
    async with (
        aiohttp.ClientSession() as session,
        running(Settings(lease="team/grpo", attach_token="secret")) as router,
        owner(router.attach_port, update_of(first, "first"), "secret"),
    ):
        async with session.post(f"{second.url}/generate", json=request()) as reply:
            undisturbed = (await reply.json())["output_ids"]
        assert len(undisturbed) == TOKENS
        url = f"http://127.0.0.1:{router.http_port}/generate"
        async with session.post(url, json=request()) as reply:
            plain = await reply.json()
        assert plain["output_ids"] == undisturbed
        assert plain["meta_info"]["weight_versions"] == [
            {"version": VERSION, "start": 0, "end": TOKENS, "kv": "own"}
        ]
        # Slow enough that the kill surely falls into the turn.
        await session.post(f"{first.url}/slow_down", json={"forward_sleep_time": 0.05})
        async with session.post(url, json=request(stream=True)) as reply:
            assert reply.status == 200
            last: dict[str, object] = {}
            shown: list[list[int]] = []
            async with owner(router.attach_port, update_of(second, "second"), "secret"):
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
                        shown.append(last["output_ids"])  # type: ignore[arg-type]
                        if len(shown[-1]) >= 20 and first.process.poll() is None:
                            os.killpg(first.process.pid, signal.SIGKILL)
                            await asyncio.to_thread(first.process.wait, 30)

    meta = last["meta_info"]
    assert isinstance(meta, dict)
    assert last["output_ids"] == undisturbed
    assert all(undisturbed[: len(ids)] == ids for ids in shown)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == undisturbed
    spans = [Span(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert covers(spans, TOKENS)
    assert {span.version for span in spans} == {VERSION}
    assert [move["reason"] for move in meta["rose"]["moves"]] == ["Lost"]
    assert meta["rose"]["moves"][0]["at_token"] >= 20
    assert meta["rose"]["redone_tokens"] == 0
