"""Router, data route and plugin together: what was answered becomes what is drafted from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose_agent.host.route.proxy import DataProxy, Target
from rose_core.rollouts.engines.drafts import CONTEXT
from rose_dev.waiting import until
from rose_engines.weights.calls import Answer, Call, Draft, Drafted
from rose_engines.weights.control import ControlServer
from rose_router.turns import drafting

PROMPT = [8, 2, 5] * 10


def asking(most: int, **sampling: object) -> dict[str, object]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": most, **sampling}}


async def test_an_answer_reaches_the_plugin_of_the_engine_that_its_sibling_runs_on(
    stage: Callable[..., Any], short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "LOOK_SECONDS", 0.05)
    calls: list[list[list[int]]] = []

    def handle(call: Call) -> Answer:
        assert isinstance(call, Draft)
        calls.append(call.texts)
        return Drafted(sum(map(len, call.texts)))

    server = ControlServer(short_dir / "plugin.sock", handle)
    server.start()
    slots: dict[str, Target] = {}
    proxy = DataProxy(slots.get)
    base = f"http://127.0.0.1:{await proxy.start('127.0.0.1', 0)}/slots"
    try:
        async with stage() as s:
            engine = await s.engine("a", token_seconds=0.01)
            slots["slot-1"] = Target(
                engine.url, "secret", lambda _: None, control=short_dir / "plugin.sock"
            )
            engine.owner.send(url=f"{base}/slot-1", token="secret", drafts=True)
            await until(lambda: s.router.service.fleet.bounds().drafts)
            async with s.post("/generate", asking(40)) as reply:
                answer = (await reply.json())["output_ids"]
            async with s.post("/generate", asking(4, min_p=0.5)) as reply:
                assert reply.status == 422
                assert "min_p" in await reply.text()
            sibling = asyncio.create_task(_answer(s, asking(3000)))
            whole = [*PROMPT[-CONTEXT:], *answer]
            await until(lambda: any(whole in texts for texts in calls))
            sibling.cancel()
            await until(lambda: calls[-1] == [])  # the group has ended
    finally:
        await proxy.stop()
        server.close()


async def _answer(stage: Any, body: dict[str, object]) -> None:  # noqa: ANN401  # the fixture's
    async with stage.post("/generate", body) as reply:
        await reply.read()
