"""KV policies in a stock vLLM: what it says it had cached, and what it sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import state_of, write_bundle
from rose_dev.vllm_testing import start_vllm
from rose_engines.sglang import kv
from rose_engines.sglang.client import SGLangClient
from rose_engines.sglang.control import ControlClient
from tests.engines.test_real_kv import (
    FIRST,
    OTHER,
    PEAKED,
    SECOND,
    STREAMS,
    cached,
    check,
    streams_across_a_commit,
)

pytestmark = pytest.mark.vllm

TOKENS = 1000
BLOCK = 128  # vLLM keeps whole blocks


@pytest.mark.parametrize("policy", [kv.RECOMPUTE, kv.REUSE])
async def test_what_a_commit_does_to_cached_kv(tmp_path: Path, policy: str) -> None:
    """``Keep`` is the shared engine's (``test_real_vllm``)."""
    spec = EngineSpec("test", PEAKED.name, kv_tokens=8192, max_running=4, kv_policy=policy)
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(PEAKED)))
    prompt = [5, *range(2 * BLOCK)]
    with start_vllm(tmp_path, spec=spec, version=str(FIRST)) as engine:
        async with (
            SGLangClient(engine.url) as client,
            await ControlClient.connect(engine.control) as control,
        ):
            await control.stage(tmp_path / "b")
            assert await cached(client, prompt, "trajectory") == 0
            assert await cached(client, prompt, "trajectory") > 0
            replies, committed = await streams_across_a_commit(client, control, TOKENS)
            assert committed.fenced_requests == STREAMS
            for reply in replies:
                check(reply, TOKENS)
            recomputes = policy == kv.RECOMPUTE
            assert committed.retracted_requests == (STREAMS if recomputes else 0)
            assert (committed.recomputed_tokens > 0) is recomputes
            # A later turn of the trajectory, and one of another that has the same prompt.
            assert (await cached(client, prompt, "trajectory") > 0) is (policy == kv.REUSE)
            assert await cached(client, prompt, "another") == 0
