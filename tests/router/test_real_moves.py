"""A turn leaves a real SGLang in the middle of a stop string, and keeps what came with its tokens.

SGLang holds back tokens that may belong to a stop string, so what the router has seen says nothing
about how far the engine is: the engine is asked for the keys it holds. It tells its last tokens
when it aborts the turn; when it is taken back, it tells nothing more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import Owner
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.main import RunningRouter
from tests.router.real_fleet import before_two
from tests.router.test_real_engines import PROMPT, VERSION

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

MOST = 60
BEGIN, END = 20, 44  # the tokens whose text is the stop string
MIDDLE = 30


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One SGLang; the router knows it by two names, which makes the legs of a turn two requests."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    with start_engine(tmp_path_factory.mktemp("stops"), version=VERSION) as started:
        yield started


@dataclass
class Lease:
    """A router before the engine.

    Attributes:
        first: who speaks for the engine under its first name; the second is closed until opened.
    """

    router: RunningRouter
    http: aiohttp.ClientSession
    engine: RealEngine
    first: Owner
    second: Owner

    async def ask(self, *more: str, **sampling: object) -> Any:  # noqa: ANN401  # JSON
        """Send a turn; ``more`` are fields that are true."""
        return await self.post(self.url, self.body(*more, **sampling))

    async def shown(self, **sampling: object) -> list[Any]:
        """What a caller that streams sees, event by event."""
        async with self.http.post(self.url, json=self.body("stream", **sampling)) as reply:
            lines = [line async for line in reply.content if line.startswith(b"data: {")]
        return [json.loads(line[6:]) for line in lines]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}/generate"

    def body(self, *more: str, **sampling: object) -> dict[str, object]:
        given = {"max_new_tokens": MOST, "temperature": 0, "ignore_eos": True, **sampling}
        body: dict[str, object] = {"input_ids": PROMPT, "sampling_params": given}
        return body | {"return_logprob": True, "top_logprobs_num": 2, **dict.fromkeys(more, True)}

    async def post(self, url: str, body: object) -> Any:  # noqa: ANN401  # JSON
        async with self.http.post(url, json=body) as reply:
            return json.loads(await reply.text() or "null")

    async def computed(self) -> int:
        """Output tokens whose keys the engine holds: one less than it has sampled."""
        async with self.http.get(f"{self.engine.url}/v1/loads") as reply:
            (load,) = (await reply.json())["loads"]
        return int(load["num_used_tokens"]) - len(PROMPT)

    async def until_computed(self, tokens: int) -> None:
        async with asyncio.timeout(60):
            while await self.computed() < tokens:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.02)


@pytest.fixture
async def lease(engine: RealEngine) -> AsyncIterator[Lease]:
    async with before_two(engine, engine) as (router, http, owners):
        yield Lease(router, http, engine, *owners)


@asynccontextmanager
async def slowly(lease: Lease) -> AsyncIterator[None]:
    """Slow enough that the engine is still inside the string when it is stopped there."""
    await lease.post(f"{lease.engine.url}/slow_down", {"forward_sleep_time": 0.1})
    try:
        yield
    finally:
        await lease.post(f"{lease.engine.url}/slow_down", {"forward_sleep_time": None})


async def aborted(lease: Lease) -> None:
    """The engine ends the turn by itself and tells what it has held back."""
    lease.first.send(gate_open=False)
    lease.second.send(gate_open=True)
    await lease.post(f"{lease.engine.url}/abort_request", {"abort_all": True})


async def taken_back(lease: Lease) -> None:
    """The engine leaves the lease; what it has held back is lost."""
    lease.second.send(gate_open=True)
    lease.first.send(gate_open=False, leaving=True)


@pytest.mark.parametrize(
    ("leave", "reason", "at_token"),
    [
        (aborted, "Aborted", range(BEGIN + 1, END)),
        (taken_back, "Revoked", range(1, BEGIN + 1)),
    ],
)
async def test_a_turn_that_leaves_inside_its_stop_string_ends_as_if_it_had_stayed(
    lease: Lease,
    leave: Callable[[Lease], Awaitable[None]],
    reason: str,
    at_token: range,
) -> None:
    whole = (await lease.ask())["output_ids"]
    stop = Tokenizer(lease.engine.model).decode(whole[BEGIN:END], skip_special=False)
    stayed = await lease.ask(stop=stop)
    assert stayed["meta_info"]["rose"]["moves"] == []
    assert stayed["output_ids"] == whole[:END]
    async with slowly(lease):
        asked = asyncio.create_task(lease.shown(stop=stop))
        await lease.until_computed(MIDDLE)
        # Stopped between two tokens: where it stands does not depend on how fast we are.
        lease.engine.holder.close()
        stands = await lease.computed()
        await leave(lease)
        lease.engine.holder.open()
        shown = await asked
    assert BEGIN < stands < END
    moved = shown[-1]
    rose = moved["meta_info"]["rose"]
    assert [move["reason"] for move in rose["moves"]] == [reason]
    assert rose["moves"][0]["at_token"] in at_token
    assert [leg["engine"] for leg in rose["engines"]] == ["first", "second"]
    assert moved["output_ids"] == stayed["output_ids"]
    assert moved["text"] == stayed["text"]
    assert moved["meta_info"]["finish_reason"] == stayed["meta_info"]["finish_reason"]
    assert all(moved["text"].startswith(event["text"]) for event in shown)
    output = [entry[1] for entry in moved["meta_info"]["output_token_logprobs"]]
    assert output == stayed["output_ids"]


async def test_the_distribution_that_was_sampled_from_is_kept_over_a_move(lease: Lease) -> None:
    """``return_sampling_mask``: what top-k and top-p left, and the log-probs under it."""
    async with slowly(lease):
        asked = asyncio.create_task(
            lease.ask("return_sampling_mask", temperature=5.0, top_k=8, top_p=0.9)
        )
        await lease.until_computed(MIDDLE)
        await aborted(lease)
        meta = (await asked)["meta_info"]
    assert len(meta["rose"]["moves"]) == 1
    before = [entry[0] for entry in meta["output_token_logprobs"]]
    tokens = [entry[1] for entry in meta["output_token_logprobs"]]
    left, after = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    assert len(tokens) == len(left) == len(after) == MOST
    assert all(token in those for token, those in zip(tokens, left, strict=True))
    # Of fewer tokens each is likelier: so much that the rest adds up to one.
    assert all(kept >= all_ - 1e-4 for kept, all_ in zip(after, before, strict=True))
    assert any(kept > all_ + 0.01 for kept, all_ in zip(after, before, strict=True))
    assert meta["output_token_sampling_mask_length"] == MOST


async def test_log_probs_are_what_the_reply_says_they_are(lease: Lease) -> None:
    plain = await lease.ask(max_new_tokens=1)
    scaled = await lease.ask(max_new_tokens=1, temperature=0.5, sampling_seed=1)
    best = await lease.ask(max_new_tokens=1, temperature=0.5, top_k=1)

    def gap(answer: Any) -> float:  # noqa: ANN401  # JSON
        (first, second, *_) = answer["meta_info"]["output_top_logprobs"][0]
        return float(first[0] - second[0])

    def semantics(answer: Any) -> str:  # noqa: ANN401  # JSON
        return str(answer["meta_info"]["rose"]["logprob_semantics"])

    assert semantics(plain).startswith("log_softmax(logits) before top-k")
    assert semantics(scaled).startswith("log_softmax(logits / 0.5) before top-k")
    assert gap(scaled) == pytest.approx(gap(plain) / 0.5, rel=0.01)
    # The same parameters but for top-k: nobody told SGLang to leave the temperature out.
    assert gap(best) == pytest.approx(gap(plain), rel=0.01)
    assert semantics(best) == "unknown"
