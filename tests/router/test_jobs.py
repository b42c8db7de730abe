"""Jobs that share a lease: who they are by their tokens, what they cannot do to each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rose_core.rollouts.capacity.admission import QueueLimits
from rose_dev.waiting import until
from rose_router.http.admission.bearer import Tokens
from tests.router.conftest import Stage
from tests.router.test_http import ask

Make = Callable[..., AbstractAsyncContextManager[Stage]]
TOKENS = "train s3cret-train\neval s3cret-eval\ns3cret-plain\n"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    return file


def bearing(job: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer s3cret-{job}", **headers}


def jobs(s: Stage) -> list[str]:
    return sorted(turn.request.job for turn in s.router.service.ledger)


async def generate(s: Stage, job: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    async with s.post("/generate", ask(**fields), headers=bearing(job)) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


# --- tokens


def test_a_line_may_name_the_job_of_its_token(tokens: Path) -> None:
    known = Tokens(tokens)
    assert known.job_of("Bearer s3cret-train") == "train"
    assert known.job_of("Bearer s3cret-plain") == ""
    assert known.job_of("Bearer train") is None
    assert known.job_of("Bearer train s3cret-train") is None
    assert known.job_of("Bearer \udcff") is None


def test_a_line_of_three_words_is_named_without_its_token(tokens: Path) -> None:
    tokens.write_text("fine\na b s3cret-c\n")
    with pytest.raises(ValueError, match="token 2: expected TOKEN or JOB TOKEN") as error:
        Tokens(tokens)
    assert "s3cret" not in str(error.value)


async def test_a_wrong_token_is_refused_in_words_that_do_not_repeat_it(
    stage: Make, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        stage(turn_token_file=tokens) as s,
        s.post("/generate", ask(), headers=bearing("wrong")) as reply,
    ):
        assert reply.status == 401
        text = await reply.text()
    assert "send Authorization: Bearer TOKEN" in text
    assert "s3cret" not in text + caplog.text


# --- what one job cannot do to another


async def test_the_tokens_job_counts_whatever_the_hint_says(stage: Make, tokens: Path) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine(token_seconds=0.01)
        headers = bearing("eval", **{"X-Rose-Job": "train"})
        async with s.post("/generate", ask(5000, stream=True), headers=headers) as reply:
            await reply.content.readline()
            assert jobs(s) == ["eval"]
        await until(lambda: not jobs(s))
        headers = bearing("plain", **{"X-Rose-Job": "train"})
        async with s.post("/generate", ask(5000, stream=True), headers=headers) as reply:
            await reply.content.readline()
            assert jobs(s) == ["train"]


async def test_aborts_end_the_turns_of_the_callers_own_job(stage: Make, tokens: Path) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine(token_seconds=0.01)
        turns = [
            asyncio.create_task(generate(s, job, most=5000, rid="same"))
            for job in ("train", "eval")
        ]
        await until(lambda: jobs(s) == ["eval", "train"])
        for body in ({"rid": "same"}, {"abort_all": True}):
            async with s.post("/abort_request", body, headers=bearing("eval")) as reply:
                assert reply.status == 200
            await until(lambda: jobs(s) == ["train"])
        async with s.post("/abort_request", {"abort_all": True}, headers=bearing("plain")) as reply:
            assert reply.status == 200
        for turn in turns:
            assert (await turn)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_flood_does_not_make_another_job_wait_for_its_end(
    stage: Make, tokens: Path
) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine(cap=1)
        ended: list[str] = []

        async def one(job: str) -> None:
            await generate(s, job)
            ended.append(job)

        flood = [asyncio.create_task(one("train")) for _ in range(30)]
        await until(lambda: len(s.router.service.queue) >= 29)
        await asyncio.gather(*(one("eval") for _ in range(3)))
        before = ended.count("train")
        await asyncio.gather(*flood)
    assert before < 15
    assert len(ended) == 33


async def test_a_queue_that_one_job_has_filled_takes_the_others_turns(
    stage: Make, tokens: Path
) -> None:
    async with stage(turn_token_file=tokens, queue=QueueLimits(most=4)) as s:
        flood = [asyncio.create_task(generate(s, "train")) for _ in range(4)]
        await until(lambda: len(s.router.service.queue) == 4)
        async with s.post("/generate", ask(), headers=bearing("train")) as reply:
            assert reply.status == 429
            assert "4 of them of job train" in await reply.text()
            assert int(reply.headers["Retry-After"]) >= 1
        other = asyncio.create_task(generate(s, "eval"))
        await until(lambda: len(s.router.service.queue) == 5)
        await s.engine()
        await asyncio.gather(other, *flood)


async def test_what_one_job_calls_a_trajectory_is_its_own(stage: Make, tokens: Path) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine()
        known = s.router.service.prospects
        for job in ("train", "eval"):
            await generate(s, job, most=4, session_id="0", rose={"group": "g"})
        assert len(known) == 2
        report = {"trained": ["0"]}
        answers = []
        for job in ("eval", "eval", "train"):
            async with s.post("/trajectories", report, headers=bearing(job)) as reply:
                answers.append((await reply.json())["unknown"])
        assert answers == [[], ["0"], []]


async def test_the_end_of_a_trajectory_is_told_of_the_callers_own(
    stage: Make, tokens: Path
) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine()
        known = s.router.service.prospects
        for job in ("train", "eval"):
            await generate(s, job, most=4, session_id="0", rose={"group": "g"})
        path = "/finish_session?session_id=0"
        async with s.post(path, {}, headers=bearing("eval")) as reply:
            assert reply.status == 200
        groups = {name: lengths.ordered for name, lengths in known.lengths._groups.items()}
        assert groups == {"eval/g": [4]}


async def test_a_prompt_goes_on_from_the_callers_own_turns_only(stage: Make, tokens: Path) -> None:
    async with stage(turn_token_file=tokens) as s:
        await s.engine()
        first = await generate(s, "train", most=40)
        longer = [*ask()["input_ids"], *first["output_ids"], 7]
        await generate(s, "eval", most=4, input_ids=longer)
        assert len(s.router.service.prospects) == 2
        await generate(s, "train", most=4, input_ids=longer)
        assert len(s.router.service.prospects) == 2
