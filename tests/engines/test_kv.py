"""KV policies on a scheduler that only looks like SGLang's: keys, retraction, coming back."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

import pytest

from rose_engines.errors import UnsupportedEngine
from rose_engines.kv import policy as kv_policy
from rose_engines.kv.policy import CachePolicy
from rose_engines.sglang.retraction import SPREAD_TOKENS, RetractingPolicy


@dataclass(eq=False)
class Request:
    name: str
    origin_input_ids: list[int] = field(default_factory=lambda: [0] * 600)
    output_ids: list[int] = field(default_factory=lambda: [0] * 400)


@dataclass
class Scheduler:
    running: list[Request]
    waiting_queue: list[Request]
    paused: bool = False

    def pause_generation(self, order: types.SimpleNamespace) -> None:
        assert order.mode == "retract"
        self.paused = True
        self.waiting_queue += self.running
        self.running = []

    def continue_generation(self, _: object) -> None:
        self.paused = False


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("sglang.srt.managers.io_struct")
    module.PauseGenerationReqInput = types.SimpleNamespace  # type: ignore[attr-defined]
    module.ContinueGenerationReqInput = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Scheduler([Request(f"r{number}") for number in range(5)], [Request("waits")])


def names(requests: list[Request]) -> list[str]:
    return [request.name for request in requests]


@pytest.mark.parametrize("policy", [kv_policy.KEEP, kv_policy.REUSE])
def test_running_requests_keep_their_kv(scheduler: Scheduler, policy: str) -> None:
    made = RetractingPolicy(policy)
    made.retract(scheduler)
    assert names(scheduler.running) == ["r0", "r1", "r2", "r3", "r4"]
    assert (made.retracted_requests, made.recomputed_tokens, made.holding) == (0, 0, False)


def test_recomputed_requests_come_back_a_few_per_iteration(scheduler: Scheduler) -> None:
    made = RetractingPolicy(kv_policy.RECOMPUTE)
    made.retract(scheduler)
    assert (scheduler.running, names(scheduler.waiting_queue)) == ([], ["waits"])
    assert (made.retracted_requests, made.recomputed_tokens) == (5, 5000)
    made.put_back(scheduler, SPREAD_TOKENS)
    assert names(scheduler.waiting_queue) == ["waits", "r0", "r1", "r2"]
    assert [one.name for one in made.held()] == ["r3", "r4"]
    made.put_back(scheduler, SPREAD_TOKENS)
    assert names(scheduler.waiting_queue)[-2:] == ["r3", "r4"]
    assert not made.holding
    assert not scheduler.paused


def test_a_request_larger_than_the_budget_comes_back_too(scheduler: Scheduler) -> None:
    made = RetractingPolicy(kv_policy.RECOMPUTE)
    scheduler.running = [Request("long", [0] * 10 * SPREAD_TOKENS), Request("short")]
    made.retract(scheduler)
    made.put_back(scheduler, SPREAD_TOKENS)
    assert names(scheduler.waiting_queue) == ["waits", "long"]


def test_everything_held_is_there_for_whoever_looks_for_requests(scheduler: Scheduler) -> None:
    made = RetractingPolicy(kv_policy.RECOMPUTE)
    made.retract(scheduler)
    made.put_back(scheduler)
    assert len(scheduler.waiting_queue) == 6
    assert not made.holding


@pytest.mark.parametrize("policy", [kv_policy.KEEP, kv_policy.RECOMPUTE])
def test_no_request_gets_kv_of_older_weights(policy: str) -> None:
    made = CachePolicy(policy)
    key = made.key("trajectory", "run@1.1", 1)
    assert key == "trajectory\nrun@1.1#1"
    assert made.key(key, "run@1.2", 2) == "trajectory\nrun@1.2#2"
    assert made.key(None, "run@1.2", 2) == "\nrun@1.2#2"


def test_a_trajectory_keeps_its_first_key_for_some_commits() -> None:
    made = CachePolicy(kv_policy.REUSE)
    first = made.key("a", "run@1.1", 1)
    for commits in range(1, kv_policy.REUSE_COMMITS + 2):
        assert made.key("a", f"run@1.{commits}", commits) == first
    late = made.key("a", "run@1.9", kv_policy.REUSE_COMMITS + 2)
    assert late == f"a\nrun@1.9#{kv_policy.REUSE_COMMITS + 2}"
    assert made.key("b", "run@1.9", 6) == "b\nrun@1.9#6"
    assert made.key("", "run@1.9", 6) == "\nrun@1.9#6"  # nobody knows whose it is


def test_trajectories_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_policy, "REMEMBERED", 2)
    made = CachePolicy(kv_policy.REUSE)
    for name in ("a", "b", "a", "c"):
        made.key(name, "run@1.1", 1)
    assert made.key("a", "run@1.2", 2) == "a\nrun@1.1#1"
    assert made.key("b", "run@1.2", 2) == "b\nrun@1.2#2"


def test_other_policies_are_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="'Drop'; there are Keep, Recompute, Reuse"):
        CachePolicy("Drop")
