"""Trainers push weights to real parts: SGLang, a store, ``rose ingest``, a commit in the engine.

The pushed checkpoint makes every greedy token another one, so each token tells which weights
sampled it; an engine that stands by itself says what it ought to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from safetensors.torch import load_file

from rose_core.wire.routing import EngineKind
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.owners import owner
from rose_dev.waiting import until
from rose_router.config import Settings
from rose_router.main import Running, running
from rose_trainer.adapters.ingest import Ingest
from rose_trainer.publisher import Publisher
from tests.router.pushing import json_of
from tests.router.replays import AReaL, PrimeRl
from tests.router.test_real_engines import PROMPT, VERSION, follow, update_of, write_changed
from tests.trainer.test_publisher import RunningStore

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

MOST = 120
PUSHED = "run@1.1"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    with start_engine(tmp_path_factory.mktemp("trainers"), version=VERSION) as started:
        yield started


@dataclass
class Fleet:
    """A lease of one dedicated engine that follows a store, and ``rose ingest`` before it."""

    router: Running
    http: aiohttp.ClientSession
    engine: RealEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    async def alone(self, prompt: list[int], most: int) -> list[int]:
        """What the engine's weights make of a prompt, the router not asked."""
        sampling = {"max_new_tokens": most, **GREEDY}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = await json_of(self.http.post(f"{self.engine.url}/generate", json=body))
        tokens: list[int] = answer["output_ids"]
        return tokens

    def written(self) -> int:
        """Tokens of the turn that runs."""
        legs = [leg for one in self.router.service.fleet for leg in one.legs.values()]
        return sum(leg.tokens for leg in legs)

    async def judge(self, out: list[int], versions: list[str], base: list[int]) -> None:
        """Every token is one that its own version samples after those before it."""
        cut = versions.index(PUSHED)
        assert versions == [VERSION] * cut + [PUSHED] * (MOST - cut)
        assert cut > 0
        assert out[:cut] == base[:cut]
        assert out[cut:] == await self.alone([*PROMPT, *out[:cut]], MOST - cut)
        assert out != base


@asynccontextmanager
async def fleet_of(engine: RealEngine, folder: Path) -> AsyncIterator[Fleet]:
    """Everything between a trainer's push and the engine."""
    async with AsyncExitStack() as stack:
        store = RunningStore(folder / "store")
        stack.callback(store.close)
        publisher = stack.enter_context(Publisher(store.address, "run", token="t"))
        model = await asyncio.to_thread(load_file, engine.model / "model.safetensors")
        await asyncio.to_thread(publisher.wait, publisher.publish(0, model), 60)
        runner = web.AppRunner(Ingest(publisher, [folder]).application())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        settings = Settings(
            lease="team/grpo", model="policy", attach_token="secret", ingest_url=address
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = await stack.enter_async_context(running(settings))
        said = msgspec.structs.replace(
            update_of(engine, "ours"), kind=EngineKind.DEDICATED, version=""
        )
        ours = await stack.enter_async_context(owner(router.attach_port, said, "secret"))
        following = asyncio.create_task(follow(engine, store, ours, folder / "bundles"))
        fleet = Fleet(router, http, engine)
        try:
            # Answered once the engine holds the version that the store has.
            await json_of(http.post(f"{fleet.url}/generate", json=warm_up()))
            yield fleet
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await slow_down(http, engine, None)


def warm_up() -> dict[str, object]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}


async def slow_down(http: aiohttp.ClientSession, engine: RealEngine, seconds: float | None) -> None:
    await http.post(f"{engine.url}/slow_down", json={"forward_sleep_time": seconds})


async def test_areal_goes_on_from_its_partial_tokens_with_the_weights_it_pushed(
    engine: RealEngine, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "update"
    await asyncio.to_thread(write_changed, engine.model, checkpoint)
    async with fleet_of(engine, tmp_path) as fleet:
        base = await fleet.alone(PROMPT, MOST)
        await slow_down(fleet.http, engine, 0.1)
        areal = AReaL(fleet.http, fleet.url, PROMPT, GREEDY)
        paused = asyncio.Event()
        paused.set()
        asked = asyncio.create_task(areal.generates(MOST, paused))
        await until(lambda: fleet.written() > 8)
        await areal.updates(checkpoint, paused)
        await slow_down(fleet.http, engine, None)
        out, versions = await asked
        await fleet.judge(out, versions, base)


async def test_prime_rl_changes_the_weights_under_a_turn_that_runs(
    engine: RealEngine, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step_1"
    await asyncio.to_thread(write_changed, engine.model, checkpoint)
    async with fleet_of(engine, tmp_path) as fleet:
        base = await fleet.alone(PROMPT, MOST)
        # The turn must not be over before the weights have come.
        await slow_down(fleet.http, engine, 0.5)
        prime = PrimeRl(fleet.http, fleet.url, PROMPT, GREEDY)
        await prime.starts("policy")
        asked = asyncio.create_task(prime.generates("policy", MOST))
        await until(lambda: fleet.written() > 4)
        await prime.pauses()
        await prime.updates(checkpoint)
        await prime.resumes()
        await slow_down(fleet.http, engine, None)
        (choice,) = (await asked)["choices"]
        spans = choice["weight_versions"]
        versions = [s["version"] for s in spans for _ in range(s["end"] - s["start"])]
        await fleet.judge(choice["token_ids"], versions, base)
    assert choice["rose"]["moves"] == []
    assert [span["kv"] for span in spans] == ["own", "mixed"]
