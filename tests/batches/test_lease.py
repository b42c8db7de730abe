"""Batches at a lease's own URL: through its router, over kills, by OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from rose_batches.main import running
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import owner
from rose_dev.waiting import until
from rose_router.config import Settings
from rose_router.main import running as routing
from rose_wire.ports import free_port
from tests.batches.helpers import CHAT, Caller, batch_file
from tests.batches.processes import (
    COMPLETIONS,
    ask,
    check_answers,
    engine_of,
    pair,
    token_file,
)
from tests.router.conftest import LEASE, VERSION, Stage
from tests.router.scripts import RECIPE, folder
from tests.router.test_real_engines import update_of

if TYPE_CHECKING:
    import openai

pytestmark = [
    pytest.mark.asyncio,
    # aiohttp's own reader of forms puts back what it read beyond a part's end.
    pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning"),
]

Staging = Callable[..., AbstractAsyncContextManager[Stage]]


@contextlib.asynccontextmanager
async def lease(
    stage: Staging,
    folder_: Path,
    **settings: Any,  # noqa: ANN401  # of Settings
) -> AsyncIterator[tuple[Stage, aiohttp.ClientSession]]:
    """A router that passes batches on, and ``rose batches`` that asks it."""
    port = free_port()
    batches = {"batches_url": f"http://127.0.0.1:{port}", "batches_token": "between-us"}
    token = folder_ / "lease-token"
    token.write_text(str(settings.get("turn_token") or "none"))
    async with (
        stage(**batches, **settings) as s,
        running(
            folder_ / "batches",
            s.url,
            address=f"127.0.0.1:{port}",
            token="between-us",
            router_token_file=token,
        ),
    ):
        yield s, s.http


async def test_a_lease_runs_a_batch_at_its_own_url(stage: Staging, tmp_path: Path) -> None:
    async with lease(stage, tmp_path) as (s, http):
        await s.engine()
        team = Caller(s.url, http, {})
        batch = await team.ended(await team.begin(token_file(40), endpoint=COMPLETIONS))
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        check_answers(await team.lines(batch["output_file_id"]), 40)


async def test_rollouts_go_before_lines(stage: Staging, tmp_path: Path) -> None:
    async with lease(stage, tmp_path) as (s, http):
        engine = await s.engine(cap=1, token_seconds=0.02)
        team = Caller(s.url, http, {})
        name = await team.begin(token_file(12), endpoint=COMPLETIONS)
        await until(lambda: len(s.router.service.queue) >= 5)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "rid": "rollout"}
        async with s.post("/generate", {**body, "rose": {"job": "training"}}) as reply:
            assert reply.status == 200
        ended = [turn["id"] for turn in s.router.service.ledger.recent]
        # One line held the engine's only place; every other that waited still does.
        assert ended.index("rollout") <= 1 + sum(one.startswith("batch_") for one in ended[:2])
        assert len(s.router.service.queue) >= 4
        await team.ended(name)
        assert engine.scheduler is not None


async def test_each_job_has_files_of_its_own(stage: Staging, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a word-a\nb word-b\nnone\n")
    async with lease(stage, tmp_path, turn_token_file=tokens) as (s, http):
        a, b = (Caller(s.url, http, {"Authorization": f"Bearer word-{one}"}) for one in "ab")
        status, file = await a.upload(b"x")
        assert status == 200
        assert (await b.ask("GET", f"/v1/files/{file['id']}"))[0] == 404
        assert (await a.ask("GET", f"/v1/files/{file['id']}"))[0] == 200
        # Who calls is what the token says, and no header of the caller's.
        liar = Caller(s.url, http, {**b.headers, "X-Rose-Tenant": "job a"})
        assert (await liar.ask("GET", f"/v1/files/{file['id']}"))[0] == 404
        nobody = Caller(s.url, http, {"X-Rose-Tenant": "job a"})
        assert (await nobody.ask("GET", f"/v1/files/{file['id']}"))[0] == 401


async def test_a_lease_without_batches_says_so(stage: Staging) -> None:
    async with stage() as s, s.http.get(f"{s.url}/v1/batches") as reply:
        assert reply.status == 404
        assert "--batches" in (await reply.json())["error"]["message"]


async def test_batches_that_are_away_are_asked_for_again(stage: Staging) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with stage(batches_url=gone) as s, s.http.get(f"{s.url}/v1/batches") as reply:
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) > 0


async def test_a_large_file_takes_none_of_the_routers_memory(
    stage: Staging, tmp_path: Path
) -> None:
    most = 64 << 20
    async with lease(stage, tmp_path, max_body_bytes=1 << 20, memory_bytes=most) as (s, http):
        team = Caller(s.url, http, {})
        status, file = await team.upload(b"x" * (8 << 20))
        assert (status, file["bytes"]) == (200, 8 << 20)
        async with http.get(f"{s.url}/v1/files/{file['id']}/content") as reply:
            assert len(await reply.read()) == 8 << 20


def client(url: str, key: str) -> openai.OpenAI:
    import openai  # noqa: PLC0415  # slow to import, and one test needs it

    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2, timeout=60)


def play(asked: openai.OpenAI, content: Path, endpoint: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # a Literal
    """What OpenAI's page on batches shows, with their own client; the lines of the output."""
    with content.open("rb") as opened:
        file = asked.files.create(file=opened, purpose="batch")
    batch = asked.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"run": "nightly"},
    )
    assert batch.metadata == {"run": "nightly"}
    ended = {"completed", "failed", "expired", "cancelled"}

    while batch.status not in ended:
        time.sleep(0.05)
        batch = asked.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    assert batch.id in [one.id for one in asked.batches.list(limit=1)]
    assert file.id in [one.id for one in asked.files.list(purpose="batch")]
    assert batch.output_file_id is not None
    text = asked.files.content(batch.output_file_id).text
    assert asked.files.delete(file.id).deleted
    return [json.loads(line) for line in text.splitlines()]


async def test_openais_own_client_runs_a_batch(stage: Staging, tmp_path: Path) -> None:
    content = tmp_path / "in.jsonl"
    content.write_bytes(token_file(30))
    async with lease(stage, tmp_path, turn_token="of-the-lease") as (s, _):
        await s.engine()
        asked = client(s.url, "of-the-lease")
        check_answers(await asyncio.to_thread(play, asked, content, COMPLETIONS), 30)
        bad = tmp_path / "bad.jsonl"
        bad.write_bytes(token_file(1) + b"{nonsense\n")

        def fail() -> None:
            import openai  # noqa: PLC0415  # as in ``client``

            with pytest.raises(openai.BadRequestError, match="expected batch"):
                asked.files.create(file=bad, purpose="fine-tune")
            file = asked.files.create(file=bad, purpose="batch")
            made = asked.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )

            while made.status == "validating":
                time.sleep(0.05)
                made = asked.batches.retrieve(made.id)
            assert made.status == "failed"
            assert made.errors is not None
            assert made.errors.data is not None
            assert [(one.line, one.code) for one in made.errors.data] == [(2, "invalid_json_line")]
            with pytest.raises(openai.NotFoundError):
                asked.batches.retrieve("batch_none")
            with pytest.raises(openai.AuthenticationError):
                client(s.url, "wrong").batches.list()
            waiting = asked.batches.create(
                input_file_id=asked.files.create(file=content, purpose="batch").id,
                endpoint=COMPLETIONS,
                completion_window="24h",
            )
            assert asked.batches.cancel(waiting.id).status in {"cancelling", "completed"}

        await asyncio.to_thread(fail)


@pytest.mark.slow
async def test_each_line_has_one_answer_whatever_is_killed(tmp_path: Path) -> None:
    count = 400
    two = pair(tmp_path, lines=16)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for one in (two.router, two.batches):
            stack.push_async_callback(one.kill)
            await one.start()
        first = await stack.enter_async_context(engine_of(two.attach, "first"))
        await stack.enter_async_context(engine_of(two.attach, "second"))
        team = Caller(two.url, http, {})

        async def answered(batch: str, least: int) -> int:
            """Wait until so many lines are done; how many are."""
            async with asyncio.timeout(120):
                while True:
                    found = await ask(http, f"{two.url}/v1/batches/{batch}")
                    done = found["request_counts"]["completed"] if found else 0
                    if done >= least:
                        return int(done)
                    await asyncio.sleep(0.05)

        async with asyncio.timeout(120):
            while await ask(http, f"{two.url}/v1/batches") is None:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
        name = await team.begin(token_file(count), endpoint=COMPLETIONS)
        done = await answered(name, 20)
        await two.batches.again()
        done = await answered(name, done + 30)
        await two.router.again()
        done = await answered(name, done + 30)
        first.set()
        done = await answered(name, done + 30)
        await asyncio.gather(two.batches.again(), two.router.again())
        done = await answered(name, done + 30)
        await two.batches.again()
        assert done < count, "the kills came before the end"
        await answered(name, count)
        batch = await team.ended(name)
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        check_answers(await team.lines(batch["output_file_id"]), count)
    left = [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_words(one))]
    assert not left


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RealEngine]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    folder()
    with ExitStack() as stack:
        yield stack.enter_context(start_engine(tmp_path, RECIPE, version=VERSION))


@pytest.mark.engine
@pytest.mark.slow
async def test_a_real_engine_runs_a_batch_of_chats(engine: RealEngine, tmp_path: Path) -> None:
    port = free_port()
    content = tmp_path / "in.jsonl"
    content.write_bytes(batch_file(12))
    settings = Settings(
        lease=LEASE,
        attach_token="secret",
        tokenizer=folder(),
        batches_url=f"http://127.0.0.1:{port}",
    )
    async with (
        routing(settings) as router,
        owner(router.attach_port, update_of(engine, "real"), "secret"),
        running(
            tmp_path / "batches",
            f"http://127.0.0.1:{router.http_port}",
            address=f"127.0.0.1:{port}",
        ),
    ):
        asked = client(f"http://127.0.0.1:{router.http_port}", "none")
        lines = await asyncio.to_thread(play, asked, content, CHAT)
    assert [one["custom_id"] for one in lines] == [f"line-{n}" for n in range(12)]
    for one in lines:
        choice = one["response"]["body"]["choices"][0]
        assert choice["finish_reason"] in {"stop", "length"}
        assert one["response"]["body"]["usage"]["completion_tokens"] > 0
