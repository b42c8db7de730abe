"""SkyRL's own client against a router: start-up, syncs, turns, an engine lost under them, an end.

Only the way its trainer calls the client is replayed (its ``init_weight_sync_state``, and its
generators' loop); every request is SkyRL's. ``make skyrl`` fetches the package, without what its
trainer needs, and runs this.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import types
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_trainer.adapters import skyrl
from rose_trainer.publisher import Publisher
from tests.router.conftest import VERSION, Fake, Stage
from tests.router.test_facade import model  # noqa: F401  # a fixture
from tests.router.test_skyrl import PROMPT, chunks, installed
from tests.router.test_verl import follow, pace
from tests.trainer.test_publisher import RunningStore

SKYRL: Any = pytest.importorskip("skyrl", reason="SkyRL is not installed; make skyrl")


def skyrls_client() -> Any:  # noqa: ANN401  # SkyRL's module
    """Its module, without what ``skyrl.backends`` imports: types of a service, for Python 3.12."""
    package = types.ModuleType("skyrl.backends")
    package.__path__ = [str(Path(SKYRL.__file__).parent / "backends")]
    sys.modules.setdefault("skyrl.backends", package)
    inside = "skyrl_train.inference_servers.remote_inference_client"
    return importlib.import_module(f"skyrl.backends.{inside}")


REMOTE = skyrls_client()

# What SkyRL calls of aiohttp is deprecated; that is SkyRL's.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Make = Callable[..., AbstractAsyncContextManager[Stage]]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


@asynccontextmanager
async def client_of(s: Stage) -> AsyncIterator[Any]:
    """As its trainer makes it from external_proxy_url and external_server_urls."""
    client = REMOTE.RemoteInferenceClient(
        proxy_url=s.url, server_urls=[s.url], data_parallel_size=1, model_name="policy"
    )
    async with client:
        yield client


def batch(count: int, most: int = 6) -> dict[str, Any]:
    """What SkyRL's generators hand to ``generate``."""
    return {
        "prompt_token_ids": [[*PROMPT, number] for number in range(count)],
        "sampling_params": SAMPLING | {"max_tokens": most, "logprobs": 1},
        "session_ids": [f"uid_{number}" for number in range(count)],
        "cache_salt": "1",
    }


async def test_its_client_syncs_twice_and_samples_from_the_last(
    stage: Make,
    store: RunningStore,
    model: Path,  # noqa: F811  # the fixture
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stage(reported_gpus=4, tokenizer=model) as s, client_of(s) as client:
        engines = [await s.engine("a"), await s.engine("b")]
        following = asyncio.create_task(follow(store, engines))
        monkeypatch.setenv("ROSE_ROUTER_URL", s.url)
        own = staticmethod(lambda: Publisher(store.address, "run", token="t"))
        monkeypatch.setattr(skyrl.Strategy, "publisher", own)
        theirs = REMOTE.RemoteInferenceClient
        monkeypatch.setattr(theirs, "_post", theirs._post)  # what install changes is put back
        strategy = installed(monkeypatch)
        total, each = await client.get_world_size()
        assert (total, each) == (4, 4)
        info = strategy.create_init_info(None, inference_world_size=total)
        sender = strategy.create_sender(init_info=info, inference_client=client)
        await client.init_weight_update_communicator(info)
        for sync in range(2):
            await client.pause_generation()
            await client.reset_prefix_cache(reset_running_requests=True)
            await sender.send_chunks(chunks(float(sync), []), weight_metadata={"names": []})
            await client.resume_generation()
            client.increment_weight_version()
        await until(lambda: {str(e.version) for e in s.router.service.fleet} == {"run@1.1"})
        answer = await client.generate(batch(3))
        with caplog.at_level(logging.WARNING):
            await client.finish_session("uid_0")
        seen = s.router.service.prospects._trajectories
        assert {one.group for one in seen.values()} == {"uid"}
        assert [one.over for one in seen.values()].count(True) == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await asyncio.to_thread(sender.teardown)
    wanted = [continuation([*PROMPT, number], 6, "run@1.1") for number in range(3)]
    assert answer["response_ids"] == wanted
    assert answer["responses"] == [Tokenizer(model).decode(ids) for ids in wanted]
    assert answer["stop_reasons"] == ["length"] * 3
    assert [len(one) for one in answer["response_logprobs"]] == [6] * 3
    theirs_logged = [one for one in caplog.records if one.name != skyrl.__name__]
    assert not theirs_logged  # it would have warned of an end that was not taken


async def test_its_client_notices_neither_a_pause_nor_a_lost_engine(
    stage: Make,
    model: Path,  # noqa: F811  # the fixture
) -> None:
    async with stage(tokenizer=model) as s, client_of(s) as client:
        fakes = [await s.engine("a", token_seconds=0.01), await s.engine("b", token_seconds=0.01)]
        running = asyncio.create_task(asyncio.wait_for(client.generate(batch(4, most=60)), 60))
        await until(lambda: any(len(one.output) for fake in fakes for one in at_work(fake)))
        await client.pause()
        late = asyncio.create_task(client.generate(batch(1)))
        await next(fake for fake in fakes if at_work(fake)).die()
        await client.resume()
        pace(fakes, 0.001)
        answer = await running
        assert (await late)["response_ids"] == [continuation([*PROMPT, 0], 6, VERSION)]
        moves = s.router.service.ledger.totals.moves
    wanted = [continuation([*PROMPT, number], 60, VERSION) for number in range(4)]
    assert answer["response_ids"] == wanted
    assert moves >= 1


async def test_its_client_aborts_by_a_pause_and_hears_so(
    stage: Make,
    model: Path,  # noqa: F811  # the fixture
) -> None:
    async with stage(tokenizer=model) as s, client_of(s) as client:
        fake = await s.engine("a", token_seconds=0.01)
        running = asyncio.create_task(client.generate(batch(1, most=200)))
        await until(lambda: any(len(one.output) for one in at_work(fake)))
        await client.pause(mode="abort")
        answer = await running
        await client.resume()
    (ids,) = answer["response_ids"]
    assert answer["stop_reasons"] == ["abort"]
    assert 0 < len(ids) < 200
    assert ids == continuation([*PROMPT, 0], 200, VERSION)[: len(ids)]


async def test_samples_texts_and_chats_of_its_client(
    stage: Make,
    model: Path,  # noqa: F811  # the fixture
) -> None:
    words = Tokenizer(model)
    async with stage(tokenizer=model) as s, client_of(s) as client:
        await s.engine("a")
        assert await client.tokenize(["hi"]) == [words.encode("hi")]
        assert await client.detokenize([words.encode("hi")]) == ["hi"]
        asked = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 7},
            "session_id": "t",
        }
        found = await client.sample({"json": asked})
        chat = await client.chat_completion(
            {"json": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}}
        )
    for one in found["sequences"]:
        assert one["tokens"] == continuation(PROMPT, 4, VERSION)
        assert len(one["logprobs"]) == 4
        assert one["stop_reason"] == "length"
    prompt = words.encode("<user>hi<assistant>", special=False)
    (choice,) = chat["choices"]
    assert choice["token_ids"] == continuation(prompt, 3, VERSION)
    assert choice["message"]["role"] == "assistant"


async def test_its_client_says_what_the_router_refuses(stage: Make) -> None:
    async with stage() as s, client_of(s) as client:
        await s.engine("a")
        reported = batch(1) | {"sampling_params": SAMPLING | {"prompt_logprobs": 1}}
        with pytest.raises(Exception, match="prompt_logprobs: the router does not take it"):
            await client.generate(reported)


def at_work(fake: Fake) -> list[Any]:
    return fake.scheduler.running
