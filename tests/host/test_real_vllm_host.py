"""Stock vLLM under an engine host, which starts it and has it brought to its run's version."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState
from rose_dev import vllm_environment
from rose_dev.models import make_named
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from tests.host.helpers import BEARER, guarding, status_of, stop
from tests.host.real import attested, order, ready, syncing_host
from tests.weightsync.run import PublishedRun, store_at

pytestmark = pytest.mark.vllm


async def test_a_host_runs_an_engine_of_vllm_like_one_of_sglang(
    rundir: Path, tmp_path: Path
) -> None:
    """Its routes are the host's alone, its version is attested, and a turn is of that version."""
    model, python = make_named("tiny-peaked"), vllm_environment.vllm_python()
    async with syncing_host(rundir, model.parent, python) as host:
        with guarding(rundir):
            async with store_at(tmp_path / "store") as address, aiohttp.ClientSession() as client:
                run = PublishedRun(address, model)
                await run.publish()
                await host.host.ensure(order(model, address, engine_class="vllm-cpu"))
                await ready(host)
                await attested(host, run)
                await run.publish()
                await attested(host, run)
                status = await status_of(host)
                body = {
                    "input_ids": [104, 101],
                    "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
                }
                url = f"{status.endpoint}/generate"
                async with client.post(url, json=body, headers=BEARER) as reply:
                    meta = (await reply.json())["meta_info"]
                assert [one["version"] for one in meta["weight_versions"]] == [status.version]
                assert meta["completion_tokens"] == 6
                reported = read_json(RunDir(rundir).slot(SlotUid("slot-1")).engine, EngineFile)
                assert reported is not None
                for path in ("/v1/models", "/tokenize", "/inference/v1/generate"):
                    async with client.post(f"{reported.url}{path}", json={}) as reply:
                        assert reply.status == 404, path
                assert status.restarts == 0
                await run.close()
            assert (await host.host.stop(stop())).state is EngineState.GONE
