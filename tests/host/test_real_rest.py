"""Stock SGLang that says what it does: asked first, frozen at its boundary, never while it loads.

On a GPU this is what keeps a frozen engine from holding a lock of the driver. Here SGLang on CPU
has the same launch option, hooks and checkpoints.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from rose_agent.host.enforcement import enforcer
from rose_agent.host.enforcement.tree import EnforcementAction, TreeState, decide
from rose_agent.host.processes.classes import sglang_cpu
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_core.guard.freezing import Activity
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState
from rose_engines.node import activity
from rose_engines.node.rundir import RunDir
from tests.host.helpers import BEARER, guarding, status_of, until
from tests.host.real import needed_model, order, ready, syncing_host

pytestmark = pytest.mark.engine


def on_a_driver(order: EngineOrder) -> EngineProgram:
    """As on a GPU: the engine is asked to say what it does."""
    program = sglang_cpu(order)
    found = {activity.VARIABLE: str(order.slot.activity)}
    return replace(program, environment={**program.environment, **found})


async def test_a_real_engine_is_frozen_at_rest_and_not_while_it_loads(
    rundir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = needed_model()
    frozen_while: list[Activity] = []
    path = RunDir(rundir).slot("slot-1").activity

    def witness(*args: object, **kwargs: object) -> object:
        tree, action = decide(*args, **kwargs)  # type: ignore[arg-type]
        if action is EnforcementAction.FREEZE:
            frozen_while.append(kwargs["activity"])  # type: ignore[arg-type]
        assert action is not EnforcementAction.KILL
        return tree, action

    monkeypatch.setattr(enforcer, "decide", witness)
    async with syncing_host(rundir, model.parent) as host, aiohttp.ClientSession() as client:
        host.host._site.launchers = {"sglang-cpu": on_a_driver}
        with guarding(rundir) as guard:
            # No store answers there: the engine keeps its base weights.
            await host.host.ensure(order(model, "127.0.0.1:1"))

            async def shows(state: Activity) -> bool:
                status = await status_of(host)
                assert status.state is not EngineState.FAILED, status.message
                return activity.read(path) == state

            await until(lambda: shows(Activity.STARTING), "it loads", 240.0)
            guard.close()
            await until(lambda: shows(Activity.RESTING), "it rests between two tensors", 60.0)
            watched = host.host._lives[SlotUid("slot-1")].current.watched

            async def stands() -> bool:
                return watched.state is TreeState.STOPPED

            await until(stands, "it is frozen at rest")
            assert Activity.STARTING not in frozen_while
            guard.open()
            await ready(host)
            endpoint = (await status_of(host)).endpoint
            sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
            turn = {"input_ids": [104], "sampling_params": sampling}
            url = f"{endpoint}/generate"
            async with client.post(url, json=turn, headers=BEARER) as reply:
                reading = asyncio.create_task(reply.read())
                for _ in range(5):
                    guard.close()
                    await until(stands, "it stands still")
                    guard.open()
                    await asyncio.sleep(0.05)
                await reading
        assert Activity.STARTING not in frozen_while
        assert Activity.RESTING in frozen_while
