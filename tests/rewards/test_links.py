"""Rewards that pods' workers compute: real gateway and worker processes, no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from rose_cli.main import main as rose
from rose_dev.process_testing import CLI, spawn_process
from rose_rewards.gateway import Gateway
from rose_rewards.links import LinkedWorkers, Verification, VerificationResult
from rose_rewards.main import running
from tests.host.helpers import until
from tests.rewards.test_gateway import Rewards, folder, own

__all__ = ["folder"]


@contextlib.asynccontextmanager
async def gateway(folder: Path, listed: Mapping[str, object]) -> AsyncIterator[Rewards]:
    """A gateway without workers of its own; team a, and the functions of nobody."""
    (folder / "functions.yaml").write_text(yaml.safe_dump(dict(listed)))
    (folder / "work").write_text("a work-a\nshared work-shared\n")
    (folder / "work-a").write_text("work-a\n")
    (folder / "work-shared").write_text("work-shared\n")
    (folder / "tokens").write_text("a word-a\nb word-b\n")
    async with (
        aiohttp.ClientSession() as session,
        running(
            folder / "functions.yaml",
            workers=0,
            token_file=folder / "tokens",
            work_token_file=folder / "work",
            target=2.0,
        ) as (found, port),
    ):
        yield Rewards(found, f"http://127.0.0.1:{port}/v1/rewards", session)


@contextlib.asynccontextmanager
async def worker(
    rewards: Rewards, folder: Path, team: str, places: int = 1
) -> AsyncIterator[asyncio.subprocess.Process]:
    words = [f"--gateway={rewards.url.removesuffix('/v1/rewards')}", f"--places={places}"]
    words += [f"--functions={folder / 'functions.yaml'}", f"--team={team}"]
    words += [f"--token-file={folder / ('work-' + (team or 'shared'))}"]
    child = await spawn_process(CLI, "reward-worker", *words)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def places(found: Gateway, team: str, number: int) -> None:
    async def there() -> bool:
        assert isinstance(found.pool, LinkedWorkers)
        return found.pool.places(team) == number

    await until(there, f"{number} places of {team or 'nobody'}")


async def test_a_worker_serves_the_functions_of_its_team_and_no_others(folder: Path) -> None:
    listed = {"mine": own(folder, "noisy", team="a"), "exact": {"rule": "exact"}}
    async with gateway(folder, listed) as rewards, worker(rewards, folder, "a"):
        await places(rewards.gateway, "a", 1)
        status, answer = await rewards.ask("word-a", function="mine")
        assert (status, answer["outcome"], answer["reward"]) == (200, "scored", 0.25)
        other = asyncio.create_task(
            rewards.ask("word-b", function="exact", trajectory="u", answer="1", expected="1")
        )
        again = await rewards.ask("word-a", function="mine", trajectory="v")
        assert again[1]["outcome"] == "scored", "what waits for others holds nobody up"
        assert not other.done(), "team a's worker computes nothing of nobody's"
        assert rewards.gateway.wish(2.0, "") == 1
        assert rewards.gateway.wish(2.0, "a") == 0
        async with worker(rewards, folder, ""):
            assert (await other)[1] == {**(await other)[1], "outcome": "scored", "reward": 1.0}


async def test_a_stranger_serves_nothing(folder: Path) -> None:
    async with gateway(folder, {"exact": {"rule": "exact"}}) as rewards:
        url = rewards.url.replace("/v1/rewards", "/v1/work")
        for token in ("", "word-a", "work-b"):
            shown = {"Authorization": f"Bearer {token}"}
            async with rewards.session.get(url, headers=shown) as reply:
                assert reply.status == 401
        async with rewards.session.get(
            f"{url}?places=0", headers={"Authorization": "Bearer work-a"}
        ) as reply:
            assert (reply.status, "1 to 1024" in await reply.text()) == (400, True)


async def test_a_worker_that_is_killed_loses_and_doubles_nothing(folder: Path) -> None:
    listed = {"sleep": own(folder, "sleep", team="a", tries=3)}
    async with gateway(folder, listed) as rewards:
        asked = [
            asyncio.create_task(
                rewards.ask("word-a", function="sleep", trajectory=f"t{number}", data=0.3)
            )
            for number in range(12)
        ]
        async with worker(rewards, folder, "a", 2) as first, worker(rewards, folder, "a", 2):
            await places(rewards.gateway, "a", 4)

            async def begun() -> bool:
                return rewards.gateway.verifications <= 10

            await until(begun, "two have their results")
            os.killpg(first.pid, signal.SIGKILL)
            reported = [found for _, found in await asyncio.gather(*asked)]
        assert [one["outcome"] for one in reported] == ["scored"] * 12
        again = [
            await rewards.ask("word-a", function="sleep", trajectory=f"t{number}", data=0.3)
            for number in range(12)
        ]
        assert [found for _, found in again] == reported


async def test_a_worker_that_is_told_to_go_finishes_what_it_has(folder: Path) -> None:
    mark = folder / "out" / "go"
    listed = {"wait": own(folder, "wait", team="a", tries=1)}
    async with gateway(folder, listed) as rewards, worker(rewards, folder, "a", 2) as child:
        await places(rewards.gateway, "a", 2)
        asked = asyncio.create_task(rewards.ask("word-a", function="wait", data=str(mark)))

        async def running_() -> bool:
            return rewards.gateway.verifications == 1

        await until(running_, "it runs")
        child.terminate()
        await places(rewards.gateway, "a", 0)
        assert not asked.done()
        rewards.gateway._demand["a"].times.extend([0.5] * 9)
        assert rewards.gateway.wish(2.0, "a") == 0, "nobody is to come for what it finishes"
        waits = asyncio.create_task(
            rewards.ask("word-a", function="wait", trajectory="u", data=str(mark))
        )

        async def waiting() -> bool:
            return rewards.gateway.verifications == 2

        await until(waiting, "another waits")
        assert rewards.gateway.wish(2.0, "a") == 1, "for that one alone"
        waits.cancel()
        mark.touch()
        assert (await asked)[1]["outcome"] == "scored", "one try, and it was not cut short"
        assert await child.wait() == 0


async def test_what_one_that_goes_still_has_takes_no_place_of_one_that_came(folder: Path) -> None:
    mark = folder / "out" / "go"
    listed = {
        "wait": own(folder, "wait", team="a", tries=1),
        "sleep": own(folder, "sleep", team="a"),
    }
    async with gateway(folder, listed) as rewards, worker(rewards, folder, "a") as child:
        await places(rewards.gateway, "a", 1)
        asked = asyncio.create_task(rewards.ask("word-a", function="wait", data=str(mark)))

        async def running_() -> bool:
            return rewards.gateway.verifications == 1

        await until(running_, "it runs")
        child.terminate()
        await places(rewards.gateway, "a", 0)
        async with worker(rewards, folder, "a"):
            answer = await rewards.ask("word-a", function="sleep", trajectory="u", data=0.0)
            assert answer[1]["outcome"] == "scored"
            assert not asked.done(), "it did not wait for the one that goes"
            mark.touch()
            assert (await asked)[1]["outcome"] == "scored"


async def test_a_worker_with_a_place_left_is_not_one_with_nothing_to_do(folder: Path) -> None:
    """It was told to go while it worked: one of several places verified what had waited for it."""
    mark = folder / "out" / "go"
    listed = {"wait": own(folder, "wait", team="a", tries=1)}
    async with gateway(folder, listed) as rewards, worker(rewards, folder, "a", 3):
        await places(rewards.gateway, "a", 3)
        assert rewards.gateway.wish(2.0, "a") == 0
        asked = asyncio.create_task(rewards.ask("word-a", function="wait", data=str(mark)))

        async def running_() -> bool:
            return rewards.gateway.verifications == 1

        await until(running_, "it runs")

        async def wished_for() -> bool:  # a verification is counted before it has its worker
            return rewards.gateway.wish(2.0, "a") == 1

        await until(wished_for, "what runs has its worker")
        async with worker(rewards, folder, "a"):
            await places(rewards.gateway, "a", 4)
            assert rewards.gateway.wish(2.0, "a") == 0, "another one has nothing to do"
        mark.touch()
        assert (await asked)[1]["outcome"] == "scored"


@contextlib.asynccontextmanager
async def dialled(rewards: Rewards, team: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A worker of this team that answers what the test says."""
    url = rewards.url.replace("/v1/rewards", "/v1/work?places=1")
    shown = {"Authorization": f"Bearer work-{team or 'shared'}"}
    async with rewards.session.ws_connect(url, headers=shown) as socket:
        await places(rewards.gateway, team, 1)
        yield socket


async def test_times_that_a_worker_makes_up_stay_within_the_limit_and_within_its_team(
    folder: Path,
) -> None:
    listed = {"mine": own(folder, "noisy", team="a", seconds=5), "exact": {"rule": "exact"}}
    async with gateway(folder, listed) as rewards, dialled(rewards, "a") as socket:
        for number, lie in enumerate((-1e308, 1e308)):
            asked = asyncio.create_task(
                rewards.ask("word-a", function="mine", trajectory=f"t{number}")
            )
            given = msgspec.json.decode(await socket.receive_bytes(), type=Verification)
            await socket.send_bytes(
                msgspec.json.encode(VerificationResult(given.number, said=1.0, seconds=lie))
            )
            assert 0.0 <= (await asked)[1]["seconds"] <= 5.0
        reported = rewards.gateway.p50("a")
        assert reported is not None
        assert 0.0 <= reported <= 5.0
        assert rewards.gateway.p50("") is None, "of nobody's functions nothing is known"
        rewards.gateway._demand["a"].times.extend([60.0] * 9)
        others = [
            asyncio.create_task(
                rewards.ask("word-b", function="exact", trajectory=f"u{number}", answer="1")
            )
            for number in range(4)
        ]

        async def taken() -> bool:
            return rewards.gateway.verifications == 4

        await until(taken, "they wait")
        assert rewards.gateway.wish(2.0, "") == 1, "one finds out; team a's minutes ask for four"
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_an_answer_that_nobody_can_read_ends_the_link_at_once(folder: Path) -> None:
    listed = {"mine": own(folder, "noisy", team="a", tries=1)}
    async with gateway(folder, listed) as rewards, dialled(rewards, "a") as socket:
        asked = asyncio.create_task(rewards.ask("word-a", function="mine"))
        await socket.receive_bytes()
        await socket.send_bytes(b"no JSON")
        async with asyncio.timeout(10):  # the time limit and its start would be 90 s
            assert (await asked)[1]["outcome"] == "lost"
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await places(rewards.gateway, "a", 0)


async def test_closing_starts_nothing_that_waits(folder: Path) -> None:
    listed = {"mine": own(folder, "noisy", team="a")}
    async with gateway(folder, listed) as rewards, dialled(rewards, "a") as socket:
        asked = [
            asyncio.create_task(rewards.ask("word-a", function="mine", trajectory=f"t{number}"))
            for number in range(3)
        ]
        await socket.receive_bytes()

        async def taken() -> bool:
            return rewards.gateway.queue == 3

        await until(taken, "one runs and two wait")
        await rewards.gateway.close()
        assert rewards.gateway.queue == 0, "what ends makes room, and nothing may take it"
        await asyncio.gather(*asked, return_exceptions=True)


async def test_what_overruns_or_fails_in_a_pod_is_told_as_here(folder: Path) -> None:
    names = ("sleep", "fail", "die")
    listed = {name: own(folder, name, team="a", seconds=0.5) for name in names}
    async with gateway(folder, listed) as rewards, worker(rewards, folder, "a"):
        answer = {
            name: (await rewards.ask("word-a", function=name, trajectory=name, data=60))[1]
            for name in names
        }
        assert answer["sleep"]["reason"].startswith("TimedOut")
        assert answer["fail"]["reason"] == "WorkerEnded: ValueError: no such case (tried 2 times)"
        assert "exit code -9 (tried 5 times)" in answer["die"]["reason"]
        await places(rewards.gateway, "a", 1)


def test_a_worker_without_functions_and_an_open_gateway_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text("exact: {rule: exact}")
    (tmp_path / "t").write_text("a b\n")
    listed = f"--functions={tmp_path / 'f.yaml'}"
    assert rose(["reward-worker", listed, "--team=a", "--gateway=http://127.0.0.1:1"]) == 1
    assert "has no function" in capsys.readouterr().err
    words = ["--address=0.0.0.0:0", "--workers=0", f"--token-file={tmp_path / 't'}"]
    assert rose(["rewards", listed, *words]) == 1
    assert "give --work-token-file" in capsys.readouterr().err
