"""``/s/NAME/...``: of a harness nothing but base URL and key is set, and its rows are its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
from yarl import URL

from rose_core import rights
from rose_core.rights import CallerParty, Listener
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder
from tests.router.test_agents import ask, messages, result, user
from tests.router.test_callers import LEASE, TURNS, bearer, keys
from tests.router.test_turn_cost import ASKED

Json = dict[str, Any]
Make = Callable[..., AbstractAsyncContextManager[Stage]]


async def played(s: Stage, prefix: str) -> list[Json]:
    """The script's whole task below a session's URL; the answers."""
    talk, answers = [user("Look into a.txt.")], []
    for outcome in ("", "one", None):
        answers.append(await ask(s, f"{prefix}/v1/messages?beta=true", messages(*talk)))
        if outcome is not None:
            block = answers[-1]["content"][-1]
            talk += [{"role": "assistant", "content": answers[-1]["content"]}]
            talk += [result(block, outcome)]
    return answers


async def test_runs_that_differ_in_their_base_url_alone_have_rows_of_their_own(stage: Make) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        names = [f"run-{number}" for number in range(3)]
        answers = dict(
            zip(names, await asyncio.gather(*(played(s, f"/s/{n}") for n in names)), strict=True)
        )
        rows = {name: (await s.get(f"/sessions/{name}/rows"))["rows"] for name in names}
    for name in names:
        (row,) = rows[name]
        own = [one["id"].removeprefix("msg_") for one in answers[name]]
        assert [one["rid"] for one in row["turns"]] == own
        assert {one["rose"]["session"] for one in answers[name]} == {name}
    assert len({one["id"] for name in names for one in answers[name]}) == 9


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASKED)
async def test_each_dialects_turns_are_the_sessions(stage: Make, path: str, stream: bool) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine()
        own = {"X-Session-ID": "a-harness's", "X-SMG-Routing-Key": "another"}
        body = {"model": "m", "stream": stream, **ASKED[path]}
        for prefix, headers in (("/s/a%20b%2Fc%C3%A9", own), ("", {"X-Rose-Session": "plain"})):
            async with s.post(prefix + path, body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
        sessions = [turn["session"] for turn in s.router.service.ledger.recent]
    assert sorted(sessions) == ["a b/c\u00e9", "plain"]


async def test_what_a_body_says_of_its_session_wins_as_over_a_header(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        body = {**ASKED["/generate"], "rose": {"session": "said"}}
        await ask(s, "/s/url/generate", body)
        body = {**ASKED["/generate"], "session_id": "harness's"}
        await ask(s, "/s/url/generate", body)
        sessions = [turn["session"] for turn in s.router.service.ledger.recent]
    assert sorted(sessions) == ["said", "url"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("x" * 512, 200),
        ("x" * 513, 400),
        ("", 404),
        ("%20", 404),
        ("a%0Ab", 404),
        ("%FF", 404),
        ("a?x=", 404),
        ("a/b", 404),
    ],
)
async def test_a_name_is_one_that_a_header_could_say(stage: Make, name: str, status: int) -> None:
    async with stage() as s:
        await s.engine()
        address = URL(f"{s.url}/s/{name}/generate", encoded=True)
        async with s.http.post(address, json=ASKED["/generate"]) as reply:
            assert reply.status == status
            error = await reply.json()
    assert status == 200 or error["error"]["message"]


async def test_a_header_of_bytes_that_are_no_text_is_passed_over(stage: Make) -> None:
    body = msgspec.json.encode(ASKED["/generate"])
    head = b"POST /s/run/generate HTTP/1.1\r\nHost: r\r\nX-Title: \xe9\r\nConnection: close\r\n"
    async with stage() as s:
        await s.engine()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        writer.close()
        (turn,) = s.router.service.ledger.recent
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert turn["session"] == "run"


VERBS = sorted(one for one in rights.verbs(Listener.ROUTER) if " /" in one)
HARNESS = rights.paths(rights.allowed(Listener.ROUTER, CallerParty.HARNESS))


@pytest.mark.parametrize("audience", [LEASE, TURNS, None])
async def test_a_sessions_url_opens_what_its_route_opens_to_a_harness(
    stage: Make, audience: str | None
) -> None:
    """Whatever is not a harness's is as any path that is not there, also for the trainer."""
    missing = {LEASE: 404, TURNS: 403, None: 401}[audience]
    shown = {} if audience is None else bearer(audience)
    async with stage(accounts=keys(), tokenizer=folder()) as s:
        await s.engine()
        for verb in VERBS:
            method, path = verb.split(" ")
            asked = path.replace("{id}", "m").replace("{key}", "k")
            got = []
            for prefix in ("", "/s/run"):
                target = s.url + prefix + asked
                async with s.http.request(method, target, headers=shown, data=b"{") as reply:
                    got.append(reply.status)
            if path in HARNESS:
                assert got[0] == got[1], verb
            else:
                assert got[1] == missing, verb


async def test_a_refusal_below_a_session_is_in_the_routes_own_words(stage: Make) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine()
        for path in ASKED:
            answers = []
            for prefix in ("", "/s/run"):
                async with s.post(prefix + path, {"messages": 7, "input": 7}) as reply:
                    answers.append((reply.status, await reply.json()))
            assert answers[0] == answers[1]
            assert answers[0][0] == 400


async def test_sessions_are_listed_with_what_they_are_known_by(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        nobody = await s.get("/sessions")
        await played(s, "")
        await played(s, "/s/run")
        await ask(s, "/v1/responses", {"input": "go", "session_id": "said"})
        await ask(
            s, "/v1/responses", {"input": "go", "rose": {"job": "other", "session": "theirs"}}
        )
        await ask(s, "/v1/responses", {"input": "go", "rose": {"record": False, "session": "off"}})
        first = (await s.get("/turns"))["recent"][0]["id"]
        found = await s.get("/sessions")
        async with s.http.get(s.url + "/sessions", headers={"X-Rose-Job": "other"}) as reply:
            theirs = (await reply.json())["sessions"]
        rows = [
            (await s.get(f"/sessions/{one['session']}/rows"))["rows"] for one in found["sessions"]
        ]
        monkeypatch.setattr("rose_router.http.routes.rows._MOST_SESSIONS", 2)
        fewer = await s.get("/sessions")
    assert nobody == {"sessions": [], "left_out": 0}
    told = [(one["session"], one["session_by"], one["turns"]) for one in found["sessions"]]
    assert told == [("said", "session_id", 1), ("run", "X-Rose-Session", 3), (first, "rid", 3)]
    assert found["sessions"][-1]["first_turn"] == first
    assert [one["session"] for one in theirs] == ["theirs"]
    assert [sum(len(row["turns"]) for row in one) for one in rows] == [1, 3, 3]
    assert fewer == {"sessions": found["sessions"][:2], "left_out": 1}
