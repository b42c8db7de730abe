"""No request of the matrix ends an engine: real SGLang, and the router as it runs in production."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import msgspec
import pytest

from bench.fire.poison import poisoned
from rose_agent.host.memory.sizing import vocabulary
from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.wire.routing import EngineKind
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import owner
from rose_router.config import Settings
from rose_router.main import running
from tests.router.scripts import RECIPE, folder
from tests.router.test_real_engines import VERSION, update_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    with start_engine(tmp_path_factory.mktemp("poison"), RECIPE, version=VERSION) as started:
        yield started


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_no_request_of_the_matrix_ends_an_engine(
    engine: RealEngine, kind: EngineKind
) -> None:
    reported = msgspec.structs.replace(
        update_of(engine, "only"), kind=kind, vocabulary=vocabulary(engine.model)
    )
    queue = QueueLimits(seconds=20)
    settings = Settings(lease="team/grpo", attach_token="secret", queue=queue, tokenizer=folder())
    async with (
        aiohttp.ClientSession() as http,
        running(settings) as router,
        owner(router.attach_port, reported, "secret"),
    ):
        url = f"http://127.0.0.1:{router.http_port}"
        dead = lambda: [] if engine.process.poll() is None else ["only"]  # noqa: E731
        assert await poisoned(http, url, "", dead) == []
