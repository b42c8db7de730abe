"""``rose explain --rollout``: what settings would lend, from a replica's own figures."""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rose_cli.ops.explain import memory_text
from rose_core.api import EXPLAIN_ANNOTATION, Explanation, RolloutLease, ServingPool
from rose_core.api.reasons import Reason
from rose_core.devices.memory import GIB, Headroom, MemorySum, lendable
from rose_core.identity import PodUid
from rose_core.lending import ReplicaDecision
from rose_core.wire.sync import ReplicaReport
from rose_operator.status.explain_requests import answer
from rose_simulate.advice.memory import ServingEngineKind
from tests.api.objects import LEASE, POOL, changed
from tests.engines.model_shapes import SHAPES

ASKED = {"metadata.annotations": {EXPLAIN_ANNOTATION: "q1"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3"]))
    index = {"metadata": {"total_size": 15 * GIB}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def given(model: Path, *, serving: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        rollout=model,
        serving=serving,
        engine=ServingEngineKind.SGLANG,
        serving_gpus=1,
        serving_besides=3.0,
        rollout_besides=None,
        kv_tokens=None,
        max_running=None,
    )


def report(name: str, memory: MemorySum | None) -> tuple[str, ReplicaReport]:
    return "n", ReplicaReport("s/chat", "s", name, PodUid(f"uid-{name}"), memory=memory)


def explained(
    thing: RolloutLease | ServingPool, *reports: tuple[str, ReplicaReport]
) -> Explanation:
    verdicts = [
        ReplicaDecision(f"s/{one.pod_name}", Reason.INSUFFICIENT_MEMORY) for _, one in reports
    ]
    found = answer(thing, "what holds", verdicts, datetime(2027, 1, 15, tzinfo=UTC), reports)
    assert found is not None
    # As the API server hands it back.
    return Explanation.model_validate(found.as_dict())


def parts(serving_gib: int, watched_s: float = 86_400.0) -> MemorySum:
    found = lendable(140 * GIB, serving_gib * GIB, Headroom(), watched_s).parts
    assert found is not None
    return found


def test_a_lease_learns_what_each_setting_would_lend_and_cost_on_the_tightest_replica(
    model: Path,
) -> None:
    lease = RolloutLease.model_validate(changed(LEASE, ASKED | {"spec.kvTokens": 32768}))
    answer_ = explained(lease, report("a", parts(100)), report("b", parts(125)), report("c", None))
    reported = memory_text(given(model, serving=model), lease, answer_)
    assert "memory of s/b, which lends least of 2: 140.0 GiB in all" in reported
    assert "serving used up to 125.0 GiB, headroom 3.0 GiB" in reported
    assert "KV 4.5 GiB for 32768 tokens" in reported
    rows = {line[:34].strip(): line[34:].strip() for line in reported.splitlines()}
    assert rows["as it is"].startswith("12.0 GiB ")
    assert "no" in rows["as it is"].split()
    less = rows["--mem-fraction-static 0.20 less"]
    assert less.split()[0] == "39.8"
    assert " yes " in less
    price = re.search(r"(\d+) KV tokens \(27.8 GiB\)$", less)
    assert price is not None
    assert int(price[1]) * (144 << 10) == pytest.approx(0.2 * 139 * GIB, abs=144 << 10)
    assert "1.0 GiB that are kept free" in rows["memoryHeadroomGiB: 2"]
    assert rows["kvTokens: 16384"].endswith("nothing")


def test_without_the_serving_model_the_price_is_told_in_memory(model: Path) -> None:
    kind = {"spec.engine": {"kind": "VLLM", "port": 8000}}
    pool = ServingPool.model_validate(changed(POOL, ASKED | kind))
    reported = memory_text(given(model), pool, explained(pool, report("a", parts(130))))
    assert "--gpu-memory-utilization 0.10 less" in reported
    assert "14.0 GiB of its KV pool (--serving DIR says how many tokens)" in reported
    assert "for 16384 tokens" in reported


def test_replicas_whose_memory_nobody_knows_are_not_guessed(model: Path) -> None:
    lease = RolloutLease.model_validate(changed(LEASE, ASKED))
    reported = memory_text(given(model), lease, explained(lease, report("a", None)))
    assert reported == "no replica says how much memory its serving uses\n"
