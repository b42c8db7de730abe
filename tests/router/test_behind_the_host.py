"""Router and engine host together: permits lapse, engines die, turns go on through the data routes.

The engines are fake ones, but processes; the host freezes, restarts and proxies them as in
production, so this is the seam between two packages and not a unit.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rose_agent.host import main as host_main
from rose_core.rollouts.placement.watch import LegPatience
from rose_core.wire.host import EngineState
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_core.wire.tokenizer_files import unpack
from rose_dev.owners import Owner, owner
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from rose_router.config import Settings
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.main import RunningRouter, running
from tests.host import helpers
from tests.router.conftest import LEASE, VERSION
from tests.router.scripts import folder

TOKENS = 250
PROMPT = [8, 2, 5]
SLOTS = ("slot-1", "slot-2")


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """A run directory with a short path, and a model folder the fake engine can load."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    (folder / "run").mkdir()
    small = folder / "models" / "small"
    small.mkdir(parents=True)
    save_file({"w": np.zeros((8, 8), dtype=np.float32)}, small / "model.safetensors")
    yield folder / "run", folder / "models"
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Node:
    """A host with two engines, their guards, and a router they are attached to."""

    rundir: Path
    host: host_main.RunningHost
    guards: dict[str, helpers.Guard]
    owners: dict[str, Owner]
    router: RunningRouter

    async def aborted(self, slot: str) -> int:
        """Requests that were aborted, as the engine process itself says."""
        file = read_json(RunDir(self.rundir).slot(slot).engine, EngineFile)
        assert file is not None
        async with aiohttp.ClientSession() as http, http.get(f"{file.url}/metrics") as reply:
            found = re.search(r"num_aborted_requests_total\{.*\} (\d+)", await reply.text())
            assert found is not None
            return int(found[1])

    async def engine_of(self, turn: int = 0) -> str:
        """The slot on which the only turn runs, once it has some tokens."""
        found: list[str] = []

        def running_with_tokens() -> bool:
            found[:] = [
                engine.name
                for engine in self.router.service.fleet
                for leg in engine.legs.values()
                if leg.tokens >= 10
            ]
            return bool(found)

        await until(running_with_tokens)
        return found[turn]


@asynccontextmanager
async def node(rundir: Path, models: Path) -> AsyncIterator[Node]:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(helpers.running(rundir, models))
        router = await stack.enter_async_context(
            running(Settings(lease=LEASE, patience=LegPatience(pause_seconds=0.5), drain_seconds=0))
        )
        guards, owners = {}, {}
        for slot in SLOTS:
            guards[slot] = stack.enter_context(helpers.guarding(rundir, slot))
            await host.host.ensure(
                helpers.order(slot, weight_version=VERSION, token_seconds="0.02")
            )
        for slot in SLOTS:
            status = await helpers.serving(host, slot)
            update = EngineUpdate(
                slot,
                EngineKind.BORROWED,
                LEASE,
                status.endpoint,
                token=helpers.TOKEN,
                gate_open=True,
                cap=4,
                version=VERSION,
                tokenizer=status.tokenizer,
            )
            owners[slot] = await stack.enter_async_context(owner(router.attach_port, update))
        await until(lambda: len(router.service.fleet) == len(SLOTS))
        yield Node(rundir, host, guards, owners, router)


async def ask(router: RunningRouter) -> dict[str, object]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": TOKENS},
        "return_logprob": True,
    }
    url = f"http://127.0.0.1:{router.http_port}/generate"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, object] = await reply.json()
        return answer


def judge(answer: dict[str, object], reason: str) -> None:
    assert answer["output_ids"] == continuation(PROMPT, TOKENS, VERSION)
    meta = answer["meta_info"]
    assert isinstance(meta, dict)
    assert [move["reason"] for move in meta["rose"]["moves"]] == [reason]
    assert meta["rose"]["moves"][0]["at_token"] >= 10
    assert meta["rose"]["redone_tokens"] == 0
    spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert spans == [(VERSION, 0, TOKENS)]


async def test_a_long_stop_moves_the_turn_and_its_old_leg_is_aborted(
    folders: tuple[Path, Path],
) -> None:
    async with node(*folders) as n:
        turn = asyncio.create_task(ask(n.router))
        slot = await n.engine_of()
        n.guards[slot].close()
        n.owners[slot].send(gate_open=False)
        judge(await turn, "Paused")

        (left,) = [engine for engine in n.router.service.fleet if engine.name == slot]
        assert (await helpers.status_of(n.host, slot)).generated_tokens < TOKENS
        n.guards[slot].open()
        n.owners[slot].send(gate_open=True)
        await until(lambda: left.gate_open and not left.fences)

        async def aborted() -> bool:
            return await n.aborted(slot) >= 1

        await helpers.until(aborted, "the old leg is aborted in the engine")


async def test_a_killed_process_behind_the_data_route_is_not_noticed(
    folders: tuple[Path, Path],
) -> None:
    async with node(*folders) as n:
        turn = asyncio.create_task(ask(n.router))
        slot = await n.engine_of()
        for pid in (await helpers.status_of(n.host, slot)).pids:
            os.kill(pid, signal.SIGKILL)
        judge(await turn, "Lost")

        async def serves_again() -> bool:
            return (await helpers.status_of(n.host, slot)).state is EngineState.SERVING

        await helpers.until(serves_again, "the host has restarted the engine")


async def test_a_router_without_a_tokenizer_takes_the_models_from_its_engines_node(
    folders: tuple[Path, Path],
) -> None:
    rundir, models = folders
    made = folder()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made / name, models / "small" / name)
    secret = rundir.parent / "secret"
    secret.write_text("{}")
    (models / "small" / "generation_config.json").symlink_to(secret)
    chat = [{"role": "user", "content": "go"}]
    async with node(rundir, models) as n, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{n.router.http_port}"
        for path, body in (
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 4}),
            ("/v1/messages", {"model": "m", "messages": chat, "max_tokens": 4}),
            ("/v1/responses", {"model": "m", "input": "go", "max_output_tokens": 4}),
        ):
            async with http.post(url + path, json=body) as reply:
                assert reply.status == 200, await reply.text()
        async with http.post(f"{url}/tokenize", json={"messages": chat}) as reply:
            assert (await reply.json())["tokens"] == Tokenizer(made).chat(chat, [], {})
        result = await helpers.status_of(n.host, SLOTS[0])
        bearer = {"Authorization": f"Bearer {helpers.TOKEN}"}
        async with http.get(f"{result.endpoint}/tokenizer", headers=bearer) as reply:
            files = unpack(await reply.read(), result.tokenizer)
        assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"], "no link is followed"
        async with http.get(f"{result.endpoint}/tokenizer") as reply:
            assert reply.status == 401
