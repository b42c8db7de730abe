"""What an answer of the API server means, whoever wrote it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_operator.errors import ApiRefused, ApiUnavailable, NotLeader
from rose_operator.kube.api import Api, ObjectKind
from rose_operator.metrics import REGISTRY
from rose_wire.api_server import ApiServer, access_to

FOUND = {"metadata": {"name": "a", "namespace": "rose-system"}}


@dataclass(frozen=True)
class Answer:
    """What an API server answers; text is plain, as what stands before it writes."""

    status: int = 200
    text: str = ""
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> web.Response:
        if self.body is not None:
            return web.json_response(self.body, status=self.status, headers=self.headers)
        return web.Response(text=self.text, status=self.status, headers=self.headers)


@asynccontextmanager
async def api(
    *answers: Answer,
    may_write: Callable[[], bool] = lambda: True,
    asked: list[str] | None = None,
) -> AsyncIterator[Api]:
    """An API server that gives these answers in turn, the last one for ever."""
    queue = list(answers)

    async def answer(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.method)
        return (queue.pop(0) if len(queue) > 1 else queue[0]).response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as served:
        server = ApiServer(access_to(str(served.make_url("/"))), trust_env=False)
        yield Api(server, "rose-system", may_write)
        await server.close()


async def test_overload_that_is_told_in_plain_text_is_waited_out() -> None:
    busy = Answer(429, "Too many requests", headers={"Retry-After": "0"})
    waiting = Answer(429, "Too many requests", headers={"Retry-After": "1"})
    async with api(waiting, Answer(body=FOUND)) as server:
        raw = await server.get(ObjectKind.SLOT, "a")
    assert raw is not None
    assert raw["metadata"]["name"] == "a"
    async with api(busy) as server:
        with pytest.raises(ApiUnavailable, match="429"):
            await server.get(ObjectKind.SLOT, "a")


async def test_a_write_that_was_put_off_is_not_sent_when_another_leads_by_then() -> None:
    waiting = Answer(429, "Too many requests", headers={"Retry-After": "1"})
    asked: list[str] = []
    leads = iter([True, False])
    async with api(waiting, may_write=lambda: next(leads), asked=asked) as server:
        with pytest.raises(NotLeader, match="before the apply of a RolloutSlot was sent"):
            await server.apply(ObjectKind.SLOT, FOUND)
    assert asked == ["PATCH"]


async def test_whoever_does_not_lead_may_read() -> None:
    async with api(Answer(body=FOUND), may_write=lambda: False) as server:
        assert await server.get(ObjectKind.SLOT, "a") is not None


@pytest.mark.parametrize("code", [401, 403])
async def test_a_refusal_in_plain_text_concerns_its_own_object(code: int) -> None:
    async with api(Answer(code, "no")) as server:
        with pytest.raises(ApiRefused) as refused:
            await server.get(ObjectKind.SLOT, "a")
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("failed to create typed live object (a/b; x): .spec.slots: expected map", ApiRefused),
        ("etcdserver: request timed out", ApiUnavailable),
    ],
)
async def test_an_object_that_fits_no_type_is_refused_and_a_broken_server_is_not(
    text: str, meaning: type[Exception]
) -> None:
    status: dict[str, object] = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    status |= {"message": text, "reason": "InternalError", "code": 500}
    manifest = {"metadata": {"name": "b", "namespace": "a"}, "status": {}}
    async with api(Answer(500, body=status)) as server:
        with pytest.raises(meaning, match=text[:20]):
            await server.apply_status(ObjectKind.LEASE, manifest)


async def test_an_object_that_is_missing_in_plain_text_is_none() -> None:
    async with api(Answer(404, "no")) as server:
        assert await server.get(ObjectKind.SLOT, "a") is None


@pytest.mark.parametrize("why", [ApiRefused, ApiUnavailable])
def test_failures_are_counted_from_zero(why: type[Exception]) -> None:
    """A panel and an alert need the series before its first failure."""
    counted = REGISTRY.get_sample_value("rose_operator_api_failures_total", {"why": why.__name__})
    assert counted is not None
