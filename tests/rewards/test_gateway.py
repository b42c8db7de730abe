"""Rewards over HTTP, computed by real workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from aiohttp import web

from rose_cli.main import main as rose
from rose_core import rights
from rose_core.rewards.limits import LEAST
from rose_core.rewards.results import Scored
from rose_core.rights import Listener
from rose_rewards import functions, pool
from rose_rewards.errors import BadFunctions, TornJournal
from rose_rewards.gateway import Gateway, Reward
from rose_rewards.homes import homes, sweep
from rose_rewards.journal import KnownResult, ResultJournal
from rose_rewards.main import application, running, teams_of
from rose_wire.ports import free_port
from tests.faults.served import routes_of
from tests.host.helpers import until

TEAM = '''
import os, signal, socket, subprocess, time
from pathlib import Path

def sleep(reward):
    time.sleep(reward["data"])
    return 1.0

def wait(reward):
    while reward["data"] and not Path(reward["data"]).exists():
        time.sleep(0.01)
    return 1.0

def fail(reward):
    raise ValueError("no such case")

def die(reward):
    os.kill(os.getpid(), signal.SIGKILL)

def die_once(reward):
    mark = Path(reward["data"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def noisy(reward):
    print("a line that is no answer", flush=True)
    return {"reward": 0.25, "correct": True}

def look(reward):
    """Tries what a team must not be able to do; says what it could."""
    could = []
    for path in reward["data"]:
        try:
            if Path(path).is_dir():
                os.listdir(path)
            else:
                Path(path).read_bytes()
            could.append(path)
        except OSError:
            pass
    try:
        socket.create_connection(("127.0.0.1", reward["expected"]), 1)
        could.append("network")
    except OSError:
        pass
    try:
        os.setuid(0)
        could.append("root")
    except OSError:
        pass
    known = ("HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE")
    could += [name for name in os.environ if name not in known]
    return {"reward": len(could), "correct": not could}

def greedy(reward):
    return float(len(bytearray(4 << 30)))

def nan(reward):
    return float("nan")

def read_on(reward):
    return float(len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout))

def leave_behind(reward):
    """What it leaves in a session of its own holds the pipes of the worker."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(reward["data"][0])
        os._exit(0)
    Path(reward["data"][1]).write_text(str(child))
    time.sleep(60)

def pid(reward):
    return float(os.getpid())

def home(reward):
    Path(os.environ["HOME"], "secret").write_text("of team a")
    Path(reward["data"]).write_text(os.environ["HOME"])
    return 1.0
'''


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that workers' users can enter, as a team's code must be."""
    made = Path(tempfile.mkdtemp(prefix="rose-rewards-"))
    made.chmod(0o755)
    (made / "checks.py").write_text(TEAM)
    (made / "out").mkdir()
    (made / "out").chmod(0o777)
    yield made
    shutil.rmtree(made)


@dataclass
class Rewards:
    """A gateway that serves."""

    gateway: Gateway
    url: str
    session: aiohttp.ClientSession

    async def ask(self, token: str = "", **fields: object) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = {"trajectory": "t", "answer": "", **fields}
        async with self.session.post(self.url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    listed: dict[str, Any],
    workers: int = 2,
    token_file: Path | None = None,
    kept: Path | None = None,
) -> AsyncIterator[Rewards]:
    (folder / "functions.yaml").write_text(yaml.safe_dump(listed))
    async with (
        aiohttp.ClientSession() as session,
        running(folder / "functions.yaml", workers=workers, token_file=token_file, folder=kept) as (
            gateway,
            port,
        ),
    ):
        yield Rewards(gateway, f"http://127.0.0.1:{port}/v1/rewards", session)


async def queued(gateway: Gateway, most: int) -> None:
    async def enough() -> bool:
        return gateway.queue == most

    await until(enough, f"{most} rewards wait or run")


def own(folder: Path, name: str, **more: object) -> dict[str, Any]:
    return {"module": f"checks:{name}", "path": str(folder), **more}


async def test_rules_judge_answers(folder: Path) -> None:
    rules = {name: {"rule": name} for name in ("exact", "contains", "number", "math")}
    cases = [
        ("exact", " 42 ", "42", 1.0),
        ("exact", "43", "42", 0.0),
        ("contains", "it is 42.", "42", 1.0),
        ("number", "So 6 * 7 = 1,042.0", "1042", 1.0),
        ("number", "none", "42", 0.0),
        ("number", "2500001", "2500000", 0.0),
        ("number", "0.3333333", "0.33333333", 1.0),
        ("math", r"the answer is $\frac{2}{4}$", r"$\frac{1}{2}$", 1.0),
        ("math", r"$\frac{2}{3}$", r"$\frac{1}{2}$", 0.0),
    ]
    async with serving(folder, rules) as rewards:
        for number, (name, answer, expected, reward) in enumerate(cases):
            status, reply = await rewards.ask(
                function=name, trajectory=f"t{number}", answer=answer, expected=expected
            )
            assert (status, reply["outcome"], reply.get("reward")) == (200, "scored", reward), reply
            assert reply["correct"] == (reward == 1.0)
        _, reply = await rewards.ask(function="number", answer="1", expected="none")
        assert reply["outcome"] == "masked"
        _, reply = await rewards.ask(
            function="number", trajectory="n", answer="1", expected="1e999"
        )
        assert reply["outcome"] == "masked"
        for name in rules:
            _, reply = await rewards.ask(function=name, trajectory=name, answer="None")
            assert reply["outcome"] == "masked", name


async def test_a_trajectory_has_one_result_however_often_it_is_asked(folder: Path) -> None:
    async with serving(folder, {"sleep": own(folder, "sleep")}) as rewards:
        answers = await asyncio.gather(*(rewards.ask(function="sleep", data=0.2) for _ in range(5)))
        assert len({str(answer) for _, answer in answers}) == 1
        assert (await rewards.ask(function="sleep", data=0.2)) == answers[0]
        assert (await rewards.ask(function="sleep", data=0.2, deadline_seconds=1.0)) == answers[0]
        status, answer = await rewards.ask(function="sleep", data=0.3)
        assert status == 400
        assert "sent before with another content" in answer["message"]


async def test_a_gateway_that_stops_starts_no_worker(folder: Path) -> None:
    async with serving(folder, {"exact": {"rule": "exact"}}) as rewards:
        await rewards.gateway.close()
        assert (await rewards.ask(function="exact", expected="1"))[0] == 429
        assert rewards.gateway.queue == 0


async def test_answers_of_one_team_draw_no_limit_for_another(folder: Path) -> None:
    tokens = folder / "tokens"
    tokens.write_text("a word-a\nb word-b\n")
    listed = {"sleep": own(folder, "sleep", seconds=30)}
    async with serving(folder, listed, token_file=tokens) as rewards:

        async def ask(team: str, number: int, seconds: float) -> str:
            fields = {"trajectory": f"t{number}", "data": seconds, "task": "one"}
            _, answer = await rewards.ask(f"word-{team}", function="sleep", **fields)
            return str(answer["outcome"])

        assert {await ask("a", number, 0) for number in range(LEAST)} == {"scored"}
        assert await ask("a", LEAST, 3) == "masked"
        assert await ask("b", 0, 3) == "scored"


async def test_failures_have_names_and_none_is_a_zero(folder: Path) -> None:
    names = ("sleep", "fail", "die", "die_once", "noisy", "greedy", "missing", "nan", "read_on")
    listed = {name: own(folder, name, seconds=5) for name in names}
    listed["sleep"]["seconds"] = 0.3
    async with serving(folder, listed) as rewards:

        async def outcome(name: str, data: object = None) -> str:
            _, answer = await rewards.ask(function=name, trajectory=name, data=data)
            return ": ".join((answer["outcome"], str(answer.get("reason", answer.get("reward")))))

        assert (await outcome("sleep", 60)).startswith("masked: TimedOut")
        assert (await outcome("fail")).startswith("lost: WorkerEnded: ValueError: no such case")
        assert "exit code -9 (tried 5 times)" in await outcome("die")
        assert await outcome("die_once", str(folder / "out" / "mark")) == "scored: 1.0"
        assert await outcome("noisy") == "scored: 0.25"
        assert (await outcome("greedy")).startswith("lost: WorkerEnded: MemoryError")
        assert "cannot be confined or imported: AttributeError" in await outcome("missing")
        assert (await outcome("nan")).startswith("lost: WorkerEnded: ValueError")
        assert await outcome("read_on") == "scored: 0.0"


async def test_a_worker_that_is_not_ready_in_time_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_START_SECONDS", 0.001)
    async with serving(folder, {"noisy": own(folder, "noisy")}) as rewards:
        _, answer = await rewards.ask(function="noisy")
        assert answer["outcome"] == "lost"
        assert "was not imported within 0.001 s (tried 2 times)" in answer["reason"]


async def test_what_a_verification_leaves_behind_takes_no_worker_with_it(folder: Path) -> None:
    listed = {
        "leave": own(folder, "leave_behind", seconds=0.5),
        "noisy": own(folder, "noisy"),
    }
    async with serving(folder, listed, workers=1) as rewards:
        left = folder / "out" / "left"
        try:
            async with asyncio.timeout(30):
                _, answer = await rewards.ask(function="leave", data=[300, str(left)])
                assert answer["outcome"] == "masked"
                _, answer = await rewards.ask(function="noisy", trajectory="next")
                assert answer["outcome"] == "scored"
        finally:
            os.kill(int(left.read_text()), signal.SIGKILL)


async def test_functions_that_take_turns_keep_their_workers_while_there_is_room(
    folder: Path,
) -> None:
    listed = {
        name: {**own(folder, "pid"), "seconds": 30 + number} for number, name in enumerate("ab")
    }
    for workers, most in ((2, 2), (1, 4)):
        async with serving(folder, listed, workers=workers) as rewards:
            found = {
                (await rewards.ask(function=name, trajectory=f"{name}{turn}"))[1]["reward"]
                for turn in range(2)
                for name in listed
            }
            assert len(found) == most


async def test_bodies_that_are_none_are_named(folder: Path) -> None:
    async with serving(folder, {"exact": {"rule": "exact"}}) as rewards:
        whole = b'{"trajectory": "t", "function": "exact", "answer": %s}'
        bodies = (b'"\xff"', b"[" * 100_000, b'"", "members": -1')
        for body in bodies:
            async with rewards.session.post(rewards.url, data=whole % body) as reply:
                assert reply.status == 400, body[:20]


def test_the_math_library_is_there_before_a_verification_is_timed() -> None:
    module = functions.RewardFunction(rule="math").entry.partition(":")[0]
    code = (
        "import importlib, sys; importlib.import_module(sys.argv[1]); 'sympy' in sys.modules or 1/0"
    )
    subprocess.run([sys.executable, "-c", code, module], check=True)


async def test_a_lost_reward_is_tried_anew_when_it_is_asked_again(folder: Path) -> None:
    listed = {"once": own(folder, "die_once", tries=1)}
    async with serving(folder, listed) as rewards:
        mark = str(folder / "out" / "mark")
        _, answer = await rewards.ask(function="once", data=mark)
        assert answer["outcome"] == "lost"
        _, answer = await rewards.ask(function="once", data=mark)
        assert answer["outcome"] == "scored"


async def test_killed_workers_lose_no_reward_and_double_none(folder: Path) -> None:
    listed = {"sleep": own(folder, "sleep")}
    async with serving(folder, listed, workers=4) as rewards:
        asked = [
            asyncio.create_task(rewards.ask(function="sleep", trajectory=f"t{number}", data=0.01))
            for number in range(200)
        ]
        killed = 0
        while not all(task.done() for task in asked):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if "rose_rewards.worker" in child.cmdline() and killed < 12:
                        child.send_signal(signal.SIGKILL)
                        killed += 1
            await asyncio.sleep(0.1)
        assert killed == 12
        answers = [task.result() for task in asked]
        assert {reported["outcome"] for _, reported in answers} == {"scored"}
        assert rewards.gateway.queue == 0


async def test_the_member_that_completes_a_group_is_verified_first(folder: Path) -> None:
    async with serving(folder, {"wait": own(folder, "wait")}, workers=1) as rewards:
        ended: list[str] = []

        async def one(name: str, group: str = "", members: int = 0, data: str = "") -> None:
            await rewards.ask(
                function="wait", trajectory=name, data=data, group=group, members=members
            )
            ended.append(name)

        await one("a1", "a", 2)
        busy = asyncio.create_task(one("busy", data=str(folder / "go")))
        await queued(rewards.gateway, 1)
        others = []
        for name, group, members in (("b1", "b", 3), ("b2", "b", 3), ("a2", "a", 2)):
            others.append(asyncio.create_task(one(name, group, members)))
            await queued(rewards.gateway, 1 + len(others))
        (folder / "go").touch()
        await asyncio.gather(busy, *others)
        assert ended == ["a1", "busy", "a2", "b1", "b2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="users of their own take root")
async def test_code_of_one_team_reads_nothing_of_another_and_nothing_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_TURN_TOKEN", "a word of ours")
    tokens = folder / "tokens"
    tokens.write_text("a word-a\nb word-b\n")
    tokens.chmod(0o600)
    listed = {
        "home": own(folder, "home", team="a"),
        "look": own(folder, "look", team="b"),
    }
    async with serving(folder, listed, token_file=tokens) as rewards:
        said_home = folder / "out" / "home"
        _, answer = await rewards.ask("word-a", function="home", data=str(said_home))
        assert answer["outcome"] == "scored", answer
        home = said_home.read_text()
        paths = [str(tokens), home, f"{home}/secret", f"/proc/{os.getpid()}/environ"]
        paths += [
            f"/proc/{child.pid}/{name}"
            for child in psutil.Process().children()
            for name in ("environ", "mem", "fd")
        ]
        port = int(rewards.url.split(":")[2].split("/")[0])
        _, answer = await rewards.ask("word-b", function="look", data=paths, expected=port)
        assert (answer["outcome"], answer.get("reward")) == ("scored", 0.0), answer
        assert answer["correct"]


async def test_a_team_calls_its_own_functions_and_a_stranger_none(folder: Path) -> None:
    tokens = folder / "tokens"
    tokens.write_text("a word-a\nb word-b\n")
    listed = {"mine": own(folder, "noisy", team="a")}
    async with serving(folder, listed, token_file=tokens) as rewards:
        assert (await rewards.ask("word-a", function="mine"))[0] == 200
        status, answer = await rewards.ask("word-b", function="mine")
        assert (status, "none of none" in answer["message"]) == (400, True)
        for token in ("", "word-c"):
            assert (await rewards.ask(token, function="mine"))[0] == 401
        base = rewards.url.removesuffix("/v1/rewards")
        served = routes_of(application(rewards.gateway, {}, target=1.0))
        assert set(served) == rights.verbs(Listener.REWARDS), "a verb without a rule"
        answers = {}
        for verb in rights.verbs(Listener.REWARDS):
            method, _, path = verb.partition(" ")
            async with rewards.session.request(method, base + path) as reply:
                answers[verb] = reply.status
        closed = {verb for verb, status in answers.items() if status == 401}
        assert closed == {"POST /v1/rewards", "GET /v1/queue", "GET /v1/work"}


async def test_a_team_hears_of_its_own_functions_queue_alone(folder: Path) -> None:
    tokens = folder / "tokens"
    tokens.write_text("a word-a\nb word-b\n")
    listed = {"mine": own(folder, "noisy", team="a"), "theirs": own(folder, "noisy", team="b")}
    async with serving(folder, listed, token_file=tokens) as rewards:
        assert (await rewards.ask("word-a", function="mine"))[0] == 200
        answer = {}
        for token in ("word-a", "word-b"):
            headers = {"Authorization": f"Bearer {token}"}
            url = rewards.url.replace("/v1/rewards", "/v1/queue")
            async with rewards.session.get(url, headers=headers) as reply:
                answer[token] = await reply.json()
        assert answer["word-a"]["p50_seconds"] > 0
        assert answer["word-b"] == {"queue": 0, "p50_seconds": None, "wish": 0}


@contextlib.asynccontextmanager
async def judge_of(*answers: tuple[int, str]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A judge that gives these, the last one for ever; status 0 = it hangs up. URL and bodies."""
    left, asked = list(answers), list[dict[str, Any]]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        status, text = left.pop(0) if len(left) > 1 else left[0]
        if not status:
            assert request.transport is not None
            request.transport.abort()
        body = {"choices": [{"message": {"content": text}}]}
        return web.json_response(body if status == 200 else {"message": text}, status=status or 200)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


async def test_a_judge_is_asked_until_it_answers_and_one_that_refuses_is_named(
    folder: Path,
) -> None:
    answers = (503, ""), (200, "I say 0.75"), (200, "no number"), (400, "no such model")
    async with judge_of(*answers) as (url, asked):
        listed = {"judge": {"judge": url, "tries": 3, "correctFrom": 0.5}}
        async with serving(folder, listed) as rewards:
            answer = [
                (await rewards.ask(function="judge", trajectory=f"t{number}", answer="A"))[1]
                for number in range(3)
            ]
    assert [one["outcome"] for one in answer] == ["scored", "masked", "lost"]
    assert (answer[0]["reward"], answer[0]["correct"]) == (0.75, True)
    assert "asked 1 times: 400" in answer[2]["reason"]
    assert "no such model" in answer[2]["reason"]
    assert "Answer:\nA\n" in asked[0]["messages"][0]["content"]


async def test_that_a_judge_is_away_uses_up_no_try(folder: Path) -> None:
    async with judge_of((503, ""), (0, ""), (200, "0.5")) as (url, asked):
        listed = {"judge": {"judge": url, "tries": 1}}
        async with serving(folder, listed) as rewards:
            answer = (await rewards.ask(function="judge", trajectory="t"))[1]
    assert (answer["outcome"], answer["reward"], len(asked)) == ("scored", 0.5, 3)


async def test_a_judge_that_is_away_until_the_time_is_over_is_lost_and_so_is_one_that_fails(
    folder: Path,
) -> None:
    async with judge_of((503, "no engine")) as (away, _), judge_of((500, "bug")) as (fails, asked):
        listed = {"away": {"judge": away, "seconds": 1.5}, "fails": {"judge": fails, "tries": 2}}
        async with serving(folder, listed) as rewards:
            lost = (await rewards.ask(function="away", trajectory="t"))[1]
            failed = (await rewards.ask(function="fails", trajectory="u"))[1]
    assert lost["outcome"] == failed["outcome"] == "lost"
    assert "no verdict within 1.5 s; 503: " in lost["reason"]
    assert "no engine" in lost["reason"]
    assert (len(asked), "bug" in failed["reason"]) == (2, True)


async def test_judges_are_asked_at_once_take_no_worker_and_fill_the_queue(folder: Path) -> None:
    more = 120
    asked, answered = 0, asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await answered.wait()
        return web.json_response({"choices": [{"message": {"content": "1"}}]})

    async def all_asked() -> bool:
        return asked == more

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    listed = {"judge": {"judge": f"http://127.0.0.1:{port}", "seconds": 300}}
    try:
        async with serving(folder, listed) as rewards:
            rewards.gateway.queue_limit = more
            waiting = [
                asyncio.create_task(
                    rewards.gateway.score(Reward(trajectory=f"t{n}", function="judge", answer=""))
                )
                for n in range(more)
            ]
            try:
                await until(all_asked, f"{more} judges are asked")
                assert (rewards.gateway.queue, rewards.gateway.verifications) == (more, 0)
                assert [rewards.gateway.queued(team) for team in ("", "other")] == [more, 0]
                assert rewards.gateway.wish(15.0) == rewards.gateway.wish(15.0, "") == 0
                assert (await rewards.ask(function="judge", trajectory="more"))[0] == 429
            finally:
                answered.set()
            assert {type(one) for one in await asyncio.gather(*waiting)} == {Scored}
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f: {}", "give exactly one of rule, module, judge and sandbox"),
        ("f: {rule: exact, judge: 'http://x'}", "give exactly one"),
        ("f: {rule: exact, second: 1}", "f.second"),
        ("f: {module: checks}", "f.module"),
        ("f: {judge: 'http://x', prompt: 'Judge {reply}'}", "it may name {answer}"),
        ("f: {rule: exact, team: shared}", "no team may be called shared"),
        ("[", "is no YAML"),
    ],
)
def test_a_wrong_list_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(BadFunctions, match=message):
        functions.read(tmp_path / "f.yaml")


def test_several_teams_take_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "f.yaml").write_text(
        yaml.safe_dump({name: own(folder, "noisy", team=name) for name in ("a", "b")})
    )
    listed = functions.read(folder / "f.yaml")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadFunctions, match="start one process per team"):
        pool.users(listed, 61_000)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert pool.users(listed, 61_000) == {"a": 61_000, "b": 61_001}


def test_a_door_to_the_network_takes_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text("exact: {rule: exact}")
    words = ["rewards", f"--functions={tmp_path / 'f.yaml'}", "--address=0.0.0.0:0"]
    assert rose(words) == 1
    assert "give --token-file" in capsys.readouterr().err


async def test_a_result_is_the_same_after_a_restart(folder: Path, tmp_path: Path) -> None:
    listed = {"pid": own(folder, "pid"), "fail": own(folder, "fail")}
    async with serving(folder, listed, kept=tmp_path) as rewards:
        _, first = await rewards.ask(function="pid", trajectory="a")
        _, lost = await rewards.ask(function="fail", trajectory="b")
    async with serving(folder, listed, kept=tmp_path) as rewards:
        _, again = await rewards.ask(function="pid", trajectory="a")
        _, other = await rewards.ask(function="pid", trajectory="c")
        assert (await rewards.ask(function="pid", trajectory="a", answer="x"))[0] == 400
        _, anew = await rewards.ask(function="pid", trajectory="b")
    assert first == again != other, "the function says its process, which is another one now"
    assert (lost["outcome"], anew["outcome"]) == ("lost", "scored"), "what is lost is not kept"


async def test_a_result_from_before_an_update_is_known(folder: Path, tmp_path: Path) -> None:
    """A new field that says when, not what, made every kept result one of another content."""
    content = (
        b'{"trajectory":"a","function":"pid","answer":"","expected":null,"task":"",'
        b'"group":"g","members":2,"data":null,"deadline_seconds":null}'
    )
    kept = ResultJournal(tmp_path, most=3)
    kept.record(
        [KnownResult(("", "a"), hashlib.sha256(content).digest(), Scored(-7.0, False, 1.0))]
    )
    kept.close()
    async with serving(folder, {"pid": own(folder, "pid")}, kept=tmp_path) as rewards:
        for keep in (0, 1):
            status, answer = await rewards.ask(
                function="pid", trajectory="a", group="g", members=2, keep=keep
            )
            assert (status, answer["reward"]) == (200, -7.0)


async def test_a_torn_result_is_computed_anew(folder: Path, tmp_path: Path) -> None:
    listed = {"pid": own(folder, "pid")}
    async with serving(folder, listed, kept=tmp_path) as rewards:
        answer = {name: (await rewards.ask(function="pid", trajectory=name))[1] for name in "ab"}
    with contextlib.closing(sqlite3.connect(tmp_path / "results.db")) as database, database:
        changed = "replace(said, '\"reward\":', '\"reward\":9')"
        database.execute(f"UPDATE results SET said = {changed} WHERE trajectory = 'a'")  # noqa: S608  # ours
    async with serving(folder, listed, kept=tmp_path) as rewards:
        _, torn = await rewards.ask(function="pid", trajectory="a")
        _, whole = await rewards.ask(function="pid", trajectory="b")
        _, new = await rewards.ask(function="pid", trajectory="c")
    assert torn["reward"] == new["reward"], "this gateway's worker has computed it"
    assert whole == answer["b"]


def test_the_oldest_results_make_room(tmp_path: Path) -> None:
    journal = ResultJournal(tmp_path, most=3)
    for number in range(5):
        journal.record([KnownResult(("team", str(number)), b"d", Scored(1.0, True, 0.1))])
    assert [one.key[1] for one in journal.results()] == ["2", "3", "4"]
    with pytest.raises(TornJournal, match="in use by another"):
        ResultJournal(tmp_path, most=3)
    journal.close()
    (tmp_path / "results.db").write_bytes(b"torn" * 4096)
    with pytest.raises(TornJournal, match="Remove it"):
        ResultJournal(tmp_path, most=3)


async def test_a_result_that_cannot_be_written_down_is_lost_and_no_zero(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with serving(folder, {"pid": own(folder, "pid")}, kept=tmp_path) as rewards:
        monkeypatch.setattr(ResultJournal, "record", full)
        _, answer = await rewards.ask(function="pid")
        assert answer["outcome"] == "lost"
        assert "disk is full" in answer["reason"]
        monkeypatch.undo()
        assert (await rewards.ask(function="pid"))[1]["outcome"] == "scored"


async def test_killed_gateways_double_no_reward_and_leave_no_folder(
    folder: Path, tmp_path: Path
) -> None:
    """One ``kill -9`` in the middle of rewards, then another gateway on the same folders."""
    (folder / "functions.yaml").write_text(yaml.safe_dump({"pid": own(folder, "pid")}))
    temporary = folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o755)
    port, seen = free_port(), dict[str, Any]()
    words = (
        *(sys.executable, "-m", "rose_cli.main", "rewards"),
        *(f"--functions={folder / 'functions.yaml'}", f"--folder={tmp_path / 'kept'}"),
        *(f"--address=127.0.0.1:{port}", "--workers=2"),
    )

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *words, env={**os.environ, "TMPDIR": str(temporary)}, stderr=asyncio.subprocess.DEVNULL
        )

    async with aiohttp.ClientSession() as session:

        async def ask(name: str) -> None:
            body = {"trajectory": name, "function": "pid", "answer": ""}
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(
                        f"http://127.0.0.1:{port}/v1/rewards", json=body
                    ) as reply:
                        seen.setdefault(name, set()).add((await reply.json()).get("reward"))
                        return
                await asyncio.sleep(0.02)

        gateway = await start()
        try:
            async with asyncio.timeout(120):
                await asyncio.gather(*(ask(f"t{n}") for n in range(20)))
                assert [one.name for one in temporary.iterdir()]
                more = [asyncio.create_task(ask(f"u{n}")) for n in range(20)]
                await asyncio.sleep(0)
                gateway.kill()
                await gateway.wait()
                left = list(temporary.iterdir())
                assert left, "a killed gateway cleans up nothing"
                gateway = await start()
                await asyncio.gather(*more, *(ask(f"t{n}") for n in range(20)))
        finally:
            if gateway.returncode is None:
                gateway.terminate()
            await gateway.wait()
    assert len(seen) == 40
    assert {len(results) for results in seen.values()} == {1}
    assert None not in set().union(*seen.values())
    assert not list(temporary.iterdir())
    assert not any(one.exists() for one in left)


def test_a_living_gateways_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rose-reward-of-a-file").touch()
    (tmp_path / "rose-reward-link").symlink_to(tmp_path)
    with homes(tmp_path) as living:
        (living / "rose-reward-x").mkdir()
        dead = tmp_path / "rose-reward-dead"
        (dead / "home").mkdir(parents=True)
        assert sweep(tmp_path) == [dead]
        assert (living / "rose-reward-x").is_dir()
    assert not living.exists()
    assert (tmp_path / "rose-reward-link").is_symlink()


def test_two_teams_with_one_token_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("a word\nb other\na word\n")
    assert teams_of(path) == {"word": "a", "other": "b"}
    path.write_text("a word\nb word\n")
    with pytest.raises(ValueError, match="a and b have the same token"):
        teams_of(path)
