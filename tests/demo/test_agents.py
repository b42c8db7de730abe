"""Agents of the demo: what they do when their host is gone, and what the report says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_demo import manifests
from rose_demo.agents import KILLED_AFTER, LOG, TASK, Agent, Counted, NotYet, play
from rose_demo.main import run
from rose_demo.options import parse
from rose_demo.pieces import SANDBOXES
from rose_demo.records import Agents, Recording
from rose_demo.report import page, summary
from rose_demo.verdicts import CheckResult, judge
from rose_dev.errors import CommandFailed
from rose_sandbox.client import RemoteHost
from rose_sandbox.errors import HostAway, SandboxError
from rose_sandbox.runtimes.runtime import ExecResult
from tests.chart.rendering import HELM, render
from tests.demo.test_parts import ENGINES

DONE = Agents(
    agents=3,
    turns=18,
    restored=(4, 4, 4),
    verified=3,
    seconds=20.0,
    saved={"full": 3, "none": 6, "processes": 9},
    written_bytes=100,
    state_bytes=1000,
    saving_s=4.0,
    held_s=1.0,
)


@dataclass
class Host:
    """Runs nothing; away once it was killed."""

    ran: list[str] = field(default_factory=list)
    lost: set[object] = field(default_factory=set)
    away: bool = False

    async def exec(self, _session: str, command: str, *_: object, **__: object) -> ExecResult:
        if self.away:
            raise HostAway("killed")
        self.ran.append(command)
        return ExecResult(0, b"200\n", b"")

    async def read_file(self, _session: str, _path: str) -> bytes:
        return LOG


class Scripted(Agent):
    """An agent whose router answers from here."""

    refusals = 1
    answered: tuple[int, ...] = ()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/generate":
            assert body["session_id"] == self.session
            return {"output_ids": [100 + len(body["input_ids"])]}
        assert path == f"/sessions/{self.session}/restore"
        if self.refusals:  # the router believes in the one that was killed for a while
            self.refusals -= 1
            raise NotYet(path)
        return {"told": {"turn": 2}, "ids": self.answered or [*self.ids[1], 5]}


async def test_an_agent_goes_on_from_the_record_with_the_very_tokens_of_before() -> None:
    one, two = Host(), Host()

    async def back() -> RemoteHost:
        return cast("RemoteHost", two)

    http = cast("aiohttp.ClientSession", None)
    agent = Scripted(http, "http://router", "s", cast("RemoteHost", one), back)
    await agent.play(3)
    before = [list(turn) for turn in agent.ids]
    one.away = True
    await agent.play(len(TASK))
    assert agent.restored == [2]
    assert agent.ids[:3] == before[:3]
    assert two.ran == list(TASK[2:]), "the third turn had no record: it is had again"
    assert await agent.verify() == ""


async def test_a_record_with_other_words_of_the_model_is_told() -> None:
    one, two = Host(), Host()

    async def back() -> RemoteHost:
        return cast("RemoteHost", two)

    http = cast("aiohttp.ClientSession", None)
    agent = Scripted(http, "http://router", "s", cast("RemoteHost", one), back)
    await agent.play(3)
    agent.answered = (1, 2, 3, 4, 5)
    one.away = True
    await agent.play(len(TASK))
    assert "words up to turn 2 are others: [1, 2, 3, 4, 5]" in await agent.verify()


class Place:
    """A lease's router and its sandbox hosts, of which there is always one; as the demo sees it.

    Attributes:
        without: sessions whose restore answers without a turn.
        tokens: what callers of ``/metrics`` have shown.
    """

    def __init__(self, *without: str) -> None:
        self.without = without
        self.asked: dict[str, list[int]] = {}
        self.tokens: list[str | None] = []
        self.killed = 0
        self.hiccups: list[Exception] = []

    def app(self) -> web.Application:
        made = web.Application()
        made.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/sessions/{key}/restore", self.restore),
                web.get("/metrics", self.metrics),
            ]
        )
        return made

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked[body["session_id"]] = body["input_ids"]
        return web.json_response({"output_ids": [100 + len(body["input_ids"])]})

    async def restore(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        found = {} if key in self.without else {"turn": KILLED_AFTER}
        return web.json_response({"told": found, "ids": self.asked[key]})

    async def metrics(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        return web.Response(text='rose_sandbox_turns_total{saved="full"} 1.0\n')

    async def kill(self) -> None:
        if self.hiccups:
            raise self.hiccups.pop()
        self.killed += 1


class Counting(Host):
    """Sandboxes of ``Place``: those that were there when a host was killed are away."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    async def exec(self, _session: str, command: str, *_: object, **__: object) -> ExecResult:
        if self.place.killed and _session not in self.lost:
            self.lost.add(_session)
            raise HostAway("killed")
        return await super().exec(_session, command)

    async def create(self, *_: object, **__: object) -> None:
        pass

    async def end(self, *_: object, **__: object) -> None:
        raise HostAway("has gone")

    async def close(self) -> None:
        pass


async def played(place: Place, monkeypatch: pytest.MonkeyPatch) -> Agents:
    host = Counting(place)
    monkeypatch.setattr("rose_demo.agents.RemoteHost", lambda *_: host)
    async with TestServer(place.app()) as server:
        url = str(server.make_url("")).rstrip("/")

        async def there() -> str:
            return url

        return await play(url, "of-the-lease", there, "of-hosts", place.kill)


async def test_agents_outlive_a_host_and_its_page_is_not_shown_the_leases_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    made = await played(place, monkeypatch)
    assert (made.verified, made.failed, made.stopped) == (3, (), "")
    assert made.restored == (KILLED_AFTER,) * 3
    assert made.saved == {"full": 2}
    assert place.tokens == [None, None]


async def test_an_agent_that_is_lost_ends_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await played(Place("shell-1"), monkeypatch)
    assert made.verified == 2
    assert made.turns == 2 * len(TASK) + KILLED_AFTER
    (one,) = made.failed
    assert one.startswith("shell-1: SandboxError: the router answers something else")


async def test_a_hiccup_of_the_demos_tools_is_told_and_no_agent_counts_as_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    place.hiccups.append(CommandFailed("kubectl: no route"))
    made = await played(place, monkeypatch)
    assert (made.verified, made.failed) == (0, ())
    assert made.stopped == "all: CommandFailed: kubectl: no route"


def test_what_is_measured_is_written_before_agents_play(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> Recording:
        return of(synthetic, None)

    async def broken(_: object) -> Agents:
        raise RuntimeError("a defect of the agents' part")

    options = parse([f"--out={tmp_path}"])
    monkeypatch.setattr("rose_demo.main.Stack", lambda *_: MagicMock(options=options))
    monkeypatch.setattr("rose_demo.main._measured", measured)
    monkeypatch.setattr("rose_demo.main.play_on", broken)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(RuntimeError, match="a defect"):
        run(options, MagicMock(), tmp_path)
    written = msgspec.json.decode((tmp_path / "recording.json").read_bytes(), type=Recording)
    assert written.samples
    assert "sandbox host" not in (tmp_path / "report.html").read_text()


async def test_a_command_that_fails_is_told_and_not_tried_again() -> None:
    class Failing(Host):
        async def exec(self, *_: object, **__: object) -> ExecResult:
            return ExecResult(1, b"", b"no space")

    async def back() -> RemoteHost:
        raise AssertionError("its host is there")

    http = cast("aiohttp.ClientSession", None)
    agent = Scripted(http, "http://router", "s", cast("RemoteHost", Failing()), back)
    with pytest.raises(SandboxError, match="exits 1: b'no space'"):
        await agent.play(1)


def test_figures_of_two_hosts_are_added() -> None:
    counted = Counted()
    for none in (2, 3):
        counted.add(
            f'rose_sandbox_turns_total{{reason="unchanged",saved="none"}} {none}.0\n'
            'rose_sandbox_turns_total{reason="changed",saved="full"} 1.0\n'
            "rose_sandbox_record_bytes_total 10.0\nrose_sandbox_state_bytes_total 40.0\n"
            "rose_sandbox_held_seconds_total 0.5\nother_total 1.0\n"
        )
    reported = counted.as_json()
    assert reported["saved"] == {"none": 5, "full": 2}
    assert (reported["written_bytes"], reported["state_bytes"], reported["held_s"]) == (20, 80, 1.0)


def of(synthetic: ModuleType, agents: Agents | None) -> Recording:
    made: Recording = msgspec.structs.replace(synthetic.recording(), agents=agents)
    return made


@pytest.mark.parametrize(
    ("agents", "word"),
    [
        (DONE, CheckResult.KEPT),
        (msgspec.structs.replace(DONE, failed=("shell-0: its log is b''",)), CheckResult.BROKEN),
        (msgspec.structs.replace(DONE, restored=(4,)), CheckResult.UNPROVEN),
        (msgspec.structs.replace(DONE, verified=2, stopped="all: no"), CheckResult.UNPROVEN),
        (Agents(skipped="sandboxes need criu"), CheckResult.KEPT),
        (None, CheckResult.KEPT),
    ],
)
def test_a_lost_world_breaks_a_promise_and_a_machine_without_any_decides_nothing(
    synthetic: ModuleType, agents: Agents | None, word: CheckResult
) -> None:
    found = judge(of(synthetic, agents))
    (honest,) = [one for one in found.verdicts if one.promise == "Exact and honest"]
    assert honest.result is word


def test_the_report_shows_turns_by_class_bytes_saved_and_time_hidden(
    synthetic: ModuleType,
) -> None:
    recording = of(synthetic, DONE)
    text = page(recording, judge(recording))
    for row in (
        "<td>agents that ended as if nothing had happened</td><td>3 of 3</td>",
        "<td>turns that saved: processes</td><td>9</td>",
        "<td>of what full checkpoints would be</td><td>10%</td>",
        "<td>time of saving that the model&#x27;s answers hid</td><td>75%</td>",
    ):
        assert row in text
    assert summary(recording, judge(recording))["agents"]["saved"]["none"] == 6
    stopped = of(synthetic, Agents(agents=3, failed=("shell-1: lost",), stopped="all: no kubectl"))
    text = page(stopped, judge(stopped))
    assert "nothing had happened</td><td>0 of 3</td>" in text
    assert "all: no kubectl" in text
    skipped = of(synthetic, Agents(skipped="sandboxes need <criu>"))
    assert "Skipped: sandboxes need &lt;criu&gt;" in page(skipped, judge(skipped))
    assert "sandbox host" not in page(of(synthetic, None), judge(of(synthetic, None)))


def test_hosts_come_with_the_chart_where_this_machine_has_their_parts(tmp_path: Path) -> None:
    assert manifests.chart_values(parse([]), ENGINES)["sandboxes"] == {}
    made = manifests.chart_values(parse([]), ENGINES, tmp_path)["sandboxes"]
    assert made["partsPath"] == str(tmp_path)
    assert made["leases"] == [{"namespace": "research", "name": "grpo", "run": "grpo"}]


@pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
def test_the_charts_hosts_are_those_that_the_demo_looks_for_and_kills(tmp_path: Path) -> None:
    rendered = render(manifests.chart_values(parse([]), ENGINES, tmp_path))
    (made,) = [one for one in rendered.all("DaemonSet") if "sandbox" in one["metadata"]["name"]]
    assert made["metadata"]["name"] == SANDBOXES
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels["rose-gpu.dev/sandboxes"] == SANDBOXES
    none = render(manifests.chart_values(parse([]), ENGINES))
    assert not [one for one in none.objects if "sandbox" in one["metadata"]["name"]]
