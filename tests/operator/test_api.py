"""What an answer of the API server means, whoever wrote it."""

from collections.abc import Callable

import httpx
import pytest
from lightkube import AsyncClient, SingleConfig
from lightkube.config.models import Cluster, Context, User

from rose_operator.errors import ApiRefused, ApiUnavailable, NotLeader
from rose_operator.kube.api import Api, ObjectKind
from rose_operator.metrics import REGISTRY

PLAIN = {"Content-Type": "text/plain; charset=utf-8"}


def api(
    *answers: httpx.Response,
    may_write: Callable[[], bool] = lambda: True,
    asked: list[str] | None = None,
) -> Api:
    """An API server that gives these answers in turn, the last one for ever."""
    queue = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request.method)
        return queue.pop(0) if len(queue) > 1 else queue[0]

    config = SingleConfig(
        context_name="x",
        context=Context(cluster="x"),
        cluster=Cluster(server="http://api"),
        user=User(),
    )
    client = AsyncClient(config=config, trust_env=False, transport=httpx.MockTransport(answer))
    return Api(client, "rose-system", may_write)


async def test_overload_that_is_told_in_plain_text_is_waited_out() -> None:
    busy = httpx.Response(429, text="Too many requests", headers=PLAIN | {"Retry-After": "0"})
    waiting = httpx.Response(429, text="Too many requests", headers=PLAIN | {"Retry-After": "1"})
    found = httpx.Response(200, json={"metadata": {"name": "a", "namespace": "rose-system"}})
    raw = await api(waiting, found).get(ObjectKind.SLOT, "a")
    assert raw is not None
    assert raw["metadata"]["name"] == "a"
    with pytest.raises(ApiUnavailable, match="429"):
        await api(busy).get(ObjectKind.SLOT, "a")


async def test_a_write_that_was_put_off_is_not_sent_when_another_leads_by_then() -> None:
    waiting = httpx.Response(429, text="Too many requests", headers=PLAIN | {"Retry-After": "1"})
    asked: list[str] = []
    leads = iter([True, False])
    server = api(waiting, may_write=lambda: next(leads), asked=asked)
    with pytest.raises(NotLeader, match="before the apply of a RolloutSlot was sent"):
        await server.apply(ObjectKind.SLOT, {"metadata": {"name": "a", "namespace": "rose-system"}})
    assert asked == ["PATCH"]


async def test_whoever_does_not_lead_may_read() -> None:
    found = httpx.Response(200, json={"metadata": {"name": "a", "namespace": "rose-system"}})
    assert await api(found, may_write=lambda: False).get(ObjectKind.SLOT, "a") is not None


@pytest.mark.parametrize("code", [401, 403])
async def test_a_refusal_in_plain_text_concerns_its_own_object(code: int) -> None:
    with pytest.raises(ApiRefused) as refused:
        await api(httpx.Response(code, text="no", headers=PLAIN)).get(ObjectKind.SLOT, "a")
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
    with pytest.raises(meaning, match=text[:20]):
        await api(httpx.Response(500, json=status)).apply_status(ObjectKind.LEASE, manifest)


async def test_an_object_that_is_missing_in_plain_text_is_none() -> None:
    assert (
        await api(httpx.Response(404, text="no", headers=PLAIN)).get(ObjectKind.SLOT, "a") is None
    )


@pytest.mark.parametrize("why", [ApiRefused, ApiUnavailable])
def test_failures_are_counted_from_zero(why: type[Exception]) -> None:
    """A panel and an alert need the series before its first failure."""
    counted = REGISTRY.get_sample_value("rose_operator_api_failures_total", {"why": why.__name__})
    assert counted is not None
