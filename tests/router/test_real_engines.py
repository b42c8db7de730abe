"""A real SGLang dies in the middle of a turn; the caller's stream goes on as if nothing was."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rose_core.rollouts.terms import LeaseTerms, policies_of
from rose_core.rollouts.training.consumption import ConsumptionBound
from rose_core.rollouts.transcripts.spans import TokenSpan, covers
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.models import make_named
from rose_dev.owners import Owner, owner
from rose_dev.waiting import until
from rose_engines.weights.control import ControlClient
from rose_router.config import Settings
from rose_router.main import running
from rose_trainer.adapters.ingest import Ingest
from rose_trainer.publisher import Publisher
from rose_weights.receive.client import WeightsClient
from tests.router.overlapping import LONG, SHORT, Trainer, writing
from tests.router.pushing import json_of
from tests.simulate.test_same_policies import lease, settings_of
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
    spans = [TokenSpan(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
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


async def follow(
    engine: RealEngine, store: RunningStore, ours: Owner, bundle: Path, *, head_first: bool = False
) -> None:
    """What weight-sync does on a node; it says what the newest version is before it has it."""
    async with (
        WeightsClient(store.address, token="t") as client,
        await ControlClient.connect(engine.control) as control,
    ):
        async for head in client.watch("run"):
            if head_first:
                ours.send(head=str(head.version))
            folder = bundle / str(head.version)
            await client.pull("run", folder, want=head.version)
            await control.stage(folder)
            await control.commit(str(head.version))
            ours.send(version=str(head.version), head=str(head.version))


def write_changed(model: Path, folder: Path) -> None:
    """The model with its output rows moved by one: every greedy token is another."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 1, dims=0).contiguous()
    save_file(tensors, folder / "model.safetensors")


MEMBERS, GROUPS, BATCH = 2, 32, 4
MOVE_SECONDS = 1.0  # after its process has died an engine's owner takes it from the lease


async def test_when_all_borrowed_engines_die_what_is_long_is_kept_as_often_as_what_is_short(
    pair: Pair,
    real_engine: RealEngine,
    tmp_path: Path,
) -> None:
    """A dedicated engine, two borrowed ones killed for good in mid-step, the sample's lease."""
    store = RunningStore(tmp_path / "store")
    terms = settings_of(lease(staleness=1)).terms
    settings = Settings(lease="team/grpo", attach_token="secret", terms=terms)
    assert settings.policies == policies_of(LeaseTerms(max_staleness=1))
    lost = pair.alive()
    engines = {"ours": real_engine, "first": lost[0], "second": lost[1]}
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        router = await stack.enter_async_context(running(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        publisher = stack.enter_context(Publisher(store.address, "run", token="t"))
        owners = {
            name: await stack.enter_async_context(
                owner(router.attach_port, attached(name, engine), "secret")
            )
            for name, engine in engines.items()
        }
        following = {
            name: asyncio.create_task(
                follow(engine, store, owners[name], tmp_path / name, head_first=True)
            )
            for name, engine in engines.items()
        }
        for task in following.values():
            stack.callback(task.cancel)
        for engine in engines.values():
            await http.post(f"{engine.url}/slow_down", json={"forward_sleep_time": 0.02})
        stack.push_async_callback(
            http.post, f"{real_engine.url}/slow_down", json={"forward_sleep_time": None}
        )
        fleet, model = router.service.fleet, load_file(real_engine.model / "model.safetensors")

        async def publish(step: int) -> None:
            rolled = torch.roll(model["lm_head.weight"], step, dims=0).contiguous()
            version = publisher.publish(step, {**model, "lm_head.weight": rolled})
            await until(lambda: fleet.head == version)

        await publish(0)
        await until(lambda: {one.version for one in fleet} == {fleet.head}, seconds=120)
        url = f"http://127.0.0.1:{router.http_port}"
        trainer = Trainer(url, publish, ConsumptionBound(BATCH, staleness=1), MEMBERS, GROUPS)
        training = asyncio.create_task(trainer.train())
        # In mid-step: both write, and long trajectories are under way.
        await until(
            lambda: (
                training.done()
                or (trainer.version >= 2 and LONG in trainer.under_way and writing(fleet))
            ),
            seconds=100,
        )
        assert not training.done(), training.exception()
        for name, engine in list(engines.items())[1:]:
            following[name].cancel()
            os.killpg(engine.process.pid, signal.SIGKILL)
        await asyncio.sleep(MOVE_SECONDS)
        for name in ("first", "second"):
            owners[name].send(gate_open=False, leaving=True)
        await training
        shown = await json_of(http.get(f"{url}/trajectories"))
        redone = router.service.ledger.totals.redone_tokens
    short, long = trainer.cells[SHORT], trainer.cells[LONG]
    more = short.less(long)  # dropped of long ones, less of short ones
    assert (short.groups, long.groups) == (GROUPS // 2, GROUPS // 2)
    assert trainer.moves >= 2, "turns went on elsewhere"
    assert redone <= trainer.moves * settings.interval
    assert (short.lost, long.lost) == (0, 0)
    assert (short.dropped, long.dropped) == (0, 0)
    assert more.value == 0
    assert more.high < 0.25, f"so many groups can tell: {more}"
    (every,) = (row for row in shown["inclusion"] if row["dimension"] == "all")
    assert sum(every[arm]["trained"] for arm in ("any", "dedicated")) == MEMBERS * GROUPS


def attached(name: str, engine: RealEngine) -> EngineUpdate:
    kind = EngineKind.DEDICATED if name == "ours" else EngineKind.BORROWED
    return msgspec.structs.replace(update_of(engine, name), kind=kind, version="")
