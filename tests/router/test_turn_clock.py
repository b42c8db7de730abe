"""Hosts of agents' sandboxes hear of turns in order, and no turn waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rose_core.rollouts.capacity.reply_time import ENOUGH
from rose_router.metrics import REGISTRY
from rose_router.turns import turn_clock
from rose_router.turns.turn import TurnState
from rose_router.turns.turn_clock import MOST_LINES, Body, StepOutcome, TurnClock, TurnLateness
from tests.router.world import SimEngine, V, World, judge_whole, over, until, world

pytestmark = pytest.mark.looptime


class RecordingHosts:
    """Hosts that note what they are told.

    Args:
        seconds: that a step is on its way.
        takes: whether hosts take it.
        naming: seconds until a host has named its moment.
        still: for which the agent has done nothing by then.

    Attributes:
        steps: that they took.
        missed: bodies of turns of which they heard too late.
        prompts: how many ids of each session's end were its prompt.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        takes: bool = True,
        naming: float = 0.0,
        still: float | None = None,
    ) -> None:
        self.steps: list[tuple[str, str, dict[str, Any]]] = []
        self.missed: list[dict[str, Any]] = []
        self.prompts: list[int | None] = []
        self.seconds, self.takes, self.naming, self.still = seconds, takes, naming, still

    def serves(self, job: str) -> bool:
        return job in {"", "mine"}

    async def notify(
        self,
        job: str,
        session: str,
        step: str,
        body: Body,
        *,
        lateness: TurnLateness | None = None,
        prompt: int | None = None,
    ) -> StepOutcome:
        del job
        if lateness is not None:
            await asyncio.sleep(self.naming)
            if lateness.judge(self.still):
                self.missed.append(lateness.body())
                return StepOutcome.LATE
        await asyncio.sleep(self.seconds)
        self.steps.append((session, step, body()))
        if step == "ended":
            self.prompts.append(prompt)
        return StepOutcome.DELIVERED if self.takes else StepOutcome.UNDELIVERED

    def delivered(self, session: str = "s") -> list[str]:
        return [step for one, step, _ in self.steps if one == session]


@asynccontextmanager
async def running_clock(
    received: RecordingHosts, *engines: SimEngine
) -> AsyncIterator[tuple[World, TurnClock]]:
    async with world(*engines) as w:
        service = w.service
        service.sandboxes = clock = TurnClock(received, service.reply_seconds, service.clock)
        yield w, clock
        await clock.close()


async def test_a_turn_is_told_when_it_begins_and_when_its_tokens_are_there() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, _):
        turn = w.ask(20, prompt=(1, 2, 3), session="s", expected=20)
        await until(lambda: bool(received.steps))
        assert received.delivered() == ["turn"]
        assert not turn.is_over
        body = received.steps[0][2]
        assert body["ids"] == (1, 2, 3)
        assert body["weight_versions"] == ()
        assert body["wait"]["confidence"] == 0.5
        assert 0.2 < body["wait"]["seconds"] < 2.0  # twenty steps of 20 to 50 ms
        await over(turn)
        await until(lambda: received.delivered() == ["turn", "ready"])
        again = await over(w.ask(4, prompt=(1, 2, 3, 4), session="s"))
        await until(lambda: len(received.steps) == 4)
        assert received.delivered() == ["turn", "ready", "turn", "ready"]
        assert received.steps[2][2]["weight_versions"] == (V(0),)
        judge_whole(again)


@pytest.mark.parametrize(
    "received", [RecordingHosts(3600.0), RecordingHosts(takes=False)], ids=["hangs", "dead"]
)
async def test_a_host_that_hangs_or_is_dead_costs_a_turn_nothing(received: RecordingHosts) -> None:
    async def took(set_up: Callable[[World], None]) -> float:
        async with world(SimEngine("a")) as w:
            set_up(w)
            began = w.service.clock()
            for _ in range(3):
                judge_whole(await over(w.ask(8, session="s")))
            return w.service.clock() - began

    clocks: list[TurnClock] = []

    def with_host(w: World) -> None:
        clocks.append(TurnClock(received, w.service.reply_seconds, w.service.clock))
        w.service.sandboxes = clocks[0]

    alone = await took(lambda _: None)
    assert await took(with_host) == pytest.approx(alone)
    await clocks[0].close()


async def test_what_cannot_be_told_is_bounded() -> None:
    received = RecordingHosts(3600.0)
    async with running_clock(received, SimEngine("a", cap=4000)) as (w, clock):
        turns = [w.ask(1, session=f"s{n}") for n in range(MOST_LINES + 50)]
        for turn in turns:
            await over(turn)
        assert len(clock._lines) == MOST_LINES


async def test_turns_beside_each_other_are_one_wait() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, _):
        long = w.ask(30, session="s")
        short = w.ask(4, session="s")
        await over(short)
        await asyncio.sleep(0.1)
        assert received.delivered() == ["turn"]
        await over(long)
        await until(lambda: received.delivered() == ["turn", "ready"])


async def test_a_turn_that_ended_before_it_was_told_is_not_told() -> None:
    received = RecordingHosts(10.0)
    async with running_clock(received, SimEngine("a")) as (w, _):
        await over(w.ask(2, session="s"))  # its beginning is on its way for ten seconds
        await over(w.ask(2, session="s"))
        await asyncio.sleep(60)
        assert received.delivered() == ["turn", "ready"]
        await over(w.ask(2, session="s"))
        await asyncio.sleep(60)
        assert received.delivered() == ["turn", "ready", "turn", "ready"]


def counted(outcome: str) -> float:
    labels = {"step": "turn", "outcome": outcome}
    return REGISTRY.get_sample_value("rose_router_sandbox_steps_total", labels) or 0.0


@pytest.mark.parametrize("watched", [True, False])
async def test_a_turn_whose_reply_was_there_before_its_host_named_a_moment_is_not_told(
    *, watched: bool
) -> None:
    """Its agent may have acted in that moment already, by a reply that comes in pieces before."""
    received, late = RecordingHosts(naming=1.0), counted("late")
    async with running_clock(received, SimEngine("a")) as (w, _):
        interval = 1 if watched else 8
        slow = w.ask(200, session="s", interval=interval)
        await over(slow)
        await asyncio.sleep(2)
        assert received.delivered() == ([] if watched else ["turn", "ready"])
        await over(w.ask(4, session="t", interval=interval))
        await asyncio.sleep(2)
        assert received.delivered("t") == []
        assert counted("late") - late == 1 + watched


async def test_one_that_somebody_joins_to_watch_is_watched() -> None:
    received, late = RecordingHosts(naming=1.0), counted("late")
    async with running_clock(received, SimEngine("a")) as (w, _):
        asked: dict[str, Any] = {"prompt": (1, 2, 3), "rid": "r", "own_rid": True, "session": "s"}
        slow = w.ask(200, interval=8, **asked)
        assert w.ask(200, **asked) is slow
        await over(slow)
        await asyncio.sleep(2)
        assert received.delivered() == []
        assert counted("late") - late == 1


async def test_a_turn_beside_which_another_was_answered_is_not_told() -> None:
    received = RecordingHosts(naming=1.0)
    async with running_clock(received, SimEngine("a")) as (w, _):
        long = w.ask(400, session="s", interval=8)
        await over(w.ask(4, session="s", interval=8))
        await over(long)
        await asyncio.sleep(2)
        assert received.delivered() == []


async def test_the_end_of_a_session_is_told_with_all_its_tokens() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, clock):
        turn = await over(w.ask(20, prompt=(1, 2, 3), session="s"))
        await asyncio.sleep(1)
        w.service.end_trajectory("s")
        await until(lambda: received.delivered() == ["turn", "ready", "ended"])
        body = received.steps[-1][2]
        assert body["ids"] == [1, 2, 3, *turn.shown().tokens]
        assert len(body["ids"]) == 23
        assert body["weight_versions"] == (V(0),)
        w.service.end_trajectory("s")  # who knows nothing says nothing
        await until(lambda: len(received.steps) == 4)
        assert received.steps[-1][2] == {}
        assert clock._held == 0


async def test_the_end_after_a_turn_that_failed_goes_with_its_prompt() -> None:
    """It went with the tokens of the turn before, on whose reply the agent had acted."""
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a", fails_at=9999)) as (w, clock):
        first = await over(w.ask(4, prompt=(1, 2), session="s"))
        await until(lambda: received.delivered() == ["turn", "ready"])
        received.naming = 5.0  # the host hears of no other turn
        prompt = (1, 2, *first.transcript.tokens, 9999)
        assert (await over(w.ask(4, prompt=prompt, session="s"))).state is TurnState.FAILED
        await asyncio.sleep(1)
        clock.end_session("s")
        await until(lambda: received.delivered() == ["turn", "ready", "ended"])
        assert received.steps[-1][2]["ids"] == list(prompt)
        assert clock._held == 0


async def test_what_is_held_for_the_ends_of_sessions_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn_clock, "MOST_TOKENS", 30)
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, clock):
        for session in ("s", "t", "t"):
            await over(w.ask(17, prompt=(1, 2, 3), session=session))
            await asyncio.sleep(1)
        for session in ("s", "t"):
            w.service.end_trajectory(session)
        await until(lambda: len(received.steps) == 8)
        assert [len(body.get("ids", ())) for _, _, body in received.steps[-2:]] == [0, 20]
        assert clock._held == 0


async def test_a_session_that_is_over_is_told_after_its_last_turn() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, clock):
        turn = w.ask(4, session="s")
        w.service.end_trajectory("s")  # while a turn of it runs: it is not over
        await over(turn)
        await asyncio.sleep(1)
        w.service.end_trajectory("s")
        await until(lambda: received.delivered() == ["turn", "ready", "ended"])
        assert not clock._lines


async def test_jobs_have_hosts_of_their_own_and_sessions_their_own_names() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, _):
        await over(w.ask(2, session="mine/s", job="mine"))
        await over(w.ask(2, session="other/s", job="other"))
        await over(w.ask(2))  # of no session
        w.service.end_trajectory("mine/s")
        await asyncio.sleep(1)
        assert received.delivered() == ["turn", "ready", "ended"]
        assert len(received.steps) == 3


async def test_a_shut_gate_lengthens_the_wait_and_trust_is_what_came_true() -> None:
    received = RecordingHosts()
    engine = SimEngine("a")
    async with running_clock(received, engine) as (w, clock):
        for _ in range(ENOUGH):
            await over(w.ask(10, session="t", expected=10))
        w.gate(engine, is_open=False)
        await asyncio.sleep(40)
        turn = w.ask(10, session="s", expected=10)
        await until(lambda: received.delivered() == ["turn"])
        wait = received.steps[-1][2]["wait"]
        assert wait["seconds"] > 40
        assert wait["confidence"] == pytest.approx(clock.trust.confidence, abs=0.001)
        w.gate(engine, is_open=True)
        await over(turn)


async def test_without_an_engine_no_wait_is_named() -> None:
    received = RecordingHosts()
    async with running_clock(received) as (w, _):
        turn = w.ask(10, session="s")
        await until(lambda: bool(received.steps))
        assert received.steps[0][2]["wait"] is None
        w.service.leave(turn)
        await over(turn)


async def test_a_late_turn_is_told_where_its_agent_has_done_nothing_since() -> None:
    """One whose reply was sooner than a small call to its host had no record."""
    late, received = counted("late"), RecordingHosts(naming=1.0, still=3600.0)
    async with running_clock(received, SimEngine("a")) as (w, _):
        turn = await over(w.ask(4, prompt=(1, 2, 3), session="s"))
        assert received.delivered() == []
        await until(lambda: received.delivered() == ["turn", "ready"])
        assert received.steps[0][2]["ids"] == (1, 2, 3)
        assert received.steps[0][2]["wait"] is None, "which nobody waits for any more"
        received.still = 0.5  # half a second before the moment was named, after the reply
        await over(w.ask(4, prompt=(*turn.request.prompt, 9), session="s"))
        await asyncio.sleep(2)
        assert received.delivered() == ["turn", "ready"]
        assert received.missed == [{"ids": (1, 2, 3, 9)}], "its host hears that it was"
        assert counted("late") - late == 1


async def test_a_turn_that_was_left_out_for_the_next_one_is_counted_as_late() -> None:
    late, received = counted("late"), RecordingHosts(10.0, still=3600.0)
    async with running_clock(received, SimEngine("a")) as (w, _):
        for prompt in ((1,), (1, 2), (1, 2, 3)):  # the first one's beginning is on its way
            await over(w.ask(2, prompt=prompt, session="s"))
        await asyncio.sleep(60)
        assert [body["ids"] for _, step, body in received.steps if step == "turn"] == [
            (1,),
            (1, 2, 3),
        ]
        assert received.delivered() == ["turn", "ready"] * 2
        assert counted("late") - late == 1


async def test_the_end_says_its_last_prompt_after_a_turn_that_no_host_took() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, clock):
        await over(w.ask(4, prompt=(1, 2), session="s"))
        await until(lambda: received.delivered() == ["turn", "ready"])
        received.takes = False
        await over(w.ask(4, prompt=(1, 2, 3), session="s"))
        await asyncio.sleep(1)
        w.service.end_trajectory("s")
        await until(lambda: received.delivered()[-1] == "ended")
        assert received.missed == [{"ids": [1, 2, 3]}]
        assert received.prompts == [3]
        assert clock._held == 0


async def test_a_session_that_goes_back_has_no_tokens_of_its_last_turn_any_more() -> None:
    received = RecordingHosts()
    async with running_clock(received, SimEngine("a")) as (w, clock):
        await over(w.ask(4, prompt=(1, 2), session="s"))
        await until(lambda: received.delivered() == ["turn", "ready"])
        clock.forget("s")
        assert clock._held == 0
        w.service.end_trajectory("s")
        await until(lambda: received.delivered() == ["turn", "ready", "ended"])
        assert received.steps[-1][2] == {}
