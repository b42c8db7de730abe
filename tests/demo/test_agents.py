"""Agents of the demo: what they do when their host is gone, and what the report says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from rose_demo import manifests
from rose_demo.agents import LOG, TASK, Agent, Counted, NotYet
from rose_demo.records import Agents, Recording
from rose_demo.report import page, summary
from rose_demo.verdicts import CheckResult, judge
from rose_sandbox.client import RemoteHost
from rose_sandbox.errors import HostAway, SandboxError
from rose_sandbox.runtimes.runtime import ExecResult

DONE = Agents(
    agents=3,
    turns=18,
    restored=(4, 4, 4),
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

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/generate":
            assert body["session_id"] == self.session
            return {"output_ids": [100 + len(body["input_ids"])]}
        assert path == f"/sessions/{self.session}/restore"
        if self.refusals:  # the router believes in the one that was killed for a while
            self.refusals -= 1
            raise NotYet(path)
        return {"told": {"turn": 2}}


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
    told = counted.told()
    assert told["saved"] == {"none": 5, "full": 2}
    assert (told["written_bytes"], told["state_bytes"], told["held_s"]) == (20, 80, 1.0)


def of(synthetic: ModuleType, agents: Agents | None) -> Recording:
    made: Recording = msgspec.structs.replace(synthetic.recording(), agents=agents)
    return made


@pytest.mark.parametrize(
    ("agents", "word"),
    [
        (DONE, CheckResult.KEPT),
        (msgspec.structs.replace(DONE, failed=("shell-0: its log is b''",)), CheckResult.BROKEN),
        (msgspec.structs.replace(DONE, restored=(4,)), CheckResult.UNPROVEN),
        (Agents(skipped="sandboxes need criu"), CheckResult.KEPT),
        (None, CheckResult.KEPT),
    ],
)
def test_a_lost_world_breaks_a_promise_and_a_machine_without_any_decides_nothing(
    synthetic: ModuleType, agents: Agents | None, word: CheckResult
) -> None:
    found = judge(of(synthetic, agents))
    (honest,) = [one for one in found.verdicts if one.promise == "Exact and honest"]
    assert honest.word is word


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
    skipped = of(synthetic, Agents(skipped="sandboxes need <criu>"))
    assert "Skipped: sandboxes need &lt;criu&gt;" in page(skipped, judge(skipped))
    assert "sandbox host" not in page(of(synthetic, None), judge(of(synthetic, None)))


def test_hosts_come_with_the_chart_where_this_machine_has_their_parts(tmp_path: Path) -> None:
    assert manifests.sandboxes(None) == {}
    made = manifests.sandboxes(tmp_path)
    assert made["partsPath"] == str(tmp_path)
    assert made["leases"] == [{"namespace": "research", "name": "grpo", "run": "grpo"}]
