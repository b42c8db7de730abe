"""Every request of the matrix is refused with a status that no client asks again after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from bench.fire.poison import POISON, poisoned
from tests.router.conftest import Stage
from tests.router.scripts import folder


async def test_every_request_of_the_matrix_is_refused_before_an_engine_sees_it(
    stage: Callable[..., AbstractAsyncContextManager[Stage]],
) -> None:
    async with stage(tokenizer=folder()) as s:
        engine = await s.engine(vocabulary=500)
        assert await poisoned(s.http, s.url, "", list) == []
        assert engine.scheduler.counters.requests == len(POISON)  # the ordinary turns between them
