"""Rewards of programs: hosts that fail, places, cancellation, and what is left behind.

The host is the real one over HTTP. Its runtime plays programs here, and runs them where a test has
the marker ``sandbox``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_core.rewards.cases import Case, read_cases
from rose_core.rewards.results import Lost, Masked, Result, Scored
from rose_dev.process_testing import CLI, start_process
from rose_rewards.errors import BadFunctions, BadReward
from rose_rewards.functions import RewardFunction, read
from rose_rewards.gateway import Gateway, Reward
from rose_rewards.main import running
from rose_rewards.programs import verdict
from rose_wire.ports import free_port
from tests.host.helpers import until
from tests.rewards.program_hosts import (
    Ended,
    PlayedRuntime,
    ProgramHost,
    doubles,
    program_host,
    real_host,
)

CASES = {"inputs": ["1", "2", "30"], "outputs": ["2", "4", "60"]}
MANY = {"inputs": [str(n) for n in range(40)], "outputs": [str(2 * n) for n in range(40)]}


@pytest.fixture
def runtime() -> PlayedRuntime:
    return PlayedRuntime()


@pytest.fixture
async def host(tmp_path: Path, runtime: PlayedRuntime) -> AsyncIterator[ProgramHost]:
    async with program_host(tmp_path, runtime) as made:
        yield made


@contextlib.asynccontextmanager
async def gateway_of(folder: Path, listed: dict[str, Any]) -> AsyncIterator[Gateway]:
    (folder / "functions.yaml").write_text(yaml.safe_dump(listed))
    async with running(folder / "functions.yaml", workers=1, folder=folder / "kept") as (made, _):
        yield made


def reward(answer: str, trajectory: str = "t", **more: object) -> Reward:
    fields = {"function": "programs", "expected": CASES, **more}
    return Reward(trajectory=trajectory, answer=answer, **fields)  # type: ignore[arg-type]


async def asked(folder: Path, host: ProgramHost, answer: str, **more: object) -> Result:
    """The result of a gateway of its own."""
    async with gateway_of(folder, {"programs": host.listed(**more)}) as gateway:
        return await gateway.score(reward(answer))


async def test_a_program_that_is_right_is_told_from_one_that_is_not(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    async def mostly(given: str) -> Ended:
        return "exited", 0, b"2" if given == "1" else b"4"

    runtime.programs["mostly"] = mostly
    async with gateway_of(
        tmp_path, {"programs": host.listed(), "share": host.listed(partial=True)}
    ) as gateway:
        right = await gateway.score(reward("so:\n```python\ndoubles\n```"))
        wrong = await gateway.score(reward("mostly", "w"))
        share = await gateway.score(reward("mostly", "s", function="share"))
    assert isinstance(right, Scored)
    assert (right.reward, right.correct, right.reason) == (1.0, True, "")
    assert isinstance(wrong, Scored)
    assert (wrong.reward, wrong.correct) == (0.0, False)
    assert wrong.reason == "case 3 of 3: WrongAnswer"
    assert isinstance(share, Scored)
    assert share.reward == pytest.approx(2 / 3)
    assert not share.correct
    assert host.host.sessions() == ()


@pytest.mark.parametrize(
    "expected",
    [
        {"inputs": ["GIVEN"], "outputs": ["SECRET"]},
        {"inputs": [["GIVEN"]], "outputs": [["SECRET"]], "fn_name": "f"},
        [{"input": '"GIVEN"', "output": '"SECRET"', "fn_name": "f"}],
        ["assert f('GIVEN') == 'SECRET'"],
        "assert {'SECRET': 1} == f('GIVEN')",
    ],
)
async def test_no_byte_of_what_is_expected_goes_to_a_host(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime, expected: object
) -> None:
    async def none(_: str) -> Ended:
        return "exited", 0, b"1"

    runtime.programs["none"] = none
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        result = await gateway.score(reward("none", expected=expected))
    assert isinstance(result, Scored)
    sent = b"".join(runtime.received)
    assert b"GIVEN" in sent
    assert b"SECRET" not in sent


async def test_no_case_is_run_after_one_that_failed(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    async def none(_: str) -> Ended:
        return "exited", 0, b""

    runtime.programs["none"] = none
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        await gateway.score(reward("none", expected=MANY))
        assert runtime.ran == [("none", 0)]
        runtime.ran.clear()
        result = await gateway.score(reward("doubles", "r", expected=MANY))
    assert isinstance(result, Scored)
    assert result.correct
    assert runtime.ran == [("doubles", number) for number in range(40)]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (("late", -9, b""), "case 1 of 3: TimeLimit"),
        (("too much", -9, b""), "case 1 of 3: OutputLimit"),
        (("exited", 1, b"2"), "case 1 of 3: Crashed: it ended with 1"),
    ],
)
async def test_what_a_program_does_to_itself_is_its_zero(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime, end: Ended, reason: str
) -> None:
    async def fails(_: str) -> Ended:
        return end

    runtime.programs["fails"] = fails
    result = await asked(tmp_path, host, "fails")
    assert isinstance(result, Scored)
    assert result.reward == 0
    assert result.reason.startswith(reason)


def ends_its_sandbox(runtime: PlayedRuntime, before: Callable[[], None] = lambda: None) -> None:
    """Play a program ``ends`` that does so, and a control that is well."""

    async def ends(_: str) -> Ended:
        before()
        runtime.lose()
        return "exited", 0, b""

    async def prints(_: str) -> Ended:
        return "exited", 0, b"rose"

    runtime.programs |= {"ends": ends, "print('rose')": prints}


async def test_a_program_that_ends_its_sandbox_is_wrong_and_not_lost(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    ends_its_sandbox(runtime)
    result = await asked(tmp_path, host, "ends")
    assert isinstance(result, Scored)
    assert result.reward == 0
    assert result.reason.startswith("SandboxEnded: the program ended its sandbox 2 times")


async def test_the_control_is_python_whatever_the_programs_are(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    ends_its_sandbox(runtime)
    result = await asked(tmp_path, host, "ends", command="node {file}")
    assert isinstance(result, Scored)
    *others, control = [one.split()[0] for one in runtime.commands]
    assert (set(others), control) == ({"node"}, "python3")


async def test_however_long_a_program_takes_to_break_its_sandbox_it_is_wrong(
    host: ProgramHost, runtime: PlayedRuntime
) -> None:
    """Its time is not the host's, of which there is so much and no more."""
    now = [0.0]

    def pass_time() -> None:
        now[0] += 1000

    ends_its_sandbox(runtime, pass_time)
    cases = read_cases(CASES)
    async with aiohttp.ClientSession() as http:
        found = await verdict(host.function(), http, "ends", cases, lambda: now[0])
    assert found.reward == 0
    assert found.reason.startswith("SandboxEnded")


@pytest.mark.parametrize(
    ("cpu", "seconds", "reason"),
    [
        (0.1, 0.7, ""),  # a host that many share
        (0.5, 0.5, "TimeLimit: 15.5 s of a processor in 15.5 s for 31 of 40 cases"),
        (0.1, 2.0, "TimeLimit: 3.1 s of a processor in 62 s for 31 of 40 cases"),
    ],
)
async def test_all_cases_together_have_processor_time_and_three_times_that_on_the_clock(
    tmp_path: Path,
    host: ProgramHost,
    runtime: PlayedRuntime,
    *,
    cpu: float,
    seconds: float,
    reason: str,
) -> None:
    runtime.cpu, runtime.seconds = cpu, seconds
    async with gateway_of(tmp_path, {"programs": host.listed(seconds=10)}) as gateway:
        result = await gateway.score(reward("doubles", expected=MANY))
    assert isinstance(result, Scored)
    assert (result.correct, result.reason) == (not reason, reason)


async def test_functions_of_another_language_are_lost_by_name(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    listed = {"programs": host.listed(command="node {file}")}
    async with gateway_of(tmp_path, listed) as gateway:
        result = await gateway.score(reward("x", expected=CALLS["calls"]))
    assert isinstance(result, Lost)
    assert "functions are called in Python, and the command is node" in result.reason
    assert runtime.ran == []


async def test_a_host_on_which_no_program_runs_makes_no_zero(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    async def ends(_: str) -> Ended:
        runtime.lose()
        return "exited", 0, b""

    runtime.programs |= {"ends": ends, "print('rose')": ends}
    result = await asked(tmp_path, host, "ends")
    assert isinstance(result, Lost)
    assert result.reason.startswith("SandboxFailed: sandbox, tried 2 times")


async def test_a_host_that_is_started_anew_is_asked_again_and_uses_up_no_try(
    tmp_path: Path, runtime: PlayedRuntime
) -> None:
    """Each kills the host under a program that runs; the third one finishes it."""
    port, hosts = free_port(), contextlib.AsyncExitStack()
    begun = asyncio.Event()

    async def waits(given: str) -> Ended:
        if len(runtime.ran) <= 3:
            begun.set()
            await asyncio.sleep(3600)
        return await doubles(given)

    runtime.programs["waits"] = waits
    async with hosts:
        one = await hosts.enter_async_context(program_host(tmp_path, runtime, port=port))
        async with gateway_of(tmp_path, {"programs": one.listed(tries=1)}) as gateway:
            result = asyncio.create_task(gateway.score(reward("waits")))
            for _ in range(3):
                await begun.wait()
                begun.clear()
                await one.runner.cleanup()
                runtime.lose()
                one = await hosts.enter_async_context(program_host(tmp_path, runtime, port=port))
            found = await result
        assert isinstance(found, Scored)
        assert found.correct
        assert one.host.sessions() == ()


async def test_a_sandbox_that_a_new_host_does_not_know_is_no_fault_of_its_program(
    tmp_path: Path, runtime: PlayedRuntime
) -> None:
    """The host is another one between two commands, so that no connection breaks."""
    async with (
        program_host(tmp_path / "one", runtime) as one,
        program_host(tmp_path / "two", PlayedRuntime()) as two,
    ):
        behind = one

        async def passed_on(request: web.Request) -> web.Response:
            nonlocal behind
            if request.path.endswith("/exec") and runtime.ran:
                behind = two
            async with http.request(
                request.method,
                behind.url + str(request.rel_url),
                data=await request.read(),
                headers={"Authorization": request.headers.get("Authorization", "")},
            ) as reply:
                life = {"Rose-Host-Life": reply.headers["Rose-Host-Life"]}
                return web.Response(
                    status=reply.status, body=await reply.read() or None, headers=life
                )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", passed_on)
        async with aiohttp.ClientSession() as http, TestServer(app) as front:
            result = await asked(tmp_path, one, "doubles", tries=1, sandbox=f"{front.make_url('')}")
            assert isinstance(result, Scored), result
            assert result.correct
            assert [number for _, number in runtime.ran] == [0]


async def test_a_host_that_refuses_or_is_away_is_a_lost_reward_with_its_words(
    tmp_path: Path, host: ProgramHost
) -> None:
    result = await asked(tmp_path, host, "doubles", image="absent")
    assert isinstance(result, Lost)
    assert "no image absent" in result.reason
    host.token.write_text("another word")
    result = await asked(tmp_path, host, "doubles")
    assert isinstance(result, Lost)
    assert "bearer token missing or wrong" in result.reason
    away = f"http://127.0.0.1:{free_port()}"
    result = await asked(tmp_path, host, "doubles", sandbox=away, seconds=1)
    assert isinstance(result, Lost)
    assert "no verdict within 1 s of the host" in result.reason
    assert f"{away} is away" in result.reason


async def test_an_image_without_python_is_lost_by_name(
    tmp_path: Path, host: ProgramHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.rewards.program_hosts._COMMAND", __import__("re").compile("never"))
    result = await asked(tmp_path, host, "doubles")
    assert isinstance(result, Lost)
    assert "image base does not run python3" in result.reason


async def test_places_are_the_hosts_and_the_group_that_lacks_least_goes_first(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    gate, order = asyncio.Event(), list[str]()

    def program(name: str) -> None:
        async def run(given: str) -> Ended:
            order.append(name)
            await gate.wait()
            return await doubles(given)

        runtime.programs[name] = run

    names = ["first", "of-four", "of-two"]
    for name in names:
        program(name)
    members = {"of-four": 4, "of-two": 1}
    one = {"inputs": ["1"], "outputs": ["2"]}
    listed = {name: host.listed(atOnce=1) for name in ("programs", "others")}
    async with gateway_of(tmp_path, listed) as gateway:
        tasks = []
        for number, name in enumerate(names):
            more = {"group": name, "members": members[name]} if name in members else {}
            function = ("programs", "others")[number % 2]
            asking = reward(name, name, expected=one, function=function, **more)
            tasks.append(asyncio.create_task(gateway.score(asking)))

        async def one_runs() -> bool:
            return len(order) == 1

        await until(one_runs, "a program runs")
        assert gateway.queue == 3
        assert gateway.wish(1.0) == 0, "programs want no worker"
        gate.set()
        found = await asyncio.gather(*tasks)
    assert all(isinstance(one, Scored) and one.correct for one in found)
    assert order == ["first", "of-two", "of-four"]
    assert runtime.most == 1


async def test_a_gateway_that_stops_ends_its_sandboxes(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    begun = asyncio.Event()

    async def waits(_: str) -> Ended:
        begun.set()
        await asyncio.sleep(3600)
        return "late", 0, b""

    runtime.programs["waits"] = waits
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        asking = asyncio.create_task(gateway.score(reward("waits")))
        await begun.wait()
        (session,) = host.host.sessions()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert host.host.sessions() == ()
    assert host.records.turns(session) == ()


async def test_the_host_ends_what_a_killed_gateway_left(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    begun = asyncio.Event()

    async def waits(_: str) -> Ended:
        begun.set()
        await asyncio.sleep(3600)
        return "late", 0, b""

    runtime.programs["waits"] = waits
    (tmp_path / "functions.yaml").write_text(yaml.safe_dump({"programs": host.listed(seconds=60)}))
    port = free_port()
    flags = ["--functions", str(tmp_path / "functions.yaml"), "--address", f"127.0.0.1:{port}"]
    process = start_process(CLI, "rewards", *flags)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while not begun.is_set():
                body = {"trajectory": "t", "function": "programs", "answer": "waits"}
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await http.post(
                        f"http://127.0.0.1:{port}/v1/rewards",
                        json={**body, "expected": CASES},
                        timeout=aiohttp.ClientTimeout(total=1),
                    )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (session,) = host.host.sessions()
    await host.host.renew()
    assert host.host.sessions() == (session,)
    host.now[0] += 4 * 60 + 3 * 2 + 60
    await host.host.renew()
    assert host.host.sessions() == ()
    assert host.records.turns(session) == ()


async def test_what_is_no_form_of_cases_is_400_and_no_cases_are_no_verdict(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    listed = {"programs": host.listed()}
    (tmp_path / "functions.yaml").write_text(yaml.safe_dump(listed))
    async with (
        running(tmp_path / "functions.yaml", workers=1) as (gateway, port),
        aiohttp.ClientSession() as http,
    ):
        body = {"trajectory": "t", "function": "programs", "answer": "doubles", "expected": 7}
        async with http.post(f"http://127.0.0.1:{port}/v1/rewards", json=body) as reply:
            assert reply.status == 400
            assert "send {" in (await reply.json())["message"]
        result = await gateway.score(reward("doubles", expected=None))
    assert isinstance(result, Masked)
    assert result.reason.startswith("NoVerdict")
    assert runtime.ran == []


async def test_an_answer_that_is_no_text_is_400(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        for answer in (None, 7, ["doubles"]):
            with pytest.raises(BadReward, match="send the text that has the program"):
                await gateway.score(reward(answer))  # type: ignore[arg-type]
    assert runtime.ran == []


async def test_long_bodies_are_read_beside_the_loop_and_what_is_sent_twice_runs_once(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = []

    def noted(expected: object) -> tuple[Case, ...]:
        where.append(threading.current_thread() is threading.main_thread())
        return read_cases(expected)

    monkeypatch.setattr("rose_rewards.gateway.read_cases", noted)
    long = {"inputs": ["1".rjust(10_000)], "outputs": ["2"]}
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        short = await gateway.score(reward("doubles"))
        first, second = await asyncio.gather(
            *(gateway.score(reward("doubles", "l", expected=long)) for _ in range(2))
        )
    assert where == [True, False, False]
    assert first is second
    assert isinstance(first, Scored)
    assert isinstance(short, Scored)
    assert first.correct
    assert runtime.ran.count(("doubles", 0)) == 2


async def test_no_teams_long_body_waits_for_anothers(
    tmp_path: Path, host: ProgramHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def waits(expected: object) -> tuple[Case, ...]:
        if expected == "slow":
            goes_on.wait(60)
        return read_cases(CASES)

    monkeypatch.setattr("rose_rewards.gateway.read_cases", waits)
    async with gateway_of(tmp_path, {"programs": host.listed()}) as gateway:
        data = "x" * 10_000
        slow = asyncio.create_task(
            gateway.score(reward("doubles", expected="slow", data=data), "a")
        )
        try:
            other = await gateway.score(reward("doubles", data=data), "b")
        finally:
            goes_on.set()
        assert isinstance(other, Scored)
        assert isinstance(await slow, Scored)


async def test_a_reason_is_the_same_after_a_restart(
    tmp_path: Path, host: ProgramHost, runtime: PlayedRuntime
) -> None:
    async def none(_: str) -> Ended:
        return "exited", 0, b""

    runtime.programs["none"] = none
    first = await asked(tmp_path, host, "none")
    assert await asked(tmp_path, host, "none") == first
    assert isinstance(first, Scored)
    assert first.reason
    assert len(runtime.ran) == 1


def test_the_list_says_what_of_a_program_is_wrong(tmp_path: Path) -> None:
    assert RewardFunction(sandbox="http://x", seconds=7).seconds == 7
    assert RewardFunction(sandbox="http://x").seconds == 120
    assert RewardFunction(rule="exact").seconds == 30
    for text, problem in (
        ("{sandbox: 'http://x', network: true}", "a program has no network"),
        ("{sandbox: 'http://x', command: python3}", "its command names {file}"),
        ("{sandbox: 'http://x', rule: exact}", "exactly one of rule, module, judge and sandbox"),
        ("{sandbox: 'file:///x'}", "should match pattern"),
    ):
        (tmp_path / "list.yaml").write_text(f"programs: {text}")
        with pytest.raises(BadFunctions, match=problem):
            read(tmp_path / "list.yaml")


@pytest.mark.sandbox
async def test_an_answer_of_megabytes_comes_out_whole(tmp_path: Path) -> None:
    text = "\n".join(str(n) for n in range(200_000))
    cases = {"inputs": ["", text, ""], "outputs": [text, str(len(text)), ""]}
    async with (
        real_host(tmp_path) as host,
        gateway_of(tmp_path, {"programs": host.listed(caseSeconds=20, partial=True)}) as gateway,
    ):
        program = "import sys\nread = sys.stdin.read()\n"
        program += "print(len(read) if read else '\\n'.join(map(str, range(200_000))))"
        found = await gateway.score(reward(program, expected=cases))
    assert isinstance(found, Scored)
    assert (found.reward, found.reason) == (2 / 3, "case 3 of 3: WrongAnswer")


STYLES = {
    "a data class": "@dataclass\nclass P:\n  x: int\ndef f(x): return P(x).x",
    "a method": "class Solution:\n  def f(self, x): return deepcopy(x)\ndef g(): pass",
    "a function beside": "class Solution:\n  def g(self): pass\ndef f(x: Optional[int]): return x",
    "depth": "def f(x, n=30_000): return x if n == 0 else f(x, n - 1)",
}
STYLES["a data class"] = "from dataclasses import dataclass\n" + STYLES["a data class"]


@pytest.mark.sandbox
async def test_programs_in_the_usual_style_are_right(tmp_path: Path) -> None:
    async with (
        real_host(tmp_path) as host,
        gateway_of(tmp_path, {"programs": host.listed(caseSeconds=20)}) as gateway,
    ):
        cases = {"inputs": [[7]], "outputs": [[7]], "fn_name": "f"}
        for name, program in STYLES.items():
            found = await gateway.score(reward(program, name, expected=cases))
            assert isinstance(found, Scored)
            assert found.correct, (name, found)
        table = {"inputs": [[{"1": "a"}]], "outputs": [["a"]], "fn_name": "f"}
        found = await gateway.score(reward("def f(d): return d[1]", "keys", expected=table))
        assert isinstance(found, Scored)
        assert found.correct, found
        files = "print(int(open('/dev/stdin').read()) * 2, file=open('/dev/stdout', 'w'))"
        found = await gateway.score(reward(files, "files"))
        assert isinstance(found, Scored)
        assert found.correct, found


@pytest.mark.sandbox
async def test_a_program_that_leaves_many_files_and_much_is_right_all_the_same(
    tmp_path: Path,
) -> None:
    program = (
        "import os\nfor n in range(20_000): open(f'f{n}', 'w').close()\n"
        "open('/tmp/x', 'wb').write(bytes(60 << 20))\n"
        "assert len(os.listdir('/tmp')) == 2\nprint(int(input()) * 2)"
    )
    cases = {key: value * 2 for key, value in CASES.items()}
    async with (
        real_host(tmp_path) as host,
        gateway_of(tmp_path, {"programs": host.listed(caseSeconds=60)}) as gateway,
    ):
        found = await gateway.score(reward(program, expected=cases))
    assert isinstance(found, Scored)
    assert found.correct, found


@pytest.mark.sandbox
async def test_a_command_that_an_image_lacks_is_lost_by_name(tmp_path: Path) -> None:
    listed = {"no": {"command": "node {file}"}, "sh": {"command": "sh {file}"}}
    async with (
        real_host(tmp_path) as host,
        gateway_of(tmp_path, {k: host.listed(**v) for k, v in listed.items()}) as gateway,
    ):
        found = await gateway.score(reward("1", "a", function="no"))
        assert isinstance(found, Lost)
        assert "image base has no node for the command" in found.reason
        shell = "read n; echo $((n * 2))"
        found = await gateway.score(reward(shell, "b", function="sh"))
        assert isinstance(found, Scored)
        assert found.correct, found


CALLS = {
    "calls": {"inputs": [[1, 2], ["a", "b"]], "outputs": [[3], ["ab"]], "fn_name": "add"},
    "lines of JSON": [{"input": "[1]\n[2]", "output": "[1, 2]", "fn_name": "add"}],
    "asserts": ["assert add(1, 2) == 3", "assert add((1,), (2,)) == (1, 2)"],
}


@pytest.mark.sandbox
@pytest.mark.parametrize("form", [*CALLS, "stdin"])
async def test_real_programs_read_and_are_called(tmp_path: Path, form: str) -> None:
    method = (
        "class Solution:\n  def add(self, a, b: Optional[int]):\n    print('x')\n    return a + b"
    )
    answers = {
        "stdin": ("print(int(input()) * 2)", "print(int(input()) * 3)"),
        "asserts": ("def add(a, b): return a + b", "def add(a, b): return a"),
    }
    right, wrong = answers.get(form, (method, method.replace("a + b", "b")))
    async with (
        real_host(tmp_path) as host,
        gateway_of(tmp_path, {"programs": host.listed(caseSeconds=20)}) as gateway,
    ):
        expected = CALLS.get(form, CASES)
        found = await gateway.score(reward(right, "r", expected=expected))
        assert isinstance(found, Scored)
        assert found.correct, found
        found = await gateway.score(reward(wrong, "w", expected=expected))
        assert isinstance(found, Scored)
        assert found.reason.endswith("WrongAnswer"), found
        assert host.host.sessions() == ()
