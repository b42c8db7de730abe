"""AReaL's turns carry their trajectory and group, and the router hears what its executor accepts.

    from rose_trainer.adapters import areal

    areal.install()

AReaL sends a prompt and nothing else, so three of its own methods are put inside ours:

| AReaL's | adds |
|---|---|
| ``WorkflowExecutor._create_workflow_task`` | a task is a group; its end says what was accepted |
| ``RolloutWorkflow.arun_episode`` of that task | a trajectory: its turns, its end, its reward |
| ``build_generation_request`` of the backend | both names, and an id for the tries of a turn |

Whatever AReaL accepts it trains on, so *accepted* is reported as trained on and *rejected* as
dropped; what its evaluations make is withdrawn. Every process that runs rollouts has to call
``install`` before its first: the module of the workflow is a good place. ``ROSE_ROUTER_URL`` names
the router, else the first of ``AREAL_LLM_SERVER_ADDRS``. Only ``install`` imports ``areal``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from rose_trainer.adapters.report import UNREADABLE, finish_async, report_async

__all__ = ["install"]

LOG = logging.getLogger(__name__)

_NAMES: ContextVar[Mapping[str, str] | None] = ContextVar("_NAMES", default=None)
"""Of the trajectory whose turns are asked for; a group's members run in tasks of their own."""

GROUPED = "GroupedRolloutWorkflow"
"""AReaL's workflow that runs another once for each member of a group."""


_CREATE = "_create_workflow_task"


class Workflow(Protocol):
    """AReaL's ``RolloutWorkflow``."""

    async def arun_episode(self, engine: Any, data: Any) -> Any:  # noqa: ANN401  # AReaL's
        """One trajectory as tensors or interactions; ``None`` = it is rejected."""
        ...


@dataclass
class Task:
    """One of AReaL's tasks: a group of trajectories that answer one prompt.

    Attributes:
        rewards: by session, of those that gave something to train on.
        empty: sessions of those that gave nothing.
    """

    url: str
    group: str = field(default_factory=lambda: uuid.uuid4().hex)
    rewards: dict[str, float | None] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)

    async def report(self, *, accepted: bool, evaluation: bool) -> None:
        """Report what became of its trajectories; never raises."""
        dropped = dict.fromkeys(self.empty, None) | ({} if accepted else self.rewards)
        if evaluation:
            await report_async(self.url, {}, withdrawn=[*self.rewards, *self.empty])
        elif self.rewards or dropped:
            await report_async(self.url, self.rewards if accepted else {}, dropped)


class NamedWorkflow:
    """A workflow whose every episode is one trajectory of a task."""

    def __init__(self, own: Workflow, task: Task) -> None:
        self._own, self._task = own, task

    async def arun_episode(self, engine: Any, data: Any) -> Any:  # noqa: ANN401  # AReaL's
        """AReaL's own, its turns named; its end is reported, also when it fails."""
        session = uuid.uuid4().hex
        before = _NAMES.set({"session": session, "group": self._task.group})
        result = None
        try:
            result = await self._own.arun_episode(engine, data)
        finally:
            _NAMES.reset(before)
            if result is None:
                self._task.empty.append(session)
            else:
                self._task.rewards[session] = reward_of(result)
            await finish_async(self._task.url, session)
        return result


def reward_of(result: Mapping[str, Any]) -> float | None:
    """The reward of what an episode gave: tensors with ``rewards``, or interactions by their id."""
    try:
        if "rewards" in result:
            return float(result["rewards"].float().mean())
        known = [one.reward for one in result.values() if one.reward is not None]
        return float(known[-1]) if known else None
    except UNREADABLE as error:
        LOG.warning("a trajectory's reward is not reported: %r", error)
        return None


def naming(build: Callable[..., Any]) -> Callable[..., Any]:
    """AReaL's ``build_generation_request``, whose payload says whose turn it is."""

    def built(backend: object, *asked: Any, **named: Any) -> Any:  # noqa: ANN401  # AReaL's
        request = build(backend, *asked, **named)
        names = _NAMES.get()
        if names is not None:
            request.payload["rose"] = dict(names)
            request.payload["rid"] = uuid.uuid4().hex  # its tries post the same payload
        return request

    return built


def reporting_tasks(create: Callable[..., Any], url: str) -> Callable[..., Any]:
    """AReaL's ``_create_workflow_task``, whose tasks are groups and report what became of them."""

    def created(executor: object, pending: Any) -> Callable[[], Awaitable[Any]]:  # noqa: ANN401  # AReaL's
        task = Task(url)
        workflow = pending.workflow
        if type(workflow).__name__ == GROUPED:
            workflow = copy.copy(workflow)
            workflow.workflow = NamedWorkflow(workflow.workflow, task)
        else:
            workflow = NamedWorkflow(workflow, task)
        run = create(executor, dataclasses.replace(pending, workflow=workflow))

        async def executed() -> Any:  # noqa: ANN401  # AReaL's
            result = await run()
            await task.report(accepted=result is not None, evaluation=pending.is_eval)
            return result

        return executed

    return created


def install(
    executor: str = "areal.infra.workflow_executor",
    backend: str = "areal.engine.sglang_remote",
    url: str = "",
) -> None:
    """Have AReaL's rollouts named and reported; once, however often it is asked for.

    Args:
        executor: AReaL's module of that name.
        backend: its module for engines that speak as SGLang.
        url: the lease's; by default from the environment.

    Raises:
        ImportError: AReaL is not installed, or has no such modules.
        KeyError: no URL is given, and the environment names none.
    """
    have = os.environ
    url = url or have.get("ROSE_ROUTER_URL", "")
    url = url or f"http://{have['AREAL_LLM_SERVER_ADDRS'].partition(',')[0]}"
    tasks = importlib.import_module(executor).WorkflowExecutor
    requests = importlib.import_module(backend).SGLangBackend
    own = getattr(tasks, _CREATE)
    if own.__module__ != __name__:
        setattr(tasks, _CREATE, reporting_tasks(own, url))
        requests.build_generation_request = naming(requests.build_generation_request)
