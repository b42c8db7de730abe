"""What a turn and an event cost, in calls of the router's functions: time depends on machines.

And what a turn leaves behind: one that only the cycle collector frees costs a tenth more, for the
collector's time, and for memory that is cold by the time it is used again.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Any

import pytest

from rose_core.rollouts.engines.estimates import Speed
from rose_router.turns.turn import Turn
from tests.router.conftest import Stage
from tests.router.scripts import folder

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
OURS = ("/rose_router/", "/rose_core/rollouts/")
TURNS, EVENTS = 50, 200
ROUNDS = 3
"""Of which the least counts: what else the machine does is no turn's."""
MOST_OF_A_TURN = 313
"""Calls of a turn that is answered at once: 310 where every gap between its events teaches the
engine's step, of which 9 are for that. A few are left for other changes; without those 9 it was
420 before decision 702, and 357 after."""
MOST_OF_AN_EVENT = 41
"""Calls of one more event of a stream: 38, and it was 51 before decision 770, 63 before 530."""
COSTLY = "docs/decisions/0530 says what a call costs: make fewer, or say there why it takes more"


@contextmanager
def counted() -> Iterator[list[int]]:
    """Calls of functions of the router in the block, in the one entry of what is yielded."""
    calls = [0]

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(one in frame.f_code.co_filename for one in OURS):
            calls[0] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def ask(s: Stage, tokens: int, *, stream: bool) -> bytes:
    body: dict[str, Any] = {
        "input_ids": list(range(1, 201)),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "stream": stream,
    }
    async with s.post("/generate", body) as reply:
        assert reply.status == 200, await reply.text()
        return bytes(await reply.read())


@pytest.fixture
def every_gap_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine's step each gap tells: else the machine's load decides which of them do."""
    monkeypatch.setattr(Speed, "teaches", lambda _speed, _since: True)


async def only_turns(s: Stage) -> None:
    """From now on nothing is done by the clock: that is no turn's, and more of it where load is."""
    loops = s.router.service.loops
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@pytest.mark.usefixtures("every_gap_teaches")
async def test_a_turn_calls_no_more_than_it_did(stage: Staging) -> None:
    async with stage() as s:
        await s.engine(token_seconds=0)
        await ask(s, 4, stream=False)
        await only_turns(s)
        spent = []
        for _ in range(ROUNDS):
            with counted() as calls:
                for _ in range(TURNS):
                    await ask(s, 4, stream=False)
            spent.append(calls[0] / TURNS)
    assert 100 < min(spent) <= MOST_OF_A_TURN, COSTLY


@pytest.mark.usefixtures("every_gap_teaches")
async def test_an_event_calls_no_more_than_it_did(stage: Staging) -> None:
    async with stage() as s:
        await s.engine(token_seconds=0.001)
        await ask(s, 1, stream=True)  # for what is made once
        await only_turns(s)
        spent = []
        for tokens in (1, 1 + EVENTS):
            counts = []
            for _ in range(ROUNDS):
                with counted() as calls:
                    result = await ask(s, tokens, stream=True)
                assert result.count(b"data: ") > tokens, "an event for each token"
                counts.append(calls[0])
            spent.append(min(counts))
    assert 10 < (spent[1] - spent[0]) / EVENTS <= MOST_OF_AN_EVENT, COSTLY


IDS = list(range(1, 201))
ASKED: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": IDS, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4},
    "/v1/responses": {"input": "go", "max_output_tokens": 4, "store": False},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {"max_tokens": 4}},
}


def turns_that_live() -> int:
    return sum(type(one) is Turn for one in gc.get_objects())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASKED)
async def test_a_turn_that_has_ended_is_freed_without_the_cycle_collector(
    stage: Staging, path: str, stream: bool
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(token_seconds=0.001)
        body = {"model": "m", "stream": stream, **ASKED[path]}
        gc.collect()
        gc.disable()
        try:
            before = turns_that_live()
            for _ in range(3):
                async with s.post(path, body) as reply:
                    assert reply.status == 200, await reply.text()
                    await reply.read()
            await asyncio.sleep(0)  # for the end of the last request's task
            after = turns_that_live()
        finally:
            gc.enable()
    assert after <= before
