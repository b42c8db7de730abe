"""A trainer's client of ``rose rewards``: beside a real gateway, and beside one that stumbles."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from rose_rewards.main import running
from rose_trainer.errors import NoReward, RewardRefused
from rose_trainer.rewards import Lost, Masked, RewardClient, Scored
from rose_wire.ports import free_port

ASKED = {"trajectory": "t", "function": "exact", "answer": "1", "expected": "1"}


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[str]:
    (folder / "functions.yaml").write_text(yaml.safe_dump({"exact": {"rule": "exact"}}))
    (folder / "teams").write_text("a word-a\n")
    (folder / "token").write_text("word-a\n")
    async with running(folder / "functions.yaml", workers=1, token_file=folder / "teams") as (
        _,
        port,
    ):
        yield f"http://127.0.0.1:{port}"


Step = Callable[[], web.Response]


@contextlib.asynccontextmanager
async def stumbling(*steps: Step) -> AsyncIterator[tuple[str, list[str]]]:
    """A gateway whose answers are these, the last one for good; and what it was asked for."""
    asked: list[str] = []
    answers: Iterator[Step] = iter(steps)
    last = steps[-1]

    async def score(request: web.Request) -> web.Response:
        asked.append((await request.json())["trajectory"])
        return next(answers, last)()

    app = web.Application()
    app.add_routes([web.post("/v1/rewards", score)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def busy() -> web.Response:
    return web.json_response({"message": "full"}, status=429, headers={"Retry-After": "0.01"})


def away() -> web.Response:
    return web.Response(status=502, text="<html>")


def lost() -> web.Response:
    return web.json_response({"outcome": "lost", "reason": "its worker ended"})


def scored() -> web.Response:
    return web.json_response({"outcome": "scored", "reward": 0.5, "correct": True, "seconds": 1})


async def test_a_real_gateway_scores_and_masks_and_says_what_is_wrong(tmp_path: Path) -> None:
    async with gateway(tmp_path) as url, aiohttp.ClientSession() as session:
        client = RewardClient(f"{url}/", session, tmp_path / "token")
        found = await client.score(ASKED, 30)
        assert isinstance(found, Scored)
        assert (found.reward, found.correct) == (1.0, True)
        unknown = {"trajectory": "u", "function": "exact", "answer": "1"}
        assert isinstance(await client.score(unknown, 30), Masked), "nothing is expected: no 0.0"
        with pytest.raises(RewardRefused, match=r"400: .*nothing"):
            await client.score({**ASKED, "trajectory": "v", "function": "nothing"}, 30)
        with pytest.raises(RewardRefused, match=r"401: .*token"):
            await RewardClient(url, session).score(ASKED, 30)


async def test_who_has_no_answer_asks_again_under_the_same_name() -> None:
    async with (
        stumbling(busy, away, lost, scored) as (url, asked),
        aiohttp.ClientSession() as session,
    ):
        assert await RewardClient(url, session).score(ASKED, 30) == Scored(0.5, True, 1.0)
        assert asked == ["t"] * 4


async def test_what_is_lost_however_often_it_is_asked_is_lost() -> None:
    async with stumbling(lost) as (url, asked), aiohttp.ClientSession() as session:
        found = await RewardClient(url, session, tries=2).score(ASKED, 30)
        assert (found, len(asked)) == (Lost("its worker ended"), 2)


async def test_no_answer_in_time_is_no_reward_and_no_zero() -> None:
    async with stumbling(busy) as (url, asked), aiohttp.ClientSession() as session:
        with pytest.raises(NoReward, match=r"'t' in 0\.1 s .*429 Too Many.*same trajectory"):
            await RewardClient(url, session).score(ASKED, 0.1)
        assert len(asked) > 1


async def test_who_is_not_reached_is_named_and_a_url_that_is_none_refused_at_once() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(NoReward, match=r"the last: Client\w+: .*127\.0\.0\.1"):
            await RewardClient(f"http://127.0.0.1:{free_port()}", session).score(ASKED, 0.1)
        for url in ("rose-rewards:8100", "rose-rewards"):
            with pytest.raises(RewardRefused, match=r"with http://"):
                await RewardClient(url, session).score(ASKED, 30)


async def test_an_answer_that_is_no_result_is_refused() -> None:
    async with (
        stumbling(lambda: web.Response(text="<html>")) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(RewardRefused, match="is that the URL of rose rewards"):
            await RewardClient(url, session).score(ASKED, 30)
