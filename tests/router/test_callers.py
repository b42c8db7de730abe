"""Service accounts call with tokens for one lease; a harness's token opens turns and no more."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from rose_core.wire.enrolment import RouterCaller
from rose_router.callers import NamedCallers
from rose_router.http.admission.bearer import CONTROL, Tokens
from rose_wire.service_accounts import ServiceAccounts
from tests.router.conftest import Stage
from tests.router.scripts import folder

Make = Callable[..., AbstractAsyncContextManager[Stage]]
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
LEASE, TURNS = "rose-lease/team/grpo", "rose-turns/team/grpo"
ASK = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 2}}


def keys(now: Callable[[], float] = time.time) -> ServiceAccounts:
    public = jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    signed = msgspec.json.encode({"keys": [{**public, "kid": "k", "use": "sig"}]})
    return ServiceAccounts([signed], now)


def bearer(
    audience: str = LEASE, account: str = "team:trainer", **claims: object
) -> dict[str, str]:
    found = {
        "sub": f"system:serviceaccount:{account}",
        "aud": [audience],
        # Some are made when tests are collected, long before they run.
        "exp": int(time.time()) + 24 * 3600,
    }
    token = jwt.encode({**found, **claims}, KEY, "RS256", headers={"kid": "k"})
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("audience", [LEASE, TURNS])
async def test_a_service_account_of_the_leases_namespace_may_ask_for_turns(
    stage: Make, audience: str
) -> None:
    async with stage(accounts=keys()) as s:
        await s.engine()
        async with s.post("/generate", ASK, headers=bearer(audience)) as reply:
            assert reply.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("rose-lease/team/other"),
        bearer("rose-weights"),
        bearer(account="rival:trainer"),
        bearer(exp=1),
        {"Authorization": "Bearer x.y.z"},
    ],
)
async def test_nobody_else_is_heard(stage: Make, headers: dict[str, str]) -> None:
    async with stage(accounts=keys()) as s:
        await s.engine()
        async with s.post("/generate", ASK, headers=headers) as reply:
            assert reply.status == 401


@pytest.mark.parametrize(
    ("headers", "wrong"),
    [
        ({}, "no bearer token came with the request"),
        (bearer("rose-weights"), "is for the audience rose-weights, not for rose-lease/team/grpo"),
        (bearer(account="rival:trainer"), "of system:serviceaccount:rival:trainer, not of"),
        (bearer(exp=1), "expired at 1970-01-01T00:00:01Z"),
        (bearer("rose-weights", exp=1), "expired at 1970-01-01T00:00:01Z"),
        ({"Authorization": "Bearer x.y.z"}, "none that this cluster makes"),
        (
            {"Authorization": bearer(exp=4_000_000_000)["Authorization"][:-8] + "AAAAAAAA"},
            "not signed with a key of this cluster",
        ),
    ],
)
async def test_who_is_not_heard_is_told_why_and_what_to_do(
    stage: Make, headers: dict[str, str], wrong: str
) -> None:
    async with stage(accounts=keys()) as s, s.post("/generate", ASK, headers=headers) as reply:
        answer = (await reply.json())["message"]
    assert wrong in answer
    make = "kubectl create token ACCOUNT --namespace team --audience rose-lease/team/grpo"
    assert make in answer


def named(**changes: object) -> RouterCaller:
    fields = {"name": "laptop", "sha256": hashlib.sha256(b"handed-out").hexdigest(), **changes}
    return msgspec.convert(fields, RouterCaller)


HANDED_OUT = {"Authorization": "Bearer handed-out"}


async def test_whom_the_lease_names_is_heard_until_it_is_taken_off_the_list(stage: Make) -> None:
    callers = NamedCallers([named()])
    async with stage(accounts=keys(), callers=callers, authenticate=True) as s:
        await s.engine()
        for path, body in (("/generate", ASK), ("/pause_generation", {"mode": "keep"})):
            async with s.post(path, body, headers=HANDED_OUT) as reply:
                assert reply.status == 200
        async with s.post("/continue_generation", {}, headers=HANDED_OUT) as reply:
            assert reply.status == 200
        callers.renew([])
        async with s.post("/generate", ASK, headers=HANDED_OUT) as reply:
            assert reply.status == 401
        async with s.post("/generate", ASK, headers=bearer()) as reply:
            assert reply.status == 200


async def test_a_caller_for_turns_only_gets_no_further(stage: Make) -> None:
    async with stage(callers=NamedCallers([named(turns_only=True)]), authenticate=True) as s:
        await s.engine()
        async with s.post("/generate", ASK, headers=HANDED_OUT) as reply:
            assert reply.status == 200
        async with s.post("/pause_generation", {"mode": "keep"}, headers=HANDED_OUT) as reply:
            assert reply.status == 403


def test_a_credential_ends_with_its_time() -> None:
    now = [100.0]
    callers = NamedCallers([named(expires=101.0)], now=lambda: now[0])
    assert callers.find("handed-out") is not None
    assert callers.find("handed-out2") is None
    assert callers.find(named().sha256) is None, "the hash itself opens nothing"
    now[0] = 101.0
    assert callers.find("handed-out") is None


def test_a_token_ends_at_its_second_although_it_was_good_a_moment_before() -> None:
    now = [time.time()]
    until = int(now[0]) + 30
    tokens = Tokens(accounts=keys(lambda: now[0]), lease="team/grpo")
    shown = bearer(exp=until)["Authorization"]
    assert tokens.caller_of(shown) is not None
    now[0] = until - 0.5
    assert tokens.caller_of(shown) is not None
    now[0] = until
    assert tokens.caller_of(shown) is None


def test_a_token_that_ends_after_any_time_is_none_and_no_error_of_ours() -> None:
    token = jwt.encode({"aud": [LEASE], "exp": 10**400}, KEY, "RS256", headers={"kid": "k"})
    accounts = keys()
    assert accounts.account_of(token, LEASE) is None
    assert "none that this cluster makes" in accounts.complaint(token, LEASE, "team")


def test_keys_that_are_withdrawn_open_nothing_from_that_moment_on() -> None:
    accounts = keys()
    tokens = Tokens(accounts=accounts, lease="team/grpo")
    shown = bearer()["Authorization"]
    assert tokens.caller_of(shown) is not None
    accounts.renew([])
    assert tokens.caller_of(shown) is None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_taken_off_the_list_is_cut_in_the_middle_of_an_answer(
    stage: Make, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "rose_router.access")
    callers = NamedCallers([named()])
    long = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 4000}, "stream": stream}
    async with stage(accounts=keys(), callers=callers, authenticate=True) as s:
        engine = await s.engine(token_seconds=0.01)
        async with asyncio.timeout(40):
            asking = asyncio.create_task(_read(s, long))
            while not engine.scheduler.running:  # noqa: ASYNC110  # another task's
                await asyncio.sleep(0.02)
            callers.renew([])
            with pytest.raises(aiohttp.ClientError):
                await asking
            while len(s.router.service.ledger):  # noqa: ASYNC110  # another task's
                await asyncio.sleep(0.02)
    assert "cut, the caller is no longer heard" in caplog.text
    assert "handed-out" not in caplog.text


async def _read(s: Stage, body: object) -> bytes:
    async with s.post("/generate", body, headers=HANDED_OUT) as reply:
        found: bytes = await reply.read()
        return found


async def test_a_router_told_to_ask_hears_nobody_while_it_knows_no_token(stage: Make) -> None:
    async with stage(authenticate=True) as s:
        await s.engine()
        for headers in ({}, bearer(), {"Authorization": "Bearer "}):
            async with s.post("/generate", ASK, headers=headers) as reply:
                assert reply.status == 401
        async with s.http.get(s.url + "/ready") as reply:
            assert reply.status == 200


async def test_a_token_for_turns_opens_no_route_that_concerns_all_turns(stage: Make) -> None:
    async with stage(accounts=keys()) as s:
        for path in sorted(CONTROL):
            async with s.post(path, {}, headers=bearer(TURNS)) as reply:
                assert reply.status == 403, path
        async with s.post("/abort_request", {"abort_all": True}, headers=bearer(TURNS)) as reply:
            assert reply.status == 403
        async with s.post("/abort_request", {"rid": "mine"}, headers=bearer(TURNS)) as reply:
            assert reply.status == 200


async def test_who_changes_what_concerns_all_turns_is_written_down(
    stage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rose_router.access")
    async with stage(accounts=keys()) as s:
        async with s.post("/pause_generation", {"mode": "keep"}, headers=bearer()) as reply:
            assert reply.status == 200
        async with s.post("/continue_generation", {}, headers=bearer(TURNS)) as reply:
            assert reply.status == 403
        async with s.post("/pause_generation", {}, headers=HANDED_OUT) as reply:
            assert reply.status == 401
        async with s.post("/generate", {}, headers=HANDED_OUT) as reply:
            assert reply.status == 401
    lines = [one.getMessage() for one in caplog.records if one.name == "rose_router.access"]
    account, lease = "serviceaccount team/trainer", "of lease team/grpo"
    assert lines == [
        f"/pause_generation {lease} by {account} from 127.0.0.1: 200",
        f"/continue_generation {lease} by {account} from 127.0.0.1: 403 TurnsOnly",
        f"/pause_generation {lease} by nobody known from 127.0.0.1: 401 NotAllowed",
    ]


@pytest.mark.parametrize("path", ["/generate", "/v1/messages"])
@pytest.mark.parametrize(("audience", "job"), [(LEASE, "alpha"), (TURNS, "")])
async def test_a_token_for_turns_does_not_choose_whose_they_are(
    stage: Make, path: str, audience: str, job: str
) -> None:
    body = ASK if path == "/generate" else {"messages": [{"role": "user", "content": "go"}]}
    async with stage(accounts=keys(), tokenizer=folder(), context_tokens=600) as s:
        await s.engine()
        hinted = {**body, "rose": {"job": "alpha", "session": "s"}}
        async with s.post(path, hinted, headers=bearer(audience)) as reply:
            assert reply.status == 200, await reply.text()
        (turn,) = s.router.service.ledger.recent
        rows = s.url + "/sessions/s/rows"
        asking = {**bearer(), "X-Rose-Job": "alpha"}
        async with s.http.get(rows, headers=asking) as reply:
            found = reply.status == 200
    assert turn["job"] == job
    assert found == (path == "/v1/messages" and bool(job)), "rows of a job are its own"
