"""Real workers, real deaths: a hedged reward has one result, whichever of its workers is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose_rewards.functions import RewardFunction
from rose_rewards.metrics import REGISTRY
from rose_rewards.pool import WorkerPool
from tests.host.helpers import until
from tests.rewards.test_gateway import Rewards, folder, own, serving
from tests.rewards.test_links import gateway, places, worker

__all__ = ["folder"]

# Says who it is and waits to be let go; random, so that a second verdict would be seen.
STALL = """
import os, random, time
from pathlib import Path

def stall(reward):
    me = Path(reward["data"], f"{time.monotonic_ns()}.{os.getpid()}")
    me.touch()
    while not Path(f"{me}.go").exists():
        time.sleep(0.01)
    return 1.0 + random.SystemRandom().random()
"""
# Late after a second, as nearly all correct answers took no longer; hopeless after the function's
# own limit, because some took long: a machine under load must not end what a test lets wait.
TOOK_S = (*[1.0] * 61, *[60.0] * 3)


def listed(folder: Path, **more: object) -> dict[str, Any]:
    (folder / "checks.py").write_text(STALL)
    return {"stall": own(folder, "stall", **more)}


def taught(rewards: Rewards, team: str) -> None:
    """Correct answers of the task took so long."""
    for seconds in TOOK_S:
        rewards.gateway.limits.learn("stall", f"{team}/t", seconds)


async def begun(folder: Path, count: int) -> list[tuple[Path, int]]:
    """Where each of so many copies or more waits, and its process, in the order of their begin."""

    def waiting() -> list[Path]:
        return sorted(one for one in (folder / "out").iterdir() if one.suffix != ".go")

    async def there() -> bool:
        return len(waiting()) >= count

    await until(there, f"{count} copies run")
    return [(one, int(one.suffix[1:])) for one in waiting()]


def go(copy: tuple[Path, int]) -> None:
    Path(f"{copy[0]}.go").touch()


async def ended(pid: int) -> None:
    async def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await until(gone, f"{pid} has ended")


async def free(rewards: Rewards) -> None:
    async def none() -> bool:
        return rewards.gateway.verifications == 0

    await until(none, "every place is free again")


def ask(rewards: Rewards, folder: Path, token: str = "") -> asyncio.Task[tuple[int, Any]]:
    fields = {"function": "stall", "task": "t", "data": str(folder / "out")}
    return asyncio.create_task(rewards.ask(token, **fields))


@pytest.mark.parametrize("killed", [0, 1, None])
async def test_one_of_two_workers_may_die(folder: Path, killed: int | None) -> None:
    async with serving(folder, listed(folder), workers=2) as rewards:
        taught(rewards, "")
        asked = ask(rewards, folder)
        copies = await begun(folder, 2)
        if killed is not None:
            os.kill(copies[killed][1], signal.SIGKILL)
            await ended(copies[killed][1])
        winner = 1 if killed == 0 else 0
        go(copies[winner])
        _, result = await asked
        assert result["outcome"] == "scored"
        assert len(await begun(folder, 2)) == 2, "one of its two workers was enough"
        await ended(copies[1 - winner][1])
        assert (await ask(rewards, folder))[1] == result, "asked again: the same result"
        labels = {"function": "stall", "winner": ("first", "second")[winner]}
        assert (REGISTRY.get_sample_value("rose_rewards_hedged_total", labels) or 0) >= 1
        await free(rewards)


async def test_a_copy_that_is_stopped_as_it_makes_room_leaves_no_home(tmp_path: Path) -> None:
    """The worker whose place it took was known to nobody any more, and its folder stayed."""
    rules = {name: RewardFunction(rule=name) for name in ("exact", "contains")}
    workers = WorkerPool(rules, dict.fromkeys(rules, 0), most=1, above=tmp_path)
    await workers.verify("exact", b'{"answer": "1", "expected": "1"}', 20)

    def made() -> list[Path]:
        return list(tmp_path.iterdir())

    assert len(made()) == 1
    copy = asyncio.create_task(workers.verify("contains", b"{}", 20))
    for _ in range(3):  # it ends the other one by now, and waits until it has
        await asyncio.sleep(0)
    copy.cancel()
    await asyncio.gather(copy, return_exceptions=True)
    await workers.close()

    async def empty() -> bool:
        return not made()

    await until(empty, "no home is left")


async def test_both_may_die_and_it_is_tried_again(folder: Path) -> None:
    async with serving(folder, listed(folder), workers=2) as rewards:
        taught(rewards, "")
        asked = ask(rewards, folder)
        for _, pid in await begun(folder, 2):
            os.kill(pid, signal.SIGKILL)
        copies = await begun(folder, 3)  # four where the third takes a second to begin: it is late
        go(copies[-1])
        assert (await asked)[1]["outcome"] == "scored"


async def test_the_second_copy_goes_to_another_pod_and_the_pod_of_the_first_may_be_lost(
    folder: Path,
) -> None:
    async with gateway(folder, listed(folder, team="a")) as rewards:
        taught(rewards, "a")
        # The first has more room than the second, before and after, and is not given both.
        async with worker(rewards, folder, "a", 3) as first:
            await places(rewards.gateway, "a", 3)
            async with worker(rewards, folder, "a", 1):
                await places(rewards.gateway, "a", 4)
                asked = ask(rewards, folder, "word-a")
                copies = await begun(folder, 2)
                pods = [psutil.Process(pid).ppid() for _, pid in copies]
                assert pods[0] == first.pid
                assert pods[1] != first.pid
                os.killpg(first.pid, signal.SIGKILL)
                await places(rewards.gateway, "a", 1)
                go(copies[1])
                assert (await asked)[1]["outcome"] == "scored"


async def test_a_pod_ends_what_nobody_waits_for(folder: Path) -> None:
    async with gateway(folder, listed(folder, team="a")) as rewards:
        taught(rewards, "a")
        async with worker(rewards, folder, "a", 2):
            await places(rewards.gateway, "a", 2)
            asked = ask(rewards, folder, "word-a")
            copies = await begun(folder, 2)
            go(copies[1])
            _, result = await asked
            assert result["outcome"] == "scored"
            await ended(copies[0][1])
            assert (await ask(rewards, folder, "word-a"))[1] == result
