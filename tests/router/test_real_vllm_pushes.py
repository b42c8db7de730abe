"""vLLM's own weight-sync client pushes into a lease on real parts: ingest, store, a real vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rose_dev.engine_testing import RealEngine, ended_well
from rose_dev.vllm_testing import start_beside_vllm
from tests.router.pushing import json_of
from tests.router.real_fleet import GREEDY, PUSHED, pushed_to
from tests.router.test_real_engines import PROMPT, write_changed
from tests.trainer.test_publisher import RunningStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio]

MOST = 24
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


async def test_vllms_own_client_brings_a_checkpoint_into_an_engine_of_vllm(
    vllm_engine: RealEngine, store: RunningStore, tmp_path: Path
) -> None:
    """Every greedy token is another one afterwards, and carries the trainer's own name."""
    checkpoint, program = tmp_path / "step_1", tmp_path / "push.py"
    program.write_text(PUSH)
    await asyncio.to_thread(write_changed, vllm_engine.model, checkpoint)
    async with pushed_to(vllm_engine, store, tmp_path) as fleet:
        before = await fleet.alone(PROMPT, MOST)
        asked = json.dumps([fleet.url, str(checkpoint)])
        log = tmp_path / "push.log"
        client = await asyncio.to_thread(start_beside_vllm, program, [asked], log)
        await asyncio.to_thread(ended_well, {log: client}, 240)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": MOST, **GREEDY}}
        answer = await json_of(fleet.http.post(f"{fleet.url}/generate", json=body))
        after = await fleet.alone(PROMPT, MOST)
    assert answer["output_ids"] == after
    assert after[0] != before[0]
    assert answer["meta_info"]["weight_version"] == "step-1"
    assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {PUSHED}
