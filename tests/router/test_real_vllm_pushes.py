"""vLLM's own weight-sync client pushes into a lease as into one engine of vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rose_core.wire.routing import EngineKind
from rose_dev.vllm_environment import vllm_python
from tests.router.pushing import FakeIngest, Make, generate, json_of

pytestmark = pytest.mark.vllm

PUSH = """
import json, sys
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
url, folder = json.loads(sys.argv[1])
client = HTTPVLLMWeightSyncClient(url)
client.init_weight_transfer_engine({"backend": "rose"})
client.start_weight_update()
client.update_weights({"weight_dir": folder})
client.finish_weight_update("step-1")
client.shutdown_weight_transfer_engine()
"""


async def test_vllms_own_client_brings_a_checkpoint_to_every_engine(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        ingest.engines = [await s.engine("ours", kind=EngineKind.DEDICATED)]
        asked = json.dumps([s.url, str(tmp_path)])
        client = await asyncio.create_subprocess_exec(vllm_python(), "-c", PUSH, asked)
        assert await asyncio.wait_for(client.wait(), 240) == 0
        assert (await json_of(generate(s)))["meta_info"]["weight_version"] == "step-1"
    assert ingest.taken == [(str(tmp_path), "step-1", True)]
