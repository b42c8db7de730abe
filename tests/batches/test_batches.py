"""Batches over HTTP, run at a router that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sqlite3
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose_batches.errors import Damaged
from rose_batches.http import application
from rose_batches.journal import Answer, Journal
from rose_batches.main import main, running
from rose_batches.objects import StoredBatch, StoredFile, output_line
from rose_batches.worker import _raw_lines
from rose_core import rights
from rose_core.batches.lines import LONGEST_LINE, PRIORITY, LineSpan, Problem, check
from rose_core.rights import Listener
from rose_dev.waiting import until
from tests.batches.helpers import (
    CHAT,
    Caller,
    FakeRouter,
    answer_to,
    batch_file,
    fake_router,
    question,
)
from tests.faults.served import routes_of

pytestmark = [
    # aiohttp's own reader of forms puts back what it read beyond a part's end.
    pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning"),
]


class Now:
    """Unix seconds that a test sets."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


class Hasty:
    """Unix seconds that go on at every look, so that no rest lasts."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        self.at += 10.0
        return self.at


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    router: FakeRouter,
    **given: Any,  # noqa: ANN401  # of running
) -> AsyncIterator[Callable[..., Caller]]:
    """``rose batches`` before a router; gives callers by their tenant's name."""
    async with (
        running(folder, router.url, **given) as (_, port, _working),
        aiohttp.ClientSession() as http,
    ):

        def caller(tenant: str = "team", token: str = "") -> Caller:
            headers = {"X-Rose-Tenant": tenant}
            if token:
                headers["Authorization"] = f"Bearer {token}"
            return Caller(f"http://127.0.0.1:{port}", http, headers)

        yield caller


def contents(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Answers by custom id; an id twice is an error."""
    found = {
        one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"]
        for one in lines
    }
    assert len(found) == len(lines)
    return found


async def wait_for_answers(team: Caller, name: str, count: int) -> None:
    """Return when the batch has so many answers."""
    async with asyncio.timeout(30):
        while True:
            _, found = await team.ask("GET", f"/v1/batches/{name}")
            if found["request_counts"]["completed"] == count:
                return
            await asyncio.sleep(0.01)


async def test_each_line_is_answered_once_in_the_files_order(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        team = caller()
        batch = await team.ended(await team.begin(batch_file(100)))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert batch["error_file_id"] is None
        lines = await team.lines(batch["output_file_id"])
    assert list(contents(lines).items()) == [
        (f"line-{n}", f"answer to ask {n}") for n in range(100)
    ]
    assert len({one["id"] for one in lines}) == 100
    assert {one["response"]["status_code"] for one in lines} == {200}
    assert max(router.tries.values()) == 1


async def test_turns_ask_below_all_others_as_a_job_of_their_tenant(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-the-lease\n")
    async with (
        fake_router() as router,
        serving(tmp_path / "b", router, router_token_file=token) as caller,
    ):
        await caller("job a").ended(await caller("job a").begin(batch_file(1)))
    assert router.asked[0]["priority"] == PRIORITY
    assert router.heads[0]["Authorization"] == "Bearer of-the-lease"
    assert router.heads[0]["X-Rose-Job"] == "batch:job a"


async def test_no_more_lines_run_at_a_time_than_may(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router, lines=3) as caller:
        router.free.clear()
        batch = await caller().begin(batch_file(20))
        await until(lambda: router.running == 3)
        router.free.set()
        await caller().ended(batch)
    assert router.most == 3


async def test_a_line_that_cannot_be_answered_now_is_asked_again(tmp_path: Path) -> None:
    def decide(_body: Mapping[str, Any], tries: int) -> int:
        return 503 if tries == 1 else 200

    async with fake_router() as router, serving(tmp_path, router) as caller:
        router.decide = decide
        batch = await caller().ended(await caller().begin(batch_file(3)))
        assert batch["request_counts"]["completed"] == 3
    assert set(router.tries.values()) == {2}


@pytest.mark.parametrize(("errors", "failed"), [(4, 0), (5, 1)])
async def test_only_a_500_counts_towards_its_last(tmp_path: Path, errors: int, failed: int) -> None:
    """A line that waited through an outage has all of its tries left."""

    def decide(_body: Mapping[str, Any], tries: int) -> int:
        if tries <= 12:
            return (503, 429)[tries % 2]
        return 500 if tries <= 12 + errors else 200

    async with fake_router() as router, serving(tmp_path, router, clock=Hasty()) as caller:
        router.decide = decide
        batch = await caller().ended(await caller().begin(batch_file(1), window="14d"))
    assert batch["request_counts"] == {"total": 1, "completed": 1 - failed, "failed": failed}
    assert router.tries["ask 0"] == 12 + errors + 1 - failed


async def test_a_line_that_is_refused_stands_in_the_error_file(tmp_path: Path) -> None:
    def decide(body: Mapping[str, Any], _tries: int) -> int:
        return 400 if question(body) == "ask 1" else 200

    async with fake_router() as router, serving(tmp_path, router) as caller:
        router.decide = decide
        batch = await caller().ended(await caller().begin(batch_file(3)))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert len(await caller().lines(batch["output_file_id"])) == 2
        (failed,) = await caller().lines(batch["error_file_id"])
    assert failed["custom_id"] == "line-1"
    assert failed["response"]["status_code"] == 400
    assert "told so" in failed["response"]["body"]["error"]["message"]


async def test_a_deadline_ends_a_batch_with_what_was_answered(tmp_path: Path) -> None:
    now = Now()

    def decide(body: Mapping[str, Any], _tries: int) -> int:
        return 200 if question(body) == "ask 0" else 503

    async with fake_router() as router, serving(tmp_path, router, clock=now) as caller:
        router.decide = decide
        name = await caller().begin(batch_file(3), window="60s")
        await until(lambda: len(router.asked) == 3)
        now.at += 61
        batch = await caller().ended(name)
        assert batch["status"] == "expired"
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        assert set(contents(await caller().lines(batch["output_file_id"]))) == {"line-0"}
        late = await caller().lines(batch["error_file_id"])
    assert [one["custom_id"] for one in late] == ["line-1", "line-2"]
    assert {one["error"]["code"] for one in late} == {"batch_expired"}


async def test_cancelling_ends_a_batch_and_what_it_asked(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router, lines=2) as caller:
        router.free.clear()
        name = await caller().begin(batch_file(5))
        await until(lambda: router.running == 2)
        status, answer = await caller().ask("POST", f"/v1/batches/{name}/cancel")
        assert (status, answer["status"]) == (200, "cancelling")
        batch = await caller().ended(name)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"]["failed"] == 5
        await until(lambda: router.running == 0)
        status, again = await caller().ask("POST", f"/v1/batches/{name}/cancel")
        assert (status, again["status"]) == (200, "cancelled")


async def test_what_was_answered_before_an_end_is_not_asked_again(tmp_path: Path) -> None:
    def decide(body: Mapping[str, Any], _tries: int) -> int:
        return 200 if int(question(body).split()[1]) < 10 else 503

    async with fake_router() as router:
        router.decide = decide
        async with serving(tmp_path, router) as caller:
            name = await caller().begin(batch_file(20))
            await until(lambda: len(router.tries) == 20)
            await wait_for_answers(caller(), name, 10)
        before = dict(router.tries)
        router.decide = lambda _body, _tries: 200
        async with serving(tmp_path, router) as caller:
            batch = await caller().ended(name)
            assert batch["status"] == "completed"
            assert len(contents(await caller().lines(batch["output_file_id"]))) == 20
    assert all(router.tries[f"ask {n}"] == before[f"ask {n}"] == 1 for n in range(10))


async def test_a_torn_answer_is_found_and_asked_again(tmp_path: Path) -> None:
    def decide(body: Mapping[str, Any], _tries: int) -> int:
        return 503 if question(body) == "ask 1" else 200

    async with fake_router() as router:
        router.decide = decide
        async with serving(tmp_path, router) as caller:
            name = await caller().begin(batch_file(2))
            await wait_for_answers(caller(), name, 1)
        with contextlib.closing(sqlite3.connect(tmp_path / "batches.db")) as database, database:
            database.execute("UPDATE lines SET said = ? WHERE state = 1", (b"torn",))
        router.decide = lambda _body, _tries: 200
        async with serving(tmp_path, router) as caller:
            batch = await caller().ended(name)
            assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            found = contents(await caller().lines(batch["output_file_id"]))
    assert found == {"line-0": "answer to ask 0", "line-1": "answer to ask 1"}
    assert router.tries["ask 0"] == 2


async def test_a_torn_input_file_fails_its_batch(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        _, file = await caller().upload(batch_file(2))
        path = tmp_path / "files" / file["id"]
        path.write_bytes(path.read_bytes()[:-7])
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        _, batch = await caller().ask("POST", "/v1/batches", json=body)
        ended = await caller().ended(batch["id"])
    assert ended["status"] == "failed"
    assert ended["errors"]["data"][0]["code"] == "input_file_damaged"
    assert not router.asked


def test_a_torn_database_stops_the_start_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        async with fake_router() as router, serving(tmp_path, router) as caller:
            await caller().ended(await caller().begin(batch_file(200)))

    asyncio.run(fill())
    path = tmp_path / "batches.db"
    raw = bytearray(path.read_bytes())
    raw[4096:8192] = b"\x55" * 4096
    path.write_bytes(raw)
    flags = ["--router=http://127.0.0.1:9", f"--folder={tmp_path}", "--address=127.0.0.1:0"]
    assert main(flags) == 1
    assert "Move the folder away" in capsys.readouterr().err


async def test_one_folder_has_one_process(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router):
        with pytest.raises(Damaged, match="in use by another"):
            async with running(tmp_path, router.url):
                pytest.fail("two processes would answer each line twice")


async def test_what_a_kill_left_unfinished_is_removed(tmp_path: Path) -> None:
    async with fake_router() as router:
        async with serving(tmp_path, router) as caller:
            _, kept = await caller().upload(batch_file(1))
        for name in ("new-0123", "file-without-a-row"):
            (tmp_path / "files" / name).write_text("half")
        async with serving(tmp_path, router):
            assert [one.name for one in (tmp_path / "files").iterdir()] == [kept["id"]]


async def test_tenants_do_not_see_each_others_files_and_batches(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        mine, other = caller("a"), caller("b")
        name = await mine.begin(batch_file(1))
        batch = await mine.ended(name)
        file = batch["input_file_id"]
        for method, path in (
            ("GET", f"/v1/files/{file}"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("GET", f"/v1/files/{batch['output_file_id']}/content"),
            ("GET", f"/v1/batches/{name}"),
            ("POST", f"/v1/batches/{name}/cancel"),
        ):
            assert (await other.ask(method, path))[0] == 404, path
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert (await other.ask("POST", "/v1/batches", json=body))[0] == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await other.ask("GET", path))[1]["data"] == []
            assert (await mine.ask("GET", path))[1]["data"] != []


async def test_every_route_has_a_rule(tmp_path: Path) -> None:
    async with fake_router() as router, running(tmp_path, router.url) as (worker, _, _working):
        assert set(routes_of(application(worker))) == rights.verbs(Listener.BATCHES)


async def test_every_route_asks_for_the_routers_token(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router, token="secret") as caller:
        for verb in rights.verbs(Listener.BATCHES) - rights.allowed(
            Listener.BATCHES, rights.CallerParty.ANYBODY
        ):
            method, path = verb.split()
            path = path.replace("{id}", "x")
            assert (await caller(token="wrong").ask(method, path))[0] == 401, verb
            assert (await caller(token="").ask(method, path))[0] == 401, verb
            assert (await caller(token="secret").ask(method, path))[0] in {200, 400, 404}, verb
        nobody = Caller(caller().url, caller().http, {"Authorization": "Bearer secret"})
        status, answer = await nobody.ask("GET", "/v1/files")
        assert (status, answer["error"]["code"]) == (400, "no_tenant")


def test_an_open_door_to_the_network_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--router=http://127.0.0.1:9", f"--folder={tmp_path}", "--address=0.0.0.0:0"]
    assert main(flags) == 1
    assert "--token-file" in capsys.readouterr().err


async def test_files_are_bounded_by_what_a_tenant_may_store(tmp_path: Path) -> None:
    async with fake_router() as router:
        async with serving(tmp_path, router, tenant_bytes=4000) as caller:
            status, first = await caller("a").upload(b"x" * 3000)
            assert status == 200
            status, answer = await caller("a").upload(b"x" * 2000)
            assert (status, answer["error"]["code"]) == (400, "storage_exceeded")
            assert (await caller("b").upload(b"x" * 3000))[0] == 200
        # A start counts what is there.
        async with serving(tmp_path, router, tenant_bytes=4000, total_bytes=7000) as caller:
            assert (await caller("a").upload(b"x" * 2000))[0] == 400
            assert (await caller("c").upload(b"x" * 2000))[0] == 400
            assert (await caller("a").ask("DELETE", f"/v1/files/{first['id']}"))[0] == 200
            assert (await caller("a").upload(b"x" * 2000))[0] == 200
    assert len(list((tmp_path / "files").iterdir())) == 2


async def test_a_form_brings_one_file(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router, tenant_bytes=4000) as caller:
        form = aiohttp.FormData({"purpose": "batch"})
        for size in (3000, 3000, 3000, 1):
            form.add_field("file", io.BytesIO(b"x" * size), filename="lines.jsonl")
        status, answer = await caller().ask("POST", "/v1/files", data=form)
        assert (status, answer["error"]["code"]) == (400, "two_files")
        assert not list((tmp_path / "files").iterdir())
        assert (await caller().upload(b"x" * 3000))[0] == 200


async def test_an_upload_takes_no_room_of_another_tenants_share(tmp_path: Path) -> None:
    share = 400_000
    async with (
        fake_router() as router,
        running(tmp_path, router.url, tenant_bytes=share, total_bytes=2 * share) as (
            worker,
            port,
            _,
        ),
        aiohttp.ClientSession() as http,
    ):
        a, b = (Caller(f"http://127.0.0.1:{port}", http, {"X-Rose-Tenant": one}) for one in "ab")
        end = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"x" * 300_000
            await end.wait()
            yield b"\r\n--x--\r\n"

        head = {**a.headers, "Content-Type": "multipart/form-data; boundary=x"}
        coming = asyncio.create_task(http.post(f"{a.url}/v1/files", data=slow(), headers=head))
        await until(lambda: any(one.stat().st_size for one in (tmp_path / "files").iterdir()))
        assert (await b.upload(b"x" * 390_000))[0] == 200
        # What comes takes of its own tenant's share, and of everybody's.
        assert worker.room("b", {"a": 300_000}) == 10_000
        assert worker.room("a", {"a": 300_000}) == 100_000
        assert worker.room("c", {"a": 300_000}) == 110_000
        end.set()
        (await coming).close()


async def test_answers_that_do_not_fit_are_errors_and_not_lost(tmp_path: Path) -> None:
    content = batch_file(10)
    async with (
        fake_router() as router,
        serving(tmp_path, router, tenant_bytes=len(content) + 700, lines=1) as caller,
    ):
        batch = await caller().ended(await caller().begin(content))
        done = await caller().lines(batch["output_file_id"])
        errors = await caller().lines(batch["error_file_id"])
    assert 0 < len(done) < 10
    assert len(done) + len(errors) == 10
    assert {one["error"]["code"] for one in errors} == {"storage_exceeded"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"input_file_id": "file-none"}, "no_such_file"),
        ({"endpoint": "/v1/embeddings"}, "invalid_endpoint"),
        ({"completion_window": "soon"}, "invalid_request"),
        ({"completion_window": 24}, "invalid_request"),
        ({"metadata": {"a": 1}}, "invalid_request"),
    ],
)
async def test_a_wrong_batch_is_refused_at_once(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        _, file = await caller().upload(batch_file(1))
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | change
        status, answer = await caller().ask("POST", "/v1/batches", json=body)
    assert 400 <= status < 500
    assert answer["error"]["code"] == code


async def test_a_wrong_file_is_refused_at_once(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        status, answer = await caller().upload(b"x", purpose="fine-tune")
        assert (status, answer["error"]["code"]) == (400, "wrong_purpose")
        status, answer = await caller().ask("POST", "/v1/files", json={})
        assert (status, answer["error"]["code"]) == (400, "no_form")
        status, answer = await caller().ask("POST", "/v1/files", data={"purpose": "batch"})
        assert status == 400
        head = {"Content-Type": "multipart/form-data; boundary=x"}
        for torn in (b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data\r\n\r\nhalf"):
            async with caller().http.post(
                f"{caller().url}/v1/files", data=torn, headers={**caller().headers, **head}
            ) as reply:
                assert reply.status == 400, torn
        assert not list((tmp_path / "files").iterdir())


async def test_wrong_lines_fail_the_batch_with_their_numbers(tmp_path: Path) -> None:
    content = batch_file(2) + b"{nonsense\n" + batch_file(1) + batch_file(1, model="gpt-9")
    async with fake_router() as router, serving(tmp_path, router) as caller:
        batch = await caller().ended(await caller().begin(content))
    assert batch["status"] == "failed"
    found = [(one["line"], one["code"]) for one in batch["errors"]["data"]]
    assert found == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "model_not_found"),
    ]
    assert not router.asked


async def test_lists_come_in_pages_the_newest_first(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        names = [(await caller().upload(batch_file(1)))[1]["id"] for _ in range(5)]
        _, page = await caller().ask("GET", "/v1/files?limit=2")
        assert [one["id"] for one in page["data"]] == names[:2:-1]
        assert page["has_more"]
        _, rest = await caller().ask("GET", f"/v1/files?limit=9&after={page['last_id']}")
        assert [one["id"] for one in rest["data"]] == names[2::-1]
        assert not rest["has_more"]
        assert (await caller().ask("GET", "/v1/files?after=none"))[0] == 400
        assert (await caller().ask("GET", "/v1/files?limit=x"))[0] == 400


async def test_a_file_that_a_live_batch_reads_stays(tmp_path: Path) -> None:
    now = Now()
    async with (
        fake_router() as router,
        running(tmp_path, router.url, clock=now, keep_seconds=10) as (worker, port, _),
        aiohttp.ClientSession() as http,
    ):
        router.free.clear()
        team = Caller(f"http://127.0.0.1:{port}", http, {"X-Rose-Tenant": "a"})
        name = await team.begin(batch_file(1))
        await until(lambda: router.running == 1)
        _, batch = await team.ask("GET", f"/v1/batches/{name}")
        file = batch["input_file_id"]
        status, answer = await team.ask("DELETE", f"/v1/files/{file}")
        assert (status, answer["error"]["code"]) == (400, "file_in_use")
        now.at += 11
        assert await worker.do(worker.journal.expire, now(), 10) == 0
        router.free.set()
        await team.ended(name)
        assert await worker.do(worker.journal.expire, now(), 10) == 1
        assert (await team.ask("GET", f"/v1/files/{file}"))[0] == 404
        assert worker.journal.used["a"] > 0


async def test_batches_are_kept_as_long_as_their_files(tmp_path: Path) -> None:
    now = Now()
    async with (
        fake_router() as router,
        running(tmp_path, router.url, clock=now, keep_seconds=10) as (worker, port, _),
        aiohttp.ClientSession() as http,
    ):
        team = Caller(f"http://127.0.0.1:{port}", http, {"X-Rose-Tenant": "a"})
        router.decide = lambda _body, _tries: 503
        slow = await team.begin(batch_file(1))
        now.at += 11
        router.decide = lambda _body, _tries: 200
        await team.ended(slow)
        # Its file is over; itself it has only just ended.
        assert await worker.do(worker.journal.expire, now(), 10) == 1
        assert [one["id"] for one in (await team.ask("GET", "/v1/batches"))[1]["data"]] == [slow]
        now.at += 10
        assert await worker.do(worker.journal.expire, now(), 10) == 2
        assert (await team.ask("GET", f"/v1/batches/{slow}"))[0] == 404
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("torn", [False, True])
async def test_a_batch_that_was_killed_while_its_files_were_written_ends(
    tmp_path: Path, torn: bool
) -> None:
    async with fake_router() as router:
        router.decide = lambda body, _tries: 503 if question(body) == "ask 1" else 200
        async with serving(tmp_path, router) as caller:
            name = await caller().begin(batch_file(2))
            await wait_for_answers(caller(), name, 1)
        with contextlib.closing(Journal(tmp_path)) as journal:
            assert journal.move(name, "finalizing", 5.0).status == "finalizing"
            output = output_line(f"{name}-2", "line-1", response=(200, b"{}"))
            journal.record([Answer(name, 2, output, failed=False)])
        if torn:
            with contextlib.closing(sqlite3.connect(tmp_path / "batches.db")) as database, database:
                database.execute("UPDATE lines SET said = ? WHERE number = 2", (b"torn",))
        router.decide = lambda _body, _tries: 200
        asked = router.tries["ask 1"]
        async with serving(tmp_path, router) as caller:
            batch = await caller().ended(name)
            assert len(await caller().lines(batch["output_file_id"])) == 2
    assert (batch["status"], batch["finalizing_at"]) == ("completed", 5)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert router.tries["ask 1"] == asked + torn


async def test_a_batch_is_finalizing_while_its_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, seen = Journal._write, []

    def watched(self: Journal, batch: StoredBatch, state: int) -> Any:  # noqa: ANN401  # _write's
        seen.append(self.batch(batch.id, batch.tenant).status)
        # Who cancels now comes too late, and undoes nothing.
        seen.append(self.move(batch.id, "cancelling", 1, only={"in_progress"}).status)
        return write(self, batch, state)

    monkeypatch.setattr(Journal, "_write", watched)
    async with fake_router() as router, serving(tmp_path, router) as caller:
        name = await caller().begin(batch_file(1))
        batch = await caller().ended(name)
        status, answer = await caller().ask("POST", f"/v1/batches/{name}/cancel")
    assert set(seen) == {"finalizing"}
    assert batch["status"] == "completed"
    assert (status, answer) == (200, batch)


def begun(journal: Journal, count: int) -> StoredBatch:
    """A batch of so many lines that wait."""
    batch = StoredBatch(
        id="batch_1", tenant="a", endpoint=CHAT, input_file="file-1", window="24h",
        status="in_progress", created=1, deadline=99, total=count,
    )  # fmt: skip
    journal.start(batch, [LineSpan(n, f"line-{n}", 0, 1) for n in range(1, count + 1)])
    return batch


def test_counts_are_of_the_answers_in_the_files(tmp_path: Path) -> None:
    """Answers may be written down until the very end, whatever the worker knew."""
    with contextlib.closing(Journal(tmp_path)) as journal:
        batch = begun(journal, 4)
        journal.record([Answer(batch.id, 1, b"1\n", failed=False)])
        journal.record([Answer(batch.id, 2, b"2\n", failed=True)])
        assert journal.finish(batch.id, "expired", 5, 10) == 2
        ended = journal.batch(batch.id, "a")
        assert (ended.status, ended.total, ended.answered, ended.failed) == ("expired", 4, 1, 3)
        assert journal.path(ended.output_file).read_bytes() == b"1\n"
        assert len(journal.path(ended.error_file).read_bytes().splitlines()) == 3
        # It has ended, and stays as it is.
        assert journal.finish(batch.id, "cancelled", 6, 10) is None
        assert journal.move(batch.id, "cancelling", 6) == ended == journal.batch(batch.id, "a")


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that Python held at most while it worked."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_answers_are_not_held_all_at_once(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path)) as journal:
        batch = begun(journal, 32)
        for number in range(1, 33):
            journal.record([Answer(batch.id, number, b"x" * (1 << 20) + b"\n", failed=False)])
        assert peak_of(lambda: journal.finish(batch.id, "completed", 5, 10)) < 8 << 20
        assert journal.path(journal.batch(batch.id, "a").output_file).stat().st_size > 32 << 20


def test_a_line_without_an_end_is_not_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as written:
        for _ in range(64):
            written.write(b"x" * (1 << 20))
        written.write(b"\n{wrong\n" + b" " * LONGEST_LINE + b"\n{wrong")
    found: list[Problem] = []

    def read() -> None:
        with path.open("rb") as opened:
            found.extend(check(_raw_lines(opened), CHAT, frozenset({"policy"})).problems)

    assert peak_of(read) < 40 << 20
    assert [(one.line, one.code) for one in found] == [
        (1, "line_too_long"),
        (2, "invalid_json_line"),
        (3, "line_too_long"),
        (4, "invalid_json_line"),
    ]


async def test_files_are_checked_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of one is written down before the next is read."""
    start, meeting, met = Journal.start, threading.Barrier(2), []

    def meet() -> None:
        try:
            met.append(meeting.wait(0.1))
        except threading.BrokenBarrierError:
            meeting.reset()

    def is_whole(_self: Journal, _file: StoredFile) -> bool:
        meet()
        return True

    def slow_start(self: Journal, batch: StoredBatch, places: list[LineSpan]) -> None:
        meet()
        start(self, batch, places)

    monkeypatch.setattr(Journal, "is_whole", is_whole)
    monkeypatch.setattr(Journal, "start", slow_start)
    async with fake_router() as router, serving(tmp_path, router) as caller:
        names = await asyncio.gather(*(caller(one).begin(batch_file(1)) for one in "abc"))
        for tenant, name in zip("abc", names, strict=True):
            assert (await caller(tenant).ended(name))["status"] == "completed"
    assert not met


@pytest.mark.parametrize("call", ["record", "start", "file", "line"])
async def test_a_disk_that_fails_ends_the_process_and_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Left running it would answer that it is well, and no line would move."""

    def full(*_: object) -> None:
        message = "database or disk is full"
        raise sqlite3.OperationalError(message)

    async with fake_router() as router:
        async with (
            running(tmp_path, router.url) as (_, port, working),
            aiohttp.ClientSession() as http,
        ):
            team = Caller(f"http://127.0.0.1:{port}", http, {"X-Rose-Tenant": "team"})
            _, file = await team.upload(batch_file(3))
            body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            router.models_free.clear()
            _, batch = await team.ask("POST", "/v1/batches", json=body)
            monkeypatch.setattr(Journal, call, full)
            router.models_free.set()
            async with asyncio.timeout(30):
                with pytest.raises(sqlite3.OperationalError, match="disk is full"):
                    await working
        monkeypatch.undo()
        async with serving(tmp_path, router) as caller:
            ended = await caller().ended(batch["id"])
            assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
            assert len(await caller().lines(ended["output_file_id"])) == 3


async def test_a_batch_whose_file_is_gone_fails(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        router.models_free.clear()
        _, file = await caller().upload(batch_file(1))
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        _, batch = await caller().ask("POST", "/v1/batches", json=body)
        with contextlib.closing(sqlite3.connect(tmp_path / "batches.db")) as database, database:
            database.execute("DELETE FROM files")
        router.models_free.set()
        ended = await caller().ended(batch["id"])
    assert ended["status"] == "failed"
    assert ended["errors"]["data"][0]["code"] == "no_such_file"


async def test_what_nobody_foresaw_fails_its_batch_or_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_line, real_whole = Journal.line, Journal.is_whole

    def line(self: Journal, batch: StoredBatch, number: int) -> bytes:
        if number == 2:
            raise RuntimeError("line")
        return real_line(self, batch, number)

    def is_whole(self: Journal, file: StoredFile) -> bool:
        if file.tenant == "b":
            raise RuntimeError("file")
        return real_whole(self, file)

    monkeypatch.setattr(Journal, "line", line)
    monkeypatch.setattr(Journal, "is_whole", is_whole)
    async with fake_router() as router, serving(tmp_path, router) as caller:
        ended = await caller("a").ended(await caller("a").begin(batch_file(3)))
        failed = await caller("b").ended(await caller("b").begin(batch_file(3)))
        (error,) = await caller("a").lines(ended["error_file_id"])
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert error["error"]["code"] == "internal_error"
    assert failed["errors"]["data"][0]["code"] == "internal_error"
    assert "RuntimeError: line" in caplog.text
    assert "RuntimeError: file" in caplog.text


async def test_metrics_say_what_became_of_lines(tmp_path: Path) -> None:
    async with fake_router() as router, serving(tmp_path, router) as caller:
        name = 'rose_batches_lines_total{outcome="answered"}'

        async def count() -> float:
            async with caller().http.get(f"{caller().url}/metrics") as reply:
                text = await reply.text()
            found = re.search(re.escape(name) + r" (\S+)", text)
            return float(found[1]) if found else 0.0

        before = await count()
        await caller().ended(await caller().begin(batch_file(4)))
        assert await count() == before + 4


def test_an_answer_tells_whose_it_is() -> None:
    answer = json.loads(batch_file(1))["body"]
    assert answer_to(answer)["choices"][0]["message"]["content"] == "answer to ask 0"
