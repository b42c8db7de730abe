"""AReaL's hooks over stand-ins of what they are put into; ``test_areal_client.py`` has AReaL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rose_trainer.adapters import areal
from tests.router.conftest import Stage
from tests.router.pushing import PROMPT, json_of
from tests.router.test_reports import meter, remembered

Make = Callable[..., AbstractAsyncContextManager[Stage]]


class SGLangBackend:
    """AReaL's, as far as a turn matters."""

    def build_generation_request(self, prompt: list[int], **_: object) -> Any:  # noqa: ANN401  # AReaL's
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        return SimpleNamespace(endpoint="/generate", payload=body)


@dataclass
class Engine:
    """AReaL's engine: two tries of every turn, as after a lost connection."""

    s: Stage
    backend: Any

    async def agenerate(self, prompt: list[int]) -> list[int]:
        request = self.backend.build_generation_request(prompt, with_lora=False, version=0)
        for _ in range(2):
            answer = await json_of(self.s.post(request.endpoint, request.payload))
        tokens: list[int] = answer["output_ids"]
        return tokens


@dataclass
class Conversation:
    """A workflow of two turns; the reward is the row's, and a row without one gives nothing."""

    async def arun_episode(self, engine: Engine, data: dict[str, Any]) -> Any:  # noqa: ANN401
        tokens = await engine.agenerate(PROMPT)
        await engine.agenerate([*PROMPT, *tokens, 7])
        if "error" in data:
            raise RuntimeError(data["error"])
        reward = data.get("reward")
        return None if reward is None else {"rewards": torch.tensor([float(reward)])}


@dataclass
class GroupedRolloutWorkflow:
    """AReaL's: so many of another."""

    workflow: Any
    group_size: int

    async def arun_episode(self, engine: Engine, data: dict[str, Any]) -> Any:  # noqa: ANN401
        members = (self.workflow.arun_episode(engine, data) for _ in range(self.group_size))
        found = [one for one in await asyncio.gather(*members) if one is not None]
        return found or None


@dataclass
class Pending:
    """AReaL's ``_RolloutTaskInput``."""

    data: dict[str, Any]
    workflow: Any
    should_accept_fn: Callable[[Any], bool] | None = None
    is_eval: bool = False


@dataclass
class WorkflowExecutor:
    """AReaL's, as far as a task matters."""

    engine: Engine
    failed: list[Exception] = field(default_factory=list)

    def _create_workflow_task(self, pending: Pending) -> Callable[[], Awaitable[Any]]:
        async def run() -> Any:  # noqa: ANN401  # AReaL's
            try:
                made = await pending.workflow.arun_episode(self.engine, pending.data)
            except RuntimeError as error:
                self.failed.append(error)
                return None
            accept = pending.should_accept_fn
            return made if made is not None and (accept is None or accept(made)) else None

        return run


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stage], Any]:
    """AReaL's executor with our hooks in it."""

    def made(s: Stage) -> Any:  # noqa: ANN401  # AReaL's
        names = {"executor": WorkflowExecutor, "backend": SGLangBackend}
        for name, stand_in in names.items():
            module = ModuleType(f"areal_{name}")
            setattr(module, stand_in.__name__, type(stand_in.__name__, (stand_in,), {}))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", f"{s.url.removeprefix('http://')},other:1")
        for _ in range(2):
            areal.install("areal_executor", "areal_backend")
        backend = sys.modules["areal_backend"].SGLangBackend()
        return sys.modules["areal_executor"].WorkflowExecutor(Engine(s, backend))

    return made


async def test_areals_groups_turns_tries_and_fates_are_named(
    stage: Make, executor: Callable[[Stage], Any]
) -> None:
    async with stage() as s:
        await s.engine()
        does = executor(s)
        grouped = GroupedRolloutWorkflow(Conversation(), 3)
        for reward, accept in ((1.0, None), (0.0, lambda _: False), (None, None)):
            task = does._create_workflow_task(Pending({"reward": reward}, grouped, accept))
            await task()
        assert s.router.service.ledger.totals.turns == 9 * 2, "two tries are one turn"
        counts, inferred = await meter(s)
        assert counts == {"trained": 3, "dropped": 6, "lost": 0}
        assert inferred["joined_a_group"] == inferred["ends"] == 0
        shown = await s.get("/trajectories")
        (every,) = (row for row in shown["inclusion"] if row["dimension"] == "all")
        assert sum(every[arm]["groups"] for arm in ("any", "dedicated")) == 3
        assert not remembered(s)
        assert isinstance(grouped.workflow, Conversation), "the user's own is left as it was"


async def test_an_episode_of_areals_that_fails_has_ended_and_was_dropped(
    stage: Make, executor: Callable[[Stage], Any]
) -> None:
    async with stage() as s:
        await s.engine()
        does = executor(s)
        task = does._create_workflow_task(Pending({"error": "a tool's"}, Conversation()))
        assert await task() is None
        assert [str(error) for error in does.failed] == ["a tool's"]
        assert (await meter(s))[0] == {"trained": 0, "dropped": 1, "lost": 0}


async def test_areals_evaluations_are_withdrawn(
    stage: Make, executor: Callable[[Stage], Any]
) -> None:
    async with stage() as s:
        await s.engine()
        task = executor(s)._create_workflow_task(
            Pending({"reward": 1.0}, Conversation(), is_eval=True)
        )
        assert await task() is not None
        assert not remembered(s)
        assert (await meter(s))[0] == {"trained": 0, "dropped": 0, "lost": 0}


def test_rewards_of_interactions_are_read_too_and_unknown_ones_stay_unknown() -> None:
    steps = {"1": SimpleNamespace(reward=None), "2": SimpleNamespace(reward=0.5)}
    assert areal.reward_of(steps) == 0.5
    assert areal.reward_of({"1": SimpleNamespace(reward=None)}) is None
    assert areal.reward_of({"1": object()}) is None
