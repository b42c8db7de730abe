"""A lease on real parts: SGLang, a store, ``rose ingest``, and who brings weights to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from aiohttp import web
from safetensors.torch import load_file

from rose_core.identity import WeightVersion
from rose_core.wire.routing import EngineKind
from rose_dev.engine_testing import RealEngine, write_bundle
from rose_dev.owners import Owner, owner
from rose_dev.waiting import until
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.control import ControlClient
from rose_router.config import Settings
from rose_router.main import RunningRouter, running
from rose_trainer.adapters.ingest import Ingest
from rose_trainer.publisher import Publisher
from tests.router.pushing import json_of
from tests.router.test_real_engines import PROMPT, VERSION, follow, update_of
from tests.trainer.test_publisher import RunningStore

MOST = 120
PUSHED = "run@1.1"
SETTINGS = Settings(lease="team/grpo", model="policy", attach_token="secret")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Fleet:
    """A lease of one dedicated engine that follows a store."""

    router: RunningRouter
    http: aiohttp.ClientSession
    engine: RealEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    async def ready(self) -> None:
        """Wait until the engine holds what the store has: only then is a turn answered."""
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        await json_of(self.http.post(f"{self.url}/generate", json=body))

    async def until_version(self, version: str) -> None:
        """Wait until the engine's owner has said so."""
        await until(lambda: {str(one.version) for one in self.router.service.fleet} == {version})

    async def alone(self, prompt: list[int], most: int) -> list[int]:
        """What the engine's weights make of a prompt, the router not asked."""
        sampling = {"max_new_tokens": most, **GREEDY}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = await json_of(self.http.post(f"{self.engine.url}/generate", json=body))
        tokens: list[int] = answer["output_ids"]
        return tokens

    def written(self) -> int:
        """Tokens of the turn that runs."""
        return written(self.router)

    async def judge(self, out: list[int], versions: list[str], base: list[int]) -> None:
        """Every token is one that its own version samples after those before it."""
        cut = versions.index(PUSHED)
        assert versions == [VERSION] * cut + [PUSHED] * (len(out) - cut)
        assert cut > 0
        assert out[:cut] == base[:cut]
        assert out[cut:] == await self.alone([*PROMPT, *out[:cut]], len(out) - cut)
        assert out != base[: len(out)]


@asynccontextmanager
async def fleet_of(
    engine: RealEngine, store: RunningStore, folder: Path, settings: Settings
) -> AsyncIterator[Fleet]:
    """A lease whose engine gets what is in the store."""
    reported = msgspec.structs.replace(
        update_of(engine, "ours"), kind=EngineKind.DEDICATED, version=""
    )
    async with (
        aiohttp.ClientSession() as http,
        running(settings) as router,
        owner(router.attach_port, reported, "secret") as ours,
    ):
        following = asyncio.create_task(follow(engine, store, ours, folder / "bundles"))
        try:
            yield Fleet(router, http, engine)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await slow_down(http, engine, None)


@asynccontextmanager
async def pushed_to(engine: RealEngine, store: RunningStore, folder: Path) -> AsyncIterator[Fleet]:
    """The same with ``rose ingest`` before it; the store has the engine's own weights."""
    async with AsyncExitStack() as stack:
        publisher = stack.enter_context(Publisher(store.address, "run", token="t"))
        version = publisher.publish(0, await asyncio.to_thread(weights_of, engine.model))
        await asyncio.to_thread(publisher.wait, version, 60)
        runner = web.AppRunner(Ingest(publisher, [folder]).application())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        fleet = fleet_of(engine, store, folder, replace(SETTINGS, ingest_url=address))
        made = await stack.enter_async_context(fleet)
        await made.ready()
        yield made


@asynccontextmanager
async def before_two(
    engine: RealEngine, other: RealEngine
) -> AsyncIterator[tuple[RunningRouter, aiohttp.ClientSession, tuple[Owner, Owner]]]:
    """A lease's router before two engines, and their owners; the second's gate is closed."""
    settings = Settings(lease="team/grpo", attach_token="secret", tokenizer=engine.model)
    closed = msgspec.structs.replace(update_of(other, "second"), gate_open=False)
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        running(settings) as router,
        owner(router.attach_port, update_of(engine, "first"), "secret") as first,
        owner(router.attach_port, closed, "secret") as second,
    ):
        await until(lambda: len(router.service.fleet) == 2)
        yield router, http, (first, second)


async def bring(engine: RealEngine, version: str, folder: Path) -> None:
    """Commit the weights of the engine's model folder under a name, whatever is live."""
    state = dict(read_checkpoint(engine.model))
    await asyncio.to_thread(write_bundle, folder, WeightVersion.parse(version), state)
    async with await ControlClient.connect(engine.control) as control:
        await control.stage(folder)
        await control.commit(version)


def written(router: RunningRouter) -> int:
    """Tokens of the turns that run."""
    return sum(leg.tokens for one in router.service.fleet for leg in one.legs.values())


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


async def slow_down(http: aiohttp.ClientSession, engine: RealEngine, seconds: float | None) -> None:
    await http.post(f"{engine.url}/slow_down", json={"forward_sleep_time": seconds})
