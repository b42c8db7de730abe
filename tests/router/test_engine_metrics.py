"""The lease's load under vLLM's and SGLang's names, read as their readers read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose_dev.waiting import until
from tests.router.conftest import Stage

pytestmark = pytest.mark.asyncio

Staging = Callable[..., AbstractAsyncContextManager[Stage]]


async def metrics_of(stage: Stage) -> dict[str, float]:
    """Samples by name, extra labels behind it."""
    async with stage.http.get(f"{stage.url}/metrics") as reply:
        text = await reply.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "sglang:")):
                reason = sample.labels.get("reason", sample.labels.get("num_gpu_blocks", ""))
                found[f"{sample.name} {reason}".strip()] = sample.value
    return found


async def test_a_lease_tells_its_turns_and_its_kv_tokens_as_one_engine(stage: Staging) -> None:
    async with stage() as s:
        await s.engine("open", token_seconds=0.02, cap=1, kv_tokens=1000)
        await s.engine("shut", gate_open=False, kv_tokens=500)
        idle = await metrics_of(s)
        body = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 50}}
        asking = [asyncio.create_task(_ask(s, body)) for _ in range(3)]
        await until(lambda: len(s.router.service.queue) == 2 and len(s.router.service.ledger) == 3)
        busy = await metrics_of(s)
        await asyncio.gather(*asking)
        done = await metrics_of(s)
    assert idle["vllm:cache_config_info 1000"] == 1, "a gate that is shut holds nothing now"
    assert idle["vllm:num_requests_running"] == idle["vllm:kv_cache_usage_perc"] == 0
    assert busy["vllm:num_requests_running"] == busy["sglang:num_running_reqs"] == 1
    assert busy["vllm:num_requests_waiting"] == busy["sglang:num_queue_reqs"] == 2
    assert busy["vllm:num_requests_waiting_by_reason capacity"] == 2
    assert 0.1 <= busy["vllm:kv_cache_usage_perc"] <= 0.15
    assert busy["sglang:max_total_num_tokens"] == 1000
    assert done["vllm:generation_tokens_total"] == done["sglang:generation_tokens_total"] == 150
    assert done["vllm:prompt_tokens_total"] == 300


async def _ask(stage: Stage, body: object) -> None:
    async with stage.post("/generate", body) as reply:
        assert reply.status == 200, await reply.text()


async def test_without_engines_there_is_no_capacity_to_be_shared(stage: Staging) -> None:
    async with stage() as s:
        found = await metrics_of(s)
    assert not any(name.startswith("vllm:cache_config_info") for name in found)
    assert found["sglang:token_usage"] == 0
