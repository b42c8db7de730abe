"""SkyRL's calls in its order: control over HTTP, chunks to the store, turns by vLLM's route.

Read from NovaSky-AI/SkyRL a9564572e, 2026-08-21 (``inference_servers/remote_inference_client.py``,
``weight_sync``); look there again when that is old.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_trainer.adapters import skyrl
from rose_trainer.errors import Unsupported
from rose_trainer.publisher import Publisher
from tests.router.conftest import Stage
from tests.router.test_verl import follow
from tests.trainer.test_publisher import RunningStore

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]


@dataclass
class WeightChunk:
    names: list[str]
    tensors: list[torch.Tensor]


def chunks(value: float, drained: list[str]) -> Iterator[WeightChunk]:
    buffer = torch.empty(8, 4)
    for name in ("q", "k"):
        buffer.fill_(value)
        yield WeightChunk([f"{name}.weight"], [buffer])
    drained.append("all")


async def call(s: Stage, path: str, body: object = None, method: str = "POST") -> Any:  # noqa: ANN401  # JSON
    """RemoteInferenceClient._call_server."""
    async with s.http.request(method, s.url + path, json=body) as reply:
        found = await reply.json() if reply.content_length else None
        assert reply.status == 200, found
        return found


async def generate(s: Stage) -> Any:  # noqa: ANN401  # JSON
    sampling = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    body = {
        "sampling_params": sampling | {"logprobs": 1},
        "model": "policy",
        "token_ids": PROMPT,
        "cache_salt": "v1",
    }
    async with s.http.post(
        f"{s.url}/inference/v1/generate", json=body, headers={"X-Session-ID": "t-1"}
    ) as reply:
        return (await reply.json())["choices"][0]


async def test_skyrl_syncs_through_the_store_and_samples_by_configuration(
    stage: Make, store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(reported_gpus=4) as s:
        engines = [await s.engine("a"), await s.engine("b")]
        following = asyncio.create_task(follow(store, engines))
        monkeypatch.setenv("ROSE_ROUTER_URL", s.url)
        monkeypatch.setattr(
            skyrl.Strategy,
            "publisher",
            staticmethod(lambda: Publisher(store.address, "run", token="t")),
        )
        strategy = installed(monkeypatch)
        assert (await call(s, "/get_world_size", {}, "GET"))["world_size"] == 4
        info = strategy.create_init_info(None, inference_world_size=4)
        sender = strategy.create_sender(init_info=info, inference_client=None)
        for payload in info.for_servers(4, 1):
            body = {"init_info": payload.to_api_payload()}
            await call(s, "/init_weight_transfer_engine", body)
        drained: list[str] = []
        other_rank = skyrl.Sender(None)
        for sync in range(2):
            await call(s, "/pause?mode=keep&clear_cache=false")
            assert await call(s, "/reset_prefix_cache", {"reset_running_requests": True}) is None
            for one in (sender, other_rank):
                await one.send_chunks(chunks(float(sync), drained), weight_metadata={"names": []})
            await call(s, "/resume")
        assert drained == ["all"] * 4
        await until(lambda: {str(e.version) for e in s.router.service.fleet} == {"run@1.1"})
        choice = await generate(s)
        assert choice["token_ids"] == continuation(PROMPT, 6, "run@1.1")
        assert [span["label"] for span in choice["weight_versions"]] == ["1"]
        assert [one["logprob"] <= 0 for one in choice["logprobs"]["content"]] == [True] * 6
        async with s.http.post(s.url + "/finish_session", params={"session_id": "t-1"}) as reply:
            assert reply.status == 200
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await asyncio.to_thread(sender.teardown)


def installed(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  # SkyRL's
    """What worker.init_weight_sync_state asks for."""
    module = types.ModuleType("skyrl_weight_sync")
    monkeypatch.setitem(sys.modules, "skyrl_weight_sync", module)
    skyrl.install("skyrl_weight_sync")
    return module.get_transfer_strategy_cls(weight_sync_backend="nccl", colocate_all=False)


async def test_groups_of_gpus_are_refused(stage: Make) -> None:
    async with stage() as s:
        body = {"init_info": {"master_address": "x", "master_port": 1}}
        async with s.post("/init_weight_transfer_engine", body) as reply:
            assert reply.status == 501
    with pytest.raises(Unsupported, match="external servers"):
        skyrl.Strategy.get_vllm_transfer_engine()
