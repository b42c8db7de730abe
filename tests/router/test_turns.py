"""Turns survive engines that pause, die, leave and change weights; virtual time throughout."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from rose_core.rollouts.engines.estimates import Speed
from rose_core.rollouts.placement.watch import LegPatience, MoveReason
from rose_core.rollouts.transcripts.spans import Kv
from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_core.wire.routing import EngineKind
from rose_router.engines.fleet import Engine
from rose_router.metrics import REGISTRY
from rose_router.turns.request import TurnRequest
from rose_router.turns.turn import TurnEnd
from tests.router.world import (
    Run,
    SimEngine,
    V,
    greedy,
    judge,
    judge_whole,
    over,
    started,
    two,
    until,
    where,
    world,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

BORROWED, DEDICATED = EngineKind.BORROWED, EngineKind.DEDICATED


def _futures() -> int:
    gc.collect()
    # By its type: ``isinstance`` asks each object for its class, and some warn whoever asks.
    return sum(issubclass(type(one), asyncio.Future) for one in gc.get_objects())


async def test_an_undisturbed_turn_is_one_leg_and_one_span() -> None:
    async with world(SimEngine("a")) as w:
        turn = await over(w.ask(20))
        judge_whole(turn)
        assert turn.transcript.tokens == greedy(turn)
        assert [s.version for s in turn.transcript.spans] == [V(0)]
        assert not turn.moves


async def test_spans_of_an_engine_that_reuses_keys_say_so() -> None:
    async with world(SimEngine("a", reuses_kv=True)) as w:
        turn = await over(w.ask(20))
        assert {span.kv for span in turn.transcript.spans} == {Kv.MIXED}


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_killed_engine_costs_neither_a_token_nor_a_doubled_one(incremental: bool) -> None:
    async with world(*two(incremental=incremental)) as w:
        turn = w.ask(20)
        await started(turn)
        w.kill(where(w, turn))
        await over(turn)
        judge_whole(turn)
        assert turn.transcript.tokens == greedy(turn)
        assert [m.reason for m in turn.moves] == [MoveReason.LOST]
        assert turn.moves[0].at_token >= 5
        assert turn.redone_tokens == 0


async def test_the_second_leg_asks_for_what_is_missing_under_another_id() -> None:
    async with world(*two()) as w:
        turn = w.ask(20, sampling={"min_new_tokens": 12, "temperature": 0.5})
        await started(turn)
        first = where(w, turn)
        w.kill(first)
        await over(turn)
        second = next(e for e in w.engines.values() if e is not first)
        held = turn.moves[0].at_token
        body = second.seen[0]
        assert [*body["input_ids"]] == [*turn.request.prompt, *turn.transcript.tokens[:held]]
        assert body["sampling_params"] == {
            "max_new_tokens": 20 - held,
            "min_new_tokens": 12 - held,
            "temperature": 0.5,
        }
        assert body["rid"] != first.seen[0]["rid"]
        assert len(body["rid"]) == len(first.seen[0]["rid"])
        assert body["stream"] is True
        assert body["extra_key"] == V(0)


async def test_tokens_of_prompts_are_counted_by_where_an_engine_had_them_from() -> None:
    found = {"cached_tokens": 80, "cached_tokens_details": {"device": 16, "storage": 64}}
    before = {source: prompt_tokens(source) for source in ("computed", "cached", "fetched")}
    async with world(SimEngine("a", meta={"prompt_tokens": 100, **found})) as w:
        await over(w.ask(5))
    after = {source: prompt_tokens(source) - old for source, old in before.items()}
    assert after == {"computed": 20, "cached": 16, "fetched": 64}


async def test_turns_of_a_batch_teach_each_step_once_and_with_the_weight_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(SimEngine("a", cap=8, token_seconds=0.2)) as w:
        fleet, lessons = w.service.fleet, list[str]()
        learn_speed = fleet.learn_speed

        def note(engine: Engine, learn: Callable[[Speed], Speed]) -> None:
            lessons.append(engine.name)
            learn_speed(engine, learn)

        monkeypatch.setattr(fleet, "learn_speed", note)
        turns = [w.ask(11) for _ in range(8)]
        for turn in turns:
            await over(turn)
        engine = fleet.get("a")
    firsts, steps = len(turns), 10
    assert len(lessons) <= firsts + steps
    assert engine is not None
    assert engine.speed is not None
    # Of 80 events a tenth each leaves nothing of what was believed before; of 10 a third.
    assert engine.speed.step_seconds == pytest.approx(0.2, rel=0.01)


class _Retracting(SimEngine):
    """It lets its first turn stand still once, for ten steps, and the others go on."""

    def event(self, run: Run) -> StreamEvent:
        stands = len(run.ids) == 20 and run is next(iter(self.runs.values()))
        self.token_seconds = 1.9999 if stands else 0.2  # its next event comes before the others'
        return super().event(run)


async def test_a_turn_that_stood_still_does_not_speak_for_its_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(_Retracting("a", cap=8, token_seconds=0.2)) as w:
        fleet, speeds = w.service.fleet, list[float]()
        learn_speed = fleet.learn_speed

        def note(engine: Engine, learn: Callable[[Speed], Speed]) -> None:
            learn_speed(engine, learn)
            assert engine.speed is not None
            speeds.append(engine.speed.step_seconds)

        monkeypatch.setattr(fleet, "learn_speed", note)
        for turn in [w.ask(40) for _ in range(8)]:
            await over(turn)
    assert 0.19 < max(speeds) <= 0.4


async def test_what_is_said_of_a_prompt_is_what_its_last_engine_said() -> None:
    """Also before that one's end, where an earlier one gave nothing that could be kept."""
    first, second = (
        SimEngine(name, meta={"prompt_tokens": 3, "cached_tokens": cached}, spans_always=known)
        for name, cached, known in (("a", 2, False), ("b", 0, True))
    )
    async with world(first) as w:
        turn = w.ask(20)
        await until(lambda: bool(turn.prompt_meta))
        assert turn.prompt_meta["cached_tokens"] == 2
        w.attach(second)
        w.kill(first)
        await started(turn)
        assert not turn.is_over
        assert turn.prompt_meta["cached_tokens"] == 0
        await over(turn)


def prompt_tokens(source: str) -> float:
    return REGISTRY.get_sample_value("rose_router_prompt_tokens_total", {"source": source}) or 0.0


async def test_nobody_watching_means_fewer_events_of_the_engine() -> None:
    async with world(SimEngine("a")) as w:
        await over(w.ask(5, interval=4))
        await over(w.ask(5))
        asked = [body["sampling_params"] for body in w.engines["a"].seen]
        assert [one.get("stream_interval") for one in asked] == [4, None]


async def test_tokens_whose_version_nobody_told_are_sampled_again() -> None:
    async with world(*two(spans_always=False)) as w:
        turn = w.ask(20)
        await started(turn)
        w.kill(where(w, turn))
        await over(turn)
        judge_whole(turn)
        assert turn.redone_tokens >= 5
        assert turn.moves[0].at_token == 0


async def test_a_short_pause_is_waited_for_in_place() -> None:
    async with world(*two()) as w:
        turn = w.ask(20)
        await started(turn)
        engine = where(w, turn)
        w.gate(engine, is_open=False)
        await asyncio.sleep(4)
        w.gate(engine, is_open=True)
        await over(turn)
        judge_whole(turn)
        assert not turn.moves


@pytest.mark.parametrize("how", ["abort", "hang up"])
async def test_a_turn_that_is_ended_in_the_moment_it_came_ends(how: str) -> None:
    async with world(*two()) as w:
        turn = w.ask(20, rid="mine", own_rid=True)
        if how == "abort":
            assert w.service.abort("mine")
        else:
            w.service.leave(turn)
        async with asyncio.timeout(1):
            await over(turn)
        assert turn.finish is not None
        assert turn.finish["type"] == "abort"
        assert not len(w.service.ledger)
        again = await over(w.ask(20, rid="mine", own_rid=True))
        judge_whole(again)


async def test_whoever_stops_waiting_for_a_turns_end_is_forgotten_before_it() -> None:
    end = TurnEnd()
    staying = asyncio.create_task(end.wait())
    before = _futures()
    for _ in range(100):
        leaving = asyncio.create_task(end.wait())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
    assert _futures() - before < 10
    end.set()
    staying.cancel()  # woken already: it leaves twice
    await asyncio.wait({staying})
    await end.wait()


async def test_a_long_pause_moves_the_turn_and_the_old_leg_is_aborted_before_new_ones() -> None:
    async with world(*two()) as w:
        turn = w.ask(200)
        await started(turn)
        engine = where(w, turn)
        assert turn.leg is not None
        rid = turn.leg.rid
        closed = w.service.clock()
        w.gate(engine, is_open=False)
        await until(lambda: turn.leg is not None and turn.leg.engine != engine.name)
        assert 5.0 <= w.service.clock() - closed < 6.0
        assert not engine.aborted
        w.gate(engine, is_open=True)
        assert w.service.fleet.get(engine.name).fences  # type: ignore[union-attr]
        await over(turn)
        judge_whole(turn)
        assert turn.transcript.tokens == greedy(turn)
        assert engine.aborted == [rid]


async def test_a_turns_end_is_told_when_its_last_event_comes_and_noted_after_that() -> None:
    async with world(SimEngine("a", stop_at=8, linger=100)) as w:
        turn = w.ask(20)
        told = list[tuple[bool, bool]]()

        def tell() -> bool:
            told.append((turn.is_over, turn in list(w.service.ledger)))
            return True

        telling = asyncio.create_task(turn.changed.wait(tell))
        await until(lambda: turn.is_over)
        assert told[-1] == (True, True)
        assert [over for over, _ in told].count(True) == 1
        await until(lambda: turn.ended_event.has_come)
        assert turn not in list(w.service.ledger)
        telling.cancel()


@pytest.mark.parametrize("what", ["cancelled", "reset", "reset alone"])
async def test_what_comes_behind_the_end_changes_nothing_of_it(what: str) -> None:
    async with world(SimEngine("a", stop_at=8, linger=100)) as w:
        (engine,) = w.engines.values()
        turn = w.ask(20)
        await until(lambda: turn.is_over)
        finish, asked = turn.finish, len(engine.seen)
        if what == "cancelled":
            assert turn.task is not None
            turn.task.cancel()
        else:
            engine.alive = False
        if what == "reset alone":
            turn.record.saw_death("b", suspected=True, held=0)
        await until(lambda: turn.ended_event.has_come)
        assert turn.finish == finish == {"type": "stop", "matched": turn.transcript.tokens[-1]}
        assert turn.error is None
        assert not turn.moves
        assert len(engine.seen) == asked, "nobody asks whether it still answers"
        judge(turn)


async def test_a_duplicate_between_a_turns_end_and_its_tasks_has_the_same_answer() -> None:
    async with world(SimEngine("a", stop_at=8, linger=100)) as w:
        asked = TurnRequest("own", (1,), {"max_new_tokens": 20}, own_rid=True)
        turn = w.service.submit(asked)
        await until(lambda: turn.is_over)
        assert w.service.submit(asked) is turn
        await until(lambda: turn.ended_event.has_come)
        assert turn.finish is not None
        assert turn.finish["type"] == "stop"


async def test_an_engine_is_asked_before_anything_else_is_done() -> None:
    async with world(SimEngine("a")) as w:
        asked = [TurnRequest(f"r{n}", (n,), {"max_new_tokens": 4}) for n in (1, 2)]
        (engine,) = w.engines.values()
        later = w.service.submit(asked[0])
        assert not engine.seen
        turn = w.service.submit(asked[1], at_once=True)
        assert [list(one["input_ids"]) for one in engine.seen] == [[2]]
        for one in (later, turn):
            await over(one)
            judge_whole(one)


async def test_a_turn_that_has_ended_is_not_continued_by_a_late_verdict() -> None:
    async with world(*two(stop_at=8, linger=100)) as w:
        turn = w.ask(20)
        await started(turn)
        engine = where(w, turn)
        await until(lambda: turn.is_over)
        w.gate(engine, is_open=False)
        assert not turn.ended_event.has_come, "its engine lingers"
        await until(lambda: turn.ended_event.has_come)
        assert turn.finish is not None
        assert turn.finish["type"] == "stop"
        assert turn.transcript.tokens == greedy(turn)[:8]
        assert not turn.moves
        judge(turn)


async def test_with_nothing_elsewhere_a_paused_turn_stays() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(20)
        await started(turn)
        engine = where(w, turn)
        w.gate(engine, is_open=False)
        await asyncio.sleep(600)
        assert turn.leg is not None
        w.gate(engine, is_open=True)
        await over(turn)
        judge_whole(turn)
        assert not turn.moves


async def test_a_leaving_engine_is_left_at_once() -> None:
    async with world(*two()) as w:
        turn = w.ask(40)
        await started(turn)
        engine = where(w, turn)
        began = w.service.clock()
        engine.leaving = True
        w.update_engine(engine)
        await until(lambda: bool(turn.moves))
        assert w.service.clock() - began < 0.5
        await over(turn)
        judge_whole(turn)
        assert [m.reason for m in turn.moves] == [MoveReason.REVOKED]


async def test_the_end_of_the_owners_stream_closes_the_gate() -> None:
    async with world(*two()) as w:
        turn = w.ask(300)
        await started(turn)
        engine = where(w, turn)
        engine.frozen = True
        w.detach(engine)
        assert not w.service.fleet.get(engine.name).gate_open  # type: ignore[union-attr]
        await over(turn)
        judge_whole(turn)
        assert [m.reason for m in turn.moves] == [MoveReason.PAUSED]


async def test_a_newer_stream_takes_over_and_the_older_ones_end_changes_nothing() -> None:
    engine = SimEngine("a")
    async with world(engine) as w:
        w.service.fleet.apply(engine.update(), 77)
        w.detach(engine)
        assert w.service.fleet.get("a").gate_open  # type: ignore[union-attr]


async def test_an_engine_without_owner_is_forgotten_and_its_turn_goes_on() -> None:
    async with world(SimEngine("a"), forget_seconds=10) as w:
        turn = w.ask(20)
        await started(turn)
        engine = where(w, turn)
        engine.frozen = True
        w.detach(engine)
        await asyncio.sleep(11)
        assert len(w.service.fleet) == 0
        assert [m.reason for m in turn.moves] == [MoveReason.GONE]
        w.attach(SimEngine("b"))
        await over(turn)
        judge_whole(turn)


async def test_a_silent_engine_with_an_open_gate_is_left_after_its_patience() -> None:
    async with world(*two(), patience=LegPatience(stall_seconds=30)) as w:
        turn = w.ask(20)
        await started(turn)
        where(w, turn).frozen = True
        await over(turn)
        judge_whole(turn)
        assert [m.reason for m in turn.moves] == [MoveReason.STALLED]


@pytest.mark.parametrize("spans_always", [False, True])
async def test_a_commit_in_mid_turn_gives_two_spans_and_says_that_keys_are_mixed(
    spans_always: bool,
) -> None:
    async with world(SimEngine("a", spans_always=spans_always)) as w:
        turn = w.ask(20)
        await started(turn)
        w.commit(w.engines["a"], V(1))
        await over(turn)
        judge_whole(turn)
        spans = turn.transcript.spans
        assert [(s.version, s.kv.value) for s in spans] == [(V(0), "own"), (V(1), "mixed")]
