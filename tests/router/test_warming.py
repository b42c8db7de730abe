"""The next home of a trajectory is warmed while its tool runs; sent, ended and counted."""

from __future__ import annotations

import asyncio

import pytest

from rose_core.rollouts.placement.warming import WarmOutcome
from rose_core.wire.routing import EngineKind
from rose_router.metrics import REGISTRY
from tests.router.world import SimEngine, V, World, judge_whole, over, until, world

pytestmark = pytest.mark.looptime

PROMPT = tuple(range(600))


def count(outcome: WarmOutcome) -> float:
    value = REGISTRY.get_sample_value("rose_router_warmed_total", {"outcome": outcome})
    return value or 0.0


async def two_turns(w: World) -> tuple[SimEngine, SimEngine]:
    """A trajectory that came back once; its home, and the other engine."""
    for _ in range(2):
        turn = await over(w.ask(4, prompt=PROMPT, session="s", keyed=True))
        home = turn.transcript.legs[-1].engine
        await asyncio.sleep(3)
    turn = await over(w.ask(4, prompt=PROMPT, session="s", keyed=True))
    assert turn.transcript.legs[-1].engine == home
    (other,) = (engine for name, engine in w.engines.items() if name != home)
    return w.engines[home], other


def engines() -> tuple[SimEngine, SimEngine]:
    return SimEngine("a"), SimEngine("b")


async def test_a_lost_home_is_replaced_while_the_tool_runs() -> None:
    used = count(WarmOutcome.USED)
    async with world(*engines()) as w:
        home, other = await two_turns(w)
        w.kill(home)
        w.detach(home)
        home.leaving = True
        w.update_engine(home)
        await until(lambda: bool(other.runs))
        (sent,) = other.seen
        assert sent["sampling_params"]["max_new_tokens"] == 1
        assert len(sent["input_ids"]) == len(PROMPT) + 4
        assert "return_logprob" not in sent
        await asyncio.sleep(1)
        turn = await over(w.ask(4, prompt=PROMPT, session="s", keyed=True))
        judge_whole(turn)
        assert other.seen[-1]["extra_key"] == sent["extra_key"]
        await asyncio.sleep(0)
    assert count(WarmOutcome.USED) == used + 1


async def test_new_weights_make_keys_useless_and_home_is_warmed_again() -> None:
    async with world(*engines()) as w:
        home, _ = await two_turns(w)
        before = len(home.seen)
        for engine in w.engines.values():
            w.commit(engine, V(1))
        await until(lambda: sum(len(one.seen) for one in w.engines.values()) > before)
        sent = [one.seen[-1] for one in w.engines.values() if one.seen][-1]
        assert sent["sampling_params"]["max_new_tokens"] == 1
        assert sent["extra_key"] == V(1)


async def test_a_gate_that_closes_ends_it_at_once() -> None:
    stopped = count(WarmOutcome.STOPPED)
    async with world(*engines()) as w:
        home, other = await two_turns(w)
        other.token_seconds = 30.0  # a long prefill
        home.leaving = True
        w.update_engine(home)
        await until(lambda: bool(other.runs))
        (rid,) = other.runs
        w.gate(other, is_open=False)
        await asyncio.sleep(0.1)
        w.gate(other, is_open=True)
        await until(lambda: rid in other.aborted)
    assert count(WarmOutcome.STOPPED) == stopped + 1


async def test_a_turn_that_comes_first_is_not_held_up() -> None:
    late = count(WarmOutcome.LATE)
    async with world(*engines()) as w:
        home, other = await two_turns(w)
        other.token_seconds = 30.0
        home.leaving = True
        w.update_engine(home)
        await until(lambda: bool(other.runs))
        other.token_seconds = 0.05
        turn = await over(w.ask(4, prompt=PROMPT, session="s", keyed=True))
        judge_whole(turn)
    assert count(WarmOutcome.LATE) == late + 1


async def test_nothing_is_warmed_for_a_trajectory_whose_caller_says_that_it_is_over() -> None:
    async with world(*engines()) as w:
        home, other = await two_turns(w)
        await asyncio.sleep(1)
        w.service.end_trajectory("s")
        sent = len(other.seen)
        w.kill(home)
        w.detach(home)
        home.leaving = True
        w.update_engine(home)
        await asyncio.sleep(10)
        assert len(other.seen) == sent


@pytest.mark.parametrize("fields", [{}, {"session": "s", "dedicated_because": ("grammar",)}])
async def test_what_cannot_be_recognized_or_moved_is_never_warmed(
    fields: dict[str, object],
) -> None:
    ours = [SimEngine(name, kind=EngineKind.DEDICATED) for name in "ab"]
    async with world(*ours) as w:
        for _ in range(3):
            await over(w.ask(4, prompt=PROMPT, **fields))
            await asyncio.sleep(2)
        sent = sum(len(engine.seen) for engine in w.engines.values())
        for engine in w.engines.values():
            w.commit(engine, V(1))
        await asyncio.sleep(5)
        assert sum(len(engine.seen) for engine in w.engines.values()) == sent
