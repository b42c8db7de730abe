"""Data routes of engines: what an owner may say they are, for they end up in heads we write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_dev.waiting import until
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import HttpEngineClient, Target
from rose_router.errors import LegLost
from rose_wire.errors import Refused
from tests.router.conftest import LEASE, Stage

Make = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.mark.parametrize(
    ("url", "token", "word"),
    [
        ("http://127.0.0.1:9", "good\r\nX-Smuggled: yes", "token"),
        ("http://127.0.0.1:9", "two words", "token"),
        ("http://127.0.0.1:9/a\r\nX-Smuggled: yes", "good", "url"),
        ("http://127.0.0.1:9/\u00e9", "good", "url"),
        ("http://127.0.0.1:port", "good", "url"),
        ("file:///etc/passwd", "good", "url"),
    ],
)
async def test_a_route_that_could_break_out_of_a_request_head_is_refused(
    stage: Make, url: str, token: str, word: str
) -> None:
    async with stage() as s:
        update = EngineUpdate("x", EngineKind.BORROWED, LEASE, url, token, gate_open=True, cap=1)
        async with owner(s.router.attach_port, update) as made:
            await until(made.task.done)
            error = made.task.exception()
        assert isinstance(error, Refused)
        assert f"engine x: {word}: " in str(error)
        assert "X-Smuggled: yes" not in str(error).splitlines()
        assert token not in str(error)
        assert not len(s.router.service.fleet)


async def test_a_target_that_cannot_be_is_never_dialled() -> None:
    client = HttpEngineClient(Connections())
    target = Target("http://127.0.0.1:9", "a\r\nb")
    with pytest.raises(LegLost, match="token: expected visible ASCII"):
        await client.stream(target, {}, lambda _: True)
    assert await client.abort(target, "x")
