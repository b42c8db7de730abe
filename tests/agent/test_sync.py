"""The agent's link to the operators: which of them it meets, and when it speaks first."""

from __future__ import annotations

import asyncio
import contextlib

from rose_agent.guard.sync.operator_link import OperatorLink
from rose_core.wire.sync import SyncReply, SyncRequest
from rose_wire.rpc import Server
from rose_wire.services import SYNC


class Operator:
    """A replica that answers as it is told to."""

    def __init__(self) -> None:
        self.complete = False

    async def sync(self, _request: SyncRequest) -> SyncReply:
        return SyncReply(term=1, complete=self.complete, sync_period_seconds=0.25)


async def until(condition: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await condition.wait()


async def test_nothing_is_reported_before_the_report_is_whole() -> None:
    operator, received, asked = Operator(), asyncio.Event(), asyncio.Event()
    server = Server()
    server.unary(SYNC, operator.sync)
    port = await server.start("127.0.0.1:0")
    surveyed = False

    def ready() -> bool:
        asked.set()
        return surveyed

    link = OperatorLink(
        f"127.0.0.1:{port}",
        "",
        lambda: SyncRequest("n", "0", 0),
        lambda *_: received.set(),
        ready=ready,
    )
    task = asyncio.create_task(link.run())
    await until(asked)
    assert not received.is_set()
    surveyed = True
    await until(received)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await server.stop()


async def test_after_an_incomplete_answer_the_link_is_made_anew_until_one_is_complete() -> None:
    operator = Operator()
    answers: list[bool] = []
    complete = asyncio.Event()
    server = Server()
    server.unary(SYNC, operator.sync)
    port = await server.start("127.0.0.1:0")

    def on_reply(reply: SyncReply, _sent_s: float) -> None:
        answers.append(reply.complete)
        operator.complete = len(answers) >= 2
        if reply.complete:
            complete.set()

    link = OperatorLink(f"127.0.0.1:{port}", "", lambda: SyncRequest("n", "0", 0), on_reply)
    task = asyncio.create_task(link.run())
    await until(complete)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await server.stop()
    assert answers[:3] == [False, False, True]
