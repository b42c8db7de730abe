"""A real SGLang dies in the middle of a turn; the caller's stream goes on as if nothing was."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rose_core.rollouts.spans import Span, covers
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.models import make_named
from rose_dev.owners import Owner, owner
from rose_engines.sglang.control import ControlClient
from rose_router.config import Settings
from rose_router.main import running
from rose_trainer.adapters.ingest import Ingest
from rose_trainer.publisher import Publisher
from rose_weights.receive.client import WeightsClient
from tests.trainer.test_publisher import RunningStore

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

VERSION = "run@1.0"
PROMPT = [5, 17, 42, 99, 7]
TOKENS = 200


class Pair:
    """Two engines with the same weights, started side by side; one that was killed is replaced.

    Args:
        stack: ends them.
        pool: starts them; they are killed when its threads end (``setpriv --pdeathsig``).
        folders: where they put their files.
    """

    def __init__(
        self, stack: ExitStack, pool: ThreadPoolExecutor, folders: pytest.TempPathFactory
    ) -> None:
        self._stack, self._pool, self._folders = stack, pool, folders
        self._engines = list(pool.map(self._start, ("one", "two")))

    def alive(self) -> list[RealEngine]:
        for number, engine in enumerate(self._engines):
            if engine.process.poll() is not None:
                self._engines[number] = self._pool.submit(self._start, "again").result()
        return list(self._engines)

    def _start(self, name: str) -> RealEngine:
        folder = self._folders.mktemp(name)
        return self._stack.enter_context(start_engine(folder, version=VERSION))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    make_named("tiny-peaked")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield Pair(stack, pool, tmp_path_factory)


@pytest.fixture
def engines(pair: Pair) -> list[RealEngine]:
    """Alive, also where the test is tried again that kills one of them."""
    return pair.alive()


def update_of(engine: RealEngine, name: str) -> EngineUpdate:
    return EngineUpdate(
        engine=name,
        kind=EngineKind.BORROWED,
        lease="team/grpo",
        url=engine.url,
        gate_open=True,
        cap=4,
        version=VERSION,
    )


def request(**fields: object) -> dict[str, object]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        **fields,
    }


async def test_a_killed_engine_is_not_noticed_by_the_caller(engines: list[RealEngine]) -> None:
    first, second = engines
    async with (
        aiohttp.ClientSession() as session,
        running(Settings(lease="team/grpo", attach_token="secret")) as router,
        owner(router.attach_port, update_of(first, "first"), "secret"),
    ):
        async with session.post(f"{second.url}/generate", json=request()) as reply:
            undisturbed = (await reply.json())["output_ids"]
        assert len(undisturbed) == TOKENS
        url = f"http://127.0.0.1:{router.http_port}/generate"
        async with session.post(url, json=request()) as reply:
            plain = await reply.json()
        assert reply.status == 200, plain
        assert plain["output_ids"] == undisturbed
        assert plain["meta_info"]["weight_versions"] == [
            {"version": VERSION, "start": 0, "end": TOKENS, "kv": "own"}
        ]
        # Slow enough that the kill surely falls into the turn.
        await session.post(f"{first.url}/slow_down", json={"forward_sleep_time": 0.05})
        async with session.post(url, json=request(stream=True)) as reply:
            assert reply.status == 200
            last: dict[str, object] = {}
            shown: list[list[int]] = []
            async with owner(router.attach_port, update_of(second, "second"), "secret"):
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
                        shown.append(last["output_ids"])  # type: ignore[arg-type]
                        if len(shown[-1]) >= 20 and first.process.poll() is None:
                            os.killpg(first.process.pid, signal.SIGKILL)
                            await asyncio.to_thread(first.process.wait, 30)

    meta = last["meta_info"]
    assert isinstance(meta, dict)
    assert last["output_ids"] == undisturbed
    assert all(undisturbed[: len(ids)] == ids for ids in shown)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == undisturbed
    spans = [Span(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert covers(spans, TOKENS)
    assert {span.version for span in spans} == {VERSION}
    assert [move["reason"] for move in meta["rose"]["moves"]] == ["Lost"]
    assert meta["rose"]["moves"][0]["at_token"] >= 20
    assert meta["rose"]["redone_tokens"] == 0


async def test_slimes_push_of_a_checkpoint_reaches_a_real_engine(
    engines: list[RealEngine], tmp_path: Path
) -> None:
    """slime's calls, ``rose ingest``, a store, and weights committed inside SGLang."""
    engine = engines[1]
    store = RunningStore(tmp_path / "store")
    try:
        with Publisher(store.address, "run", token="t") as publisher:
            model = await asyncio.to_thread(load_file, engine.model / "model.safetensors")
            publisher.wait(publisher.publish(0, model), 60)
            await push(engine, store, publisher, tmp_path)
    finally:
        store.close()


async def push(engine: RealEngine, store: RunningStore, publisher: Publisher, folder: Path) -> None:
    dedicated = msgspec.structs.replace(
        update_of(engine, "ours"), kind=EngineKind.DEDICATED, version=""
    )
    runner = web.AppRunner(Ingest(publisher, [folder]).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = Settings(
        lease="team/grpo",
        attach_token="secret",
        ingest_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
    )
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        running(settings) as router,
        owner(router.attach_port, dedicated, "secret") as ours,
    ):
        following = asyncio.create_task(follow(engine, store, ours, folder / "bundle"))
        url = f"http://127.0.0.1:{router.http_port}"
        async with session.post(f"{url}/generate", json=request()) as reply:
            before = (await reply.json())["output_ids"]
        # UpdateWeightFromDisk.update_weights
        await session.post(f"{url}/pause_generation", json={})
        await session.get(f"{url}/flush_cache")
        checkpoint = folder / "weight_v000001"
        await asyncio.to_thread(write_changed, engine.model, checkpoint)
        body = {"model_path": str(checkpoint), "weight_version": "1"}
        async with session.post(f"{url}/update_weights_from_disk", json=body) as reply:
            pushed = await reply.json()
        await asyncio.to_thread(shutil.rmtree, checkpoint)
        await session.post(f"{url}/continue_generation", json={})
        async with session.post(f"{url}/generate", json=request()) as reply:
            after = await reply.json()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    await runner.cleanup()
    meta = after["meta_info"]
    assert meta["weight_version"] == "1"
    assert [span["version"] for span in meta["weight_versions"]] == [pushed["weight_version"]]
    assert after["output_ids"] != before


async def follow(engine: RealEngine, store: RunningStore, ours: Owner, bundle: Path) -> None:
    """What weight-sync does on a node."""
    async with (
        WeightsClient(store.address, token="t") as client,
        await ControlClient.connect(engine.control) as control,
    ):
        async for head in client.watch("run"):
            folder = bundle / str(head.version)
            await client.pull("run", folder, want=head.version)
            await control.stage(folder)
            await control.commit(str(head.version))
            ours.say(version=str(head.version), head=str(head.version))


def write_changed(model: Path, folder: Path) -> None:
    """The model with its output rows moved by one: every greedy token is another."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 1, dims=0).contiguous()
    save_file(tensors, folder / "model.safetensors")
