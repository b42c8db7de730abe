"""An agent's task on two real SGLang engines, one of which is killed in mid-answer.

The rows that a trainer then reads are compared with what the surviving engine says of the same
tokens when it is made to read them (teacher forcing).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import owner
from rose_dev.waiting import until
from rose_router.config import Settings
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.main import RunningRouter, running
from tests.router.scripts import BASH, RECIPE, folder
from tests.router.test_real_engines import VERSION, update_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

Json = dict[str, Any]


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    folder()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(name: str) -> RealEngine:
            made = start_engine(tmp_path_factory.mktemp(name), RECIPE, version=VERSION)
            return stack.enter_context(made)

        yield list(pool.map(start, ("one", "two")))


async def test_an_agents_task_survives_an_engine_and_its_row_is_what_the_engines_computed(
    engines: list[RealEngine],
) -> None:
    first, second = engines
    settings = Settings(lease="team/grpo", attach_token="secret", tokenizer=folder())
    async with (
        aiohttp.ClientSession() as http,
        running(settings) as router,
        owner(router.attach_port, update_of(first, "first"), "secret"),
    ):
        url = f"http://127.0.0.1:{router.http_port}"
        await http.post(f"{first.url}/slow_down", json={"forward_sleep_time": 0.05})
        talk: list[Json] = [{"role": "user", "content": "Look into a.txt."}]
        received: list[str] = []
        async with owner(router.attach_port, update_of(second, "second"), "secret"):
            killing = asyncio.create_task(kill_in_second_answer(router, first))
            for result in ("", "one", None):
                answer = await ask(http, url, talk)
                received += [block["type"] for block in answer["content"]]
                if result is not None:
                    call = answer["content"][-1]
                    done = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
                    talk += [{"role": "assistant", "content": answer["content"]}]
                    talk += [{"role": "user", "content": [done]}]
            await killing
            async with http.get(f"{url}/sessions/task/rows") as reply:
                (row,) = (await reply.json())["rows"]
            forced = await read(http, second, row["ids"])
    assert received == ["text", "tool_use", "thinking", "text", "tool_use", "text"]
    text = Tokenizer(folder())
    turns = [text.decode(row["ids"][one["start"] : one["end"]]) for one in row["turns"]]
    assert turns == list(BASH.answers)
    for place, sampled in enumerate(row["mask"]):
        if sampled:
            assert row["logprobs"][place] == pytest.approx(forced[place], abs=1e-3)


async def kill_in_second_answer(router: RunningRouter, engine: RealEngine) -> None:
    """SIGKILL once the second answer has some of its tokens."""
    service = router.service

    def writes() -> bool:
        return service.ledger.totals.turns == 1 and any(
            turn.leg is not None and turn.leg.placed >= 5 for turn in service.ledger
        )

    await until(writes, seconds=60)
    os.killpg(engine.process.pid, signal.SIGKILL)
    await asyncio.to_thread(engine.process.wait, 30)


async def ask(http: aiohttp.ClientSession, url: str, talk: list[Json]) -> Json:
    """The next answer."""
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    body = {"messages": talk, "max_tokens": 400, "tools": tools, "rose": {"session": "task"}}
    async with http.post(f"{url}/v1/messages", json=body) as reply:
        answer: Json = await reply.json()
        assert reply.status == 200, answer
        return answer


async def read(http: aiohttp.ClientSession, engine: RealEngine, ids: list[int]) -> list[float]:
    """Log-probs of these tokens as the engine computes them when it reads them."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with http.post(f"{engine.url}/generate", json=body) as reply:
        meta = (await reply.json())["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"]]
