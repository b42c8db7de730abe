"""Every borrowed engine is killed for good in mid-step: nothing long is dropped more than short.

Weights reach an engine some time after everybody has heard of them, as they do in a fleet. Groups
begun in between are a version older than they need be, unless the router has them wait; the long
ones of them are then too old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from rose_core.rollouts.training.consumption import ConsumptionBound
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from tests.router.conftest import Fake, Stage
from tests.router.overlapping import LONG, SHORT, Trainer, writing
from tests.router.test_reports import meter
from tests.simulate.test_same_policies import lease, settings_of

Make = Callable[..., AbstractAsyncContextManager[Stage]]
MEMBERS, GROUPS, BATCH = 2, 32, 4
COMMIT_SECONDS = 0.5


async def test_when_all_borrowed_engines_die_what_is_long_is_kept_as_often_as_what_is_short(
    stage: Make,
) -> None:
    terms = settings_of(lease(staleness=1)).terms
    async with stage(terms=terms) as s:
        ours = await s.engine("ours", EngineKind.DEDICATED, token_seconds=0.01, cap=4)
        borrowed = [await s.engine(name, token_seconds=0.01, cap=4) for name in ("one", "other")]
        alive = [ours, *borrowed]
        fleet = s.router.service.fleet

        async def publish(step: int) -> None:
            version = f"run@1.{step}"
            for engine in alive:
                engine.owner.send(head=version)
                asyncio.get_running_loop().call_later(COMMIT_SECONDS, committed, engine, version)
            await until(lambda: str(fleet.head) == version)

        def committed(engine: Fake, version: str) -> None:
            if engine in alive:
                engine.scheduler.session._version = version
                engine.owner.send(version=version)

        trainer = Trainer(s.url, publish, ConsumptionBound(BATCH, staleness=1), MEMBERS, GROUPS)
        training = asyncio.create_task(trainer.train())
        await until(lambda: trainer.version >= 2 and LONG in trainer.under_way and writing(fleet))
        del alive[1:]
        for engine in borrowed:
            await engine.die()
            engine.owner.send(gate_open=False, leaving=True)
        await training
        counts, _ = await meter(s)
    short, long = trainer.cells[SHORT], trainer.cells[LONG]
    more = short.less(long)  # dropped of long ones, less of short ones
    assert (short.groups, long.groups) == (GROUPS // 2, GROUPS // 2)
    assert trainer.moves >= 2, "turns went on elsewhere"
    assert (short.dropped, long.dropped) == (0, 0)
    assert more.value == 0
    assert more.high < 0.25, f"so many groups can tell: {more}"
    assert counts == {"trained": MEMBERS * GROUPS, "dropped": 0, "lost": 0}
