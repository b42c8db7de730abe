"""prime-rl's sinks say what became of its rollouts, over a router and with its turns.

prime-rl is on no package index. Where it is not installed its sinks are stood in for, with the
names, fields and calls of commit 559b44772 (``prime_rl/orchestrator/train_sink.py``).
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose_trainer.adapters import prime_rl
from tests.router.conftest import Stage
from tests.router.pushing import PROMPT, json_of
from tests.router.test_reports import meter, remembered

Make = Callable[..., AbstractAsyncContextManager[Stage]]
BODY = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}


@dataclass
class Trace:
    """verifiers' trace."""

    id: str
    reward: float
    stale: bool = False


@dataclass
class Episode:
    """verifiers' episode; its group is in its work, here beside it."""

    group: str
    traces: list[Trace]


@dataclass
class TrainSink:
    """prime-rl's: groups of two, batches of two traces, reward 0 is rejected by the curriculum."""

    pending_groups: dict[str, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    pending_batch: dict[str, list[str]] = field(default_factory=dict)
    episode_by_trace: dict[str, Episode] = field(default_factory=dict)

    async def add(self, episode: Episode) -> Any:  # noqa: ANN401  # a batch or None
        await self.process_episode(episode)
        self.pending_groups[episode.group].append(episode)
        if len(self.pending_groups[episode.group]) < 2:
            return None
        await self.process_group(episode.group)
        return self._maybe_batch()

    async def process_episode(self, episode: Episode) -> None:
        del episode

    async def process_group(self, group_id: str) -> None:
        group = self.pending_groups.pop(group_id, [])
        traces = [trace for episode in group for trace in episode.traces]
        if not any(trace.reward for trace in traces):
            return
        for episode in group:
            for trace in episode.traces:
                self.pending_batch[trace.id] = ["sample"]
                self.episode_by_trace[trace.id] = episode

    def _maybe_batch(self) -> Any:  # noqa: ANN401  # a batch or None
        for name in list(self.pending_batch):
            if _one(self.episode_by_trace[name], name).stale:
                del self.pending_batch[name], self.episode_by_trace[name]
        return self.process_batch() if len(self.pending_batch) >= 2 else None

    def process_batch(self) -> Any:  # noqa: ANN401  # a batch
        selected = list(self.pending_batch)[:2]
        shipped = [Episode("", [_one(self.episode_by_trace.pop(name), name)]) for name in selected]
        for name in selected:
            del self.pending_batch[name]
        return SimpleNamespace(cohort=SimpleNamespace(episodes=shipped))


def _one(episode: Episode, name: str) -> Trace:
    return next(trace for trace in episode.traces if trace.id == name)


@dataclass
class EvalSink:
    """Stand-in for prime-rl's class of that name."""

    pending_groups: dict[str, list[Episode]] = field(default_factory=lambda: defaultdict(list))

    def process_group(self, group_id: str) -> None:
        self.pending_groups.pop(group_id, [])


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with both sinks, fresh for each test."""
    package = ModuleType("prime_rl_orchestrator")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for module, sink in (("train_sink", TrainSink), ("eval_sink", EvalSink)):
        made = ModuleType(f"{package.__name__}.{module}")
        setattr(made, sink.__name__, type(sink.__name__, (sink,), {}))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return package.__name__


def of(package: str, module: str, name: str) -> Any:  # noqa: ANN401  # a sink
    return getattr(importlib.import_module(f"{package}.{module}"), name)()


async def sampled(s: Stage, *traces: Trace) -> None:
    """Two turns of each trace, as prime-rl's client sends them."""
    for trace in traces:
        for _ in range(2):
            headers = {"X-Session-ID": trace.id}
            await json_of(s.post("/inference/v1/generate", BODY, headers=headers))


async def test_what_prime_rls_sinks_take_and_drop_is_in_the_meter(stage: Make, sinks: str) -> None:
    async with stage() as s:
        await s.engine()
        reports = prime_rl.install(sinks, s.url)
        sink = of(sinks, "train_sink", "TrainSink")
        good = [Trace("a", 1.0), Trace("b", 0.0)]
        rejected = [Trace("c", 0.0), Trace("d", 0.0)]
        old = [Trace("e", 1.0, stale=True), Trace("f", 1.0)]
        await sampled(s, *good, *rejected, *old)
        batches = [
            await sink.add(Episode(group, [trace]))
            for group, traces in (("1", good), ("2", rejected), ("3", old))
            for trace in traces
        ]
        await reports.wait_sent()
        assert sum(batch is not None for batch in batches) == 1
        counts, inferred = await meter(s)
        assert counts == {"trained": 2, "dropped": 3, "lost": 0}
        assert inferred["ends"] == 0
        assert list(remembered(s)) == ["f"]
        assert remembered(s)["f"].over, "it waits for a batch; its end was said"


async def test_prime_rls_evaluations_are_withdrawn(stage: Make, sinks: str) -> None:
    async with stage() as s:
        await s.engine()
        reports = prime_rl.install(sinks, s.url)
        sink = of(sinks, "eval_sink", "EvalSink")
        trace = Trace("evaluated", 1.0)
        await sampled(s, trace)
        sink.pending_groups["1"].append(Episode("1", [trace]))
        sink.process_group("1")
        await reports.wait_sent()
        assert not remembered(s)
        assert (await meter(s))[0] == {"trained": 0, "dropped": 0, "lost": 0}


async def test_a_sink_laid_out_anew_costs_the_report_and_not_the_step(
    sinks: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports = prime_rl.install(sinks, "http://127.0.0.1:9")
    sink = of(sinks, "train_sink", "TrainSink")
    sink.pending_batch["a"] = ["sample"]
    sink.pending_groups["1"] = [SimpleNamespace(runs=[])]
    with pytest.raises(AttributeError, match="traces"):  # prime-rl's own, not ours
        await sink.process_group("1")
    assert "not reported" in caplog.text
    await reports.wait_sent()


def test_a_release_without_those_methods_is_left_as_it_is(
    sinks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{sinks}.eval_sink")
    monkeypatch.setattr(module, "EvalSink", type("EvalSink", (), {}))
    before = vars(importlib.import_module(f"{sinks}.train_sink").TrainSink).copy()
    with pytest.raises(AttributeError, match="process_group"):
        prime_rl.install(sinks, "http://127.0.0.1:9")
    assert dict(vars(importlib.import_module(f"{sinks}.train_sink").TrainSink)) == before
