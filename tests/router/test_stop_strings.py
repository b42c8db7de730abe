"""A stop string that begins on one engine and ends on the next ends the turn all the same."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import cast

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from rose_core.rollouts.requests.stops import Stops
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until as sooner
from rose_engines.fake.model import continuation
from rose_router.http.replies.parts import text_of
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns import runner
from rose_router.turns.turn import Turn
from tests.router.conftest import VERSION, Fake, Stage
from tests.router.pushing import json_of
from tests.router.world import SimEngine, V, World, judge, over, started, until, world

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = (3, 1, 4)


def text(ids: Sequence[int]) -> str:
    """Three letters for every token, so that a string is found where it lies and nowhere else."""
    return "".join(f"{number:03d}" for number in ids)


@pytest.mark.asyncio
@pytest.mark.looptime
@pytest.mark.parametrize("tells", [True, False])
async def test_it_ends_with_the_token_that_completes_it_and_the_engine_is_stopped(
    tells: bool,
) -> None:
    whole = continuation(PROMPT, 30, V(0))
    word = text(whole[3:8])
    first, second = SimEngine("a"), SimEngine("b", spans_always=tells)
    async with world(first) as w:
        turn = w.ask(30, prompt=PROMPT, sampling={"stop": word}, stops=Stops((word,), 6, text))
        await started(turn)
        w.attach(second)
        w.kill(first)
        await over(turn)
        assert 3 < turn.moves[0].at_token < 8
        assert turn.transcript.tokens == whole[:8]
        assert turn.finish == {"type": "stop", "matched": word}
        judge(turn)
        # One that tells versions in every event need not write to its end.
        await until(lambda: not second.runs or bool(second.aborted) is tells)
        assert (second.tokens_made < 22) is tells


class Letters:
    """A tokenizer of one letter for every token, as the engines of this world show them."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        assert skip_special
        return "".join(map(chr, tokens))


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_stream_never_shows_what_may_still_become_the_string() -> None:
    letters = cast("Tokenizer", Letters())
    whole = continuation(PROMPT, 30, V(0))
    word = letters.decode(whole[3:8])
    first, second = SimEngine("a"), SimEngine("b")
    seen: list[str] = []
    async with world(first) as w:
        turn = w.ask(
            30, prompt=PROMPT, sampling={"stop": word}, stops=Stops((word,), 6, letters.decode)
        )
        moving = asyncio.create_task(moved(w, turn, first, second))
        while not turn.is_over:
            await turn.changed.wait()
            seen.append(text_of(turn, turn.shown(), letters))
        await moving
    assert 3 < turn.moves[0].at_token < 8
    assert seen[-1] == letters.decode(whole[:3])
    assert all(seen[-1].startswith(one) for one in seen)


async def moved(w: World, turn: Turn, first: SimEngine, second: SimEngine) -> None:
    await started(turn)
    w.attach(second)
    w.kill(first)


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_an_undisturbed_turn_is_left_to_its_engine() -> None:
    whole = continuation(PROMPT, 12, V(0))
    word = text(whole[3:8])
    async with world(SimEngine("a")) as w:
        turn = w.ask(12, prompt=PROMPT, sampling={"stop": word}, stops=Stops((word,), 6, text))
        await over(turn)
        assert turn.transcript.tokens == whole  # this engine does not look for strings


def written(fake: Fake) -> int:
    """Tokens of the turns that run there."""
    return sum(len(one.output) for one in fake.scheduler.running)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of one word for every token."""
    vocabulary = {f"w{number:03d}": number for number in range(256)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w000"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_lease_of_borrowed_engines_alone_takes_turns_with_stop_strings(
    stage: Make, words: Path
) -> None:
    whole = continuation(PROMPT, 200, VERSION)
    stop = " ".join(f"w{number:03d}" for number in whole[4:44])
    async with stage(tokenizer=words) as s:
        fakes = {name: await s.engine(name, token_seconds=0.01) for name in "ab"}
        body = {"prompt": list(PROMPT), "max_tokens": 200, "stop": [stop]}
        asked = asyncio.create_task(json_of(s.post("/v1/completions", body)))
        await sooner(lambda: any(written(fake) > 6 for fake in fakes.values()))
        await next(fake for fake in fakes.values() if written(fake)).die()
        (choice,) = (await asked)["choices"]
    assert len(choice["rose"]["moves"]) == 1
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == whole[:44]
    assert choice["text"] == " ".join(f"w{number:03d}" for number in whole[:4]) + " "


@pytest.mark.parametrize("dies", [False, True])
async def test_a_turn_that_a_stop_string_ends_behind_a_move_has_experts_if_its_engine_says_them(
    stage: Make, words: Path, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = continuation(PROMPT, 200, VERSION)
    stop = " ".join(f"w{number:03d}" for number in whole[4:44])
    async with stage(tokenizer=words) as s:
        fakes = {name: await s.engine(name, token_seconds=0.01) for name in "ab"}
        if dies:  # hears of the end, and answers no more
            monkeypatch.setattr(runner, "_FINAL_EVENT_SECONDS", 0.2)
            for fake in fakes.values():
                monkeypatch.setattr(fake.scheduler, "abort", lambda *_, **__: None)
        body = {
            "input_ids": list(PROMPT),
            "sampling_params": {"max_new_tokens": 200, "stop": [stop]},
            "return_routed_experts": True,
        }
        asked = asyncio.create_task(json_of(s.post("/generate", body)))
        await sooner(lambda: any(written(fake) > 6 for fake in fakes.values()))
        await next(fake for fake in fakes.values() if written(fake)).die()
        answer = await asked
        assert s.router.service.ledger.totals.failed_turns == 0
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == whole[:44]
    if dies:
        assert meta["routed_experts"] is None
        return
    rows = array("i", base64.b64decode(meta["routed_experts"]))[::2]
    assert list(rows) == [*PROMPT, *whole[:44]][:-1], "a row for each token but the last"
    assert meta["routed_experts_recomputed"] == meta["rose"]["moves"][0]["at_token"]


@pytest.mark.usefixtures("soon_refused")
@pytest.mark.parametrize("tokenizer", [True, False])
async def test_without_a_tokenizer_or_with_a_string_too_long_they_are_not_moved(
    stage: Make, words: Path, tokenizer: bool
) -> None:
    stop = " ".join(["w001"] * (70 if tokenizer else 2))
    async with stage(tokenizer=words if tokenizer else None) as s:
        await s.engine("lent")
        body = {"prompt": list(PROMPT), "max_tokens": 5, "stop": stop}
        async with s.post("/v1/completions", body) as reply:
            assert reply.status == 422
            assert "stop: " in (await reply.json())["message"]
        await s.engine("ours", kind=EngineKind.DEDICATED)
        async with s.post("/v1/completions", body) as reply:
            assert reply.status == 200


@pytest.mark.parametrize("stop", [7, [7], {"a": "b"}])
async def test_what_is_no_text_is_refused_by_name(stage: Make, words: Path, stop: object) -> None:
    async with stage(tokenizer=words) as s:
        await s.engine()
        body = {"prompt": list(PROMPT), "max_tokens": 5, "stop": stop}
        async with s.post("/v1/completions", body) as reply:
            assert reply.status == 400
            assert "stop" in (await reply.json())["message"]
