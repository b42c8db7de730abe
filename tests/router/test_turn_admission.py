"""Which engines a turn may use, how it queues, and how it ends; virtual time throughout."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rose_core.identity import WeightVersion
from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.rollouts.errors import UnsafeTurn, VersionGone
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.requests.fields import Bounds
from rose_core.rollouts.terms import LeaseTerms
from rose_core.rollouts.versions import Pin
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_router.engines.fleet import Fleet
from rose_router.errors import BadRequest, Busy, Conflict, Overloaded, Unprocessable
from rose_router.turns.turn import Turn, TurnState
from tests.router.world import (
    SimEngine,
    V,
    World,
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


async def test_only_fresh_attested_engines_get_turns() -> None:
    old, new, naked = SimEngine("old"), SimEngine("new", version=V(2)), SimEngine("x", version="")
    async with world(old, naked, new, terms=LeaseTerms(max_staleness=1)) as w:
        turns = [w.ask(5) for _ in range(6)]
        for turn in turns:
            await over(turn)
        assert {leg.engine for turn in turns for leg in turn.transcript.legs} == {"new"}


async def test_the_head_named_by_an_owner_counts_for_staleness() -> None:
    engine = SimEngine("a")
    async with world(engine, terms=LeaseTerms(max_staleness=1)) as w:
        w.update_engine(engine, head=V(2))
        turn = w.ask(5)
        await asyncio.sleep(60)
        assert turn.state is TurnState.WAITING
        w.commit(engine, V(1))
        await over(turn)
        judge_whole(turn)


async def test_the_cap_is_never_passed() -> None:
    engine = SimEngine("a", cap=3)
    async with world(engine) as w:
        turns = [w.ask(10) for _ in range(10)]
        most = 0
        while not all(turn.is_over for turn in turns):
            most = max(most, len(w.service.fleet.get("a").legs))  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert most == 3
        for turn in turns:
            judge_whole(turn)


async def test_a_cap_that_is_cut_moves_the_youngest_to_where_there_is_room() -> None:
    first, second = two(cap=4)
    async with world(first) as w:
        turns = [w.ask(200) for _ in range(4)]
        for turn in turns:
            await started(turn)
        w.attach(second)
        first.cap = 1
        w.update_engine(first)
        await asyncio.sleep(1)
        assert len(w.service.fleet.get("a").legs) == 1  # type: ignore[union-attr]
        for turn in turns:
            judge_whole(await over(turn))
        assert sum(len(turn.moves) for turn in turns) == 3
        assert {m.reason for turn in turns for m in turn.moves} == {MoveReason.CAP_CUT}


async def test_a_session_comes_back_to_its_engine() -> None:
    engines = [SimEngine(name, cap=8) for name in "abcd"]
    async with world(*engines) as w:
        for session in ("s1", "s2", "s3"):
            prompt = tuple(range(500))
            homes = set()
            for _ in range(4):
                turn = await over(w.ask(5, prompt=prompt, session=session))
                homes.add(turn.transcript.legs[0].engine)
                prompt = tuple(turn.transcript.context)
            assert len(homes) == 1


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async with world(queue=QueueLimits(most=2, seconds=100)) as w:
        waiting = [w.ask(5) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await over(w.ask(5))
        assert isinstance(refused.error, Busy)
        assert refused.error.reason == "QueueFull"
        assert refused.error.retry_after > 0
        w.attach(SimEngine("a"))
        for turn in waiting:
            judge_whole(await over(turn))


@pytest.mark.parametrize(
    ("answers", "refusal", "words"),
    [
        (8, Busy, "asks for 8 answers at once; engines have 2 places free, .* 4 turns"),
        (6, None, ""),
        (20, Unprocessable, "asks for 20 answers .* ask for 9 answers at most"),
    ],
)
async def test_answers_that_do_not_fit_are_refused_with_what_would(
    answers: int, refusal: type[Exception] | None, words: str
) -> None:
    engines = SimEngine("a", cap=2), SimEngine("b", cap=3, gate_open=False)
    async with world(*engines, queue=QueueLimits(most=4, seconds=100)) as w:
        await asyncio.sleep(0.1)
        room = w.service.queue
        if refusal is None:
            room.check_room(more=answers)
        else:
            with pytest.raises(refusal, match=words):
                room.check_room(more=answers)


async def test_a_turn_that_waited_too_long_names_the_nearest_obstacle() -> None:
    async with world(SimEngine("a", gate_open=False), queue=QueueLimits(seconds=30)) as w:
        turn = await over(w.ask(5))
        assert isinstance(turn.error, Overloaded)
        assert "GateClosed" in str(turn.error)
        assert turn.state is TurnState.FAILED


async def test_a_turn_with_tokens_that_finds_no_engine_ends_as_a_typed_abort() -> None:
    async with world(SimEngine("a"), queue=QueueLimits(seconds=30)) as w:
        turn = w.ask(20)
        await started(turn)
        w.kill(w.engines["a"])
        await over(turn)
        assert turn.finish is not None
        assert turn.finish["type"] == "abort"
        assert turn.finish["err_type"] == "QueueTimeout"
        assert turn.held >= 5
        judge(turn)


async def test_the_budget_of_losses_ends_a_turn() -> None:
    async with world(SimEngine("a", spans_always=False), max_losses=1) as w:
        turn = w.ask(20)
        for _ in range(2):
            await started(turn)
            w.kill(w.engines["a"])
            await until(lambda: turn.leg is None)
            w.revive(w.engines["a"], V(0))
        await over(turn)
        assert turn.state is TurnState.FAILED
        assert "lost 2 engines" in str(turn.error)


async def test_what_cannot_be_spliced_runs_on_dedicated_engines_only() -> None:
    borrowed, dedicated = SimEngine("a", cap=50), SimEngine("d", kind=DEDICATED, cap=50)
    async with world(borrowed, dedicated) as w:
        why = ("stop: may match across the cut",)
        turns = [w.ask(5, dedicated_because=why) for _ in range(10)]
        for turn in turns:
            judge_whole(await over(turn))
            assert [leg.engine for leg in turn.transcript.legs] == ["d"]


async def test_what_cannot_be_spliced_is_never_resampled_after_its_first_token() -> None:
    dedicated, spare = SimEngine("d", kind=DEDICATED), SimEngine("e", kind=DEDICATED)
    async with world(dedicated, spare) as w:
        turn = w.ask(20, dedicated_because=("stop: may match across the cut",))
        await started(turn)
        w.kill(where(w, turn))
        await over(turn)
        assert turn.finish is not None
        assert turn.finish["err_type"] == "NotSpliceable"
        judge(turn)


STOPS = ("stop: may match across the cut",)


async def test_without_a_dedicated_engine_for_a_minute_it_is_refused_by_name() -> None:
    async with world(SimEngine("a")) as w:
        turn = await over(w.ask(20, dedicated_because=STOPS))
        assert isinstance(turn.error, Unprocessable)
        assert turn.error.reason == "NotSpliceable"
        assert "stop: may match" in str(turn.error)
        assert 60 <= turn.ended - turn.began < 65


async def test_a_dedicated_engine_that_comes_within_the_minute_is_waited_for() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(5, dedicated_because=STOPS)
        await asyncio.sleep(50)
        assert turn.state is TurnState.WAITING
        w.attach(SimEngine("own", kind=DEDICATED))
        judge_whole(await over(turn))
        assert [leg.engine for leg in turn.transcript.legs] == ["own"]


@pytest.mark.parametrize("held", [30, 300])
async def test_the_time_for_which_turns_are_held_is_none_of_that_minute(held: int) -> None:
    """A trainer holds turns while it updates weights, in which no engine would take them."""
    async with world(SimEngine("a")) as w:
        turn = w.ask(5, dedicated_because=STOPS)
        await asyncio.sleep(30)
        w.service.queue.hold()
        await asyncio.sleep(held / 2)
        w.service.queue.hold()  # a trainer may ask twice
        await asyncio.sleep(held / 2)
        w.service.queue.release()
        await over(turn)
        assert isinstance(turn.error, Unprocessable)
        assert 60 + held <= turn.ended - turn.began < 65 + held


async def test_an_unknown_pin_is_refused_with_what_is_known() -> None:
    async with world(SimEngine("a")) as w:
        with pytest.raises(Conflict, match=r"newest version known here is run@1\.0"):
            w.ask(5, pin=Pin(minimum=WeightVersion("run", 1, 3)))
        with pytest.raises(Conflict, match=r"no engine has version run@1\.9"):
            w.ask(5, pin=Pin(exact=WeightVersion("run", 1, 9)))


async def test_a_minimum_waits_for_the_engine_that_has_it() -> None:
    old, new = SimEngine("old", version=V(0)), SimEngine("new", version=V(1), gate_open=False)
    async with world(old, new) as w:
        turn = w.ask(5, pin=Pin(minimum=WeightVersion("run", 1, 1)))
        await asyncio.sleep(20)
        assert turn.state is TurnState.WAITING
        w.gate(new, is_open=True)
        judge_whole(await over(turn))
        assert turn.transcript.legs[0].engine == "new"


async def test_an_exact_pin_cuts_at_the_commit_and_ends_typed_when_the_version_is_gone() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(20, pin=Pin(exact=WeightVersion("run", 1, 0)))
        await started(turn)
        w.commit(w.engines["a"], V(1))
        await over(turn)
        assert turn.finish is not None
        assert turn.finish["err_type"] == "VersionGone"
        assert {s.version for s in turn.transcript.spans} == {V(0)}
        assert turn.held >= 5
        judge(turn)


async def test_an_exact_pin_waits_for_an_engine_that_attests_nothing_for_a_moment() -> None:
    old, new = SimEngine("old", version=V(0)), SimEngine("new", version=V(1))
    async with world(old, new) as w:
        w.commit(old, "")
        turn = w.ask(5, pin=Pin(exact=WeightVersion("run", 1, 0)))
        await asyncio.sleep(5)
        assert turn.state is TurnState.WAITING
        w.commit(old, V(0))
        judge_whole(await over(turn))
        assert {s.version for s in turn.transcript.spans} == {V(0)}


async def test_an_exact_pin_ends_when_the_engine_comes_back_with_another_version() -> None:
    old, new = SimEngine("old", version=V(0)), SimEngine("new", version=V(1))
    async with world(old, new) as w:
        w.commit(old, "")
        turn = w.ask(5, pin=Pin(exact=WeightVersion("run", 1, 0)))
        await asyncio.sleep(5)
        w.commit(old, V(1))
        await over(turn)
        assert isinstance(turn.error, VersionGone)


async def test_an_exact_pin_goes_on_where_the_version_still_is() -> None:
    first, second = two()
    async with world(first) as w:
        turn = w.ask(20, pin=Pin(exact=WeightVersion("run", 1, 0)))
        await started(turn)
        w.attach(second)
        w.commit(first, V(1))
        judge_whole(await over(turn))
        assert {s.version for s in turn.transcript.spans} == {V(0)}
        assert turn.transcript.tokens == greedy(turn)


async def test_a_caller_that_hangs_up_ends_the_turn_at_the_engine() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(200)
        await started(turn)
        assert turn.leg is not None
        rid = turn.leg.rid
        w.service.leave(turn)
        await over(turn)
        await asyncio.sleep(0.1)
        assert w.engines["a"].aborted == [rid]
        assert turn.finish is not None
        assert turn.finish["type"] == "abort"
        judge(turn)


async def test_abort_is_by_exact_id() -> None:
    async with world(SimEngine("a")) as w:
        one, other = w.ask(40, rid="abc-1"), w.ask(40, rid="abc-12")
        await started(other)
        assert w.service.abort("abc-1")
        assert not w.service.abort("abc")
        assert (await over(one)).finish["type"] == "abort"  # type: ignore[index]
        judge_whole(await over(other))


async def test_a_duplicate_id_joins_the_live_turn_and_replays_the_finished_one() -> None:
    engine = SimEngine("a")
    async with world(engine) as w:
        first = w.ask(10, rid="x", own_rid=True, prompt=(1, 2))
        second = w.ask(10, rid="x", own_rid=True, prompt=(1, 2))
        assert second is first
        w.service.leave(first)  # one of the two callers; the other still listens
        await over(first)
        judge_whole(first)
        assert w.ask(10, rid="x", own_rid=True, prompt=(1, 2)) is first
        assert len(engine.seen) == 1
        assert w.ask(10, rid="x", own_rid=True, prompt=(3,)) is not first
        with pytest.raises(BadRequest, match="another body"):
            w.ask(10, rid="x", own_rid=True, prompt=(4,))


async def test_draining_lets_live_turns_end_and_takes_no_new_ones() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(20)
        await started(turn)
        await w.service.drain()
        judge_whole(turn)
        with pytest.raises(Overloaded, match="shutting down"):
            w.ask(5)


async def test_closing_ends_turns_as_typed_aborts_with_their_tokens() -> None:
    async with world(SimEngine("a")) as w:
        turn = w.ask(2000)
        await started(turn)
        await w.service.close()
        assert turn.finish is not None
        assert turn.finish["type"] == "abort"
        assert turn.held >= 5


async def test_what_turns_must_keep_follows_the_engines_that_are_there() -> None:
    fleet = Fleet(lambda: 0.0, 1.0)

    def engine(name: str, vocabulary: int, context: int, *, leaving: bool = False) -> EngineUpdate:
        return EngineUpdate(
            *(name, EngineKind.BORROWED, "a/b", f"http://{name}"),
            vocabulary=vocabulary,
            context_tokens=context,
            leaving=leaving,
        )

    assert fleet.bounds() == Bounds(0, 0)
    fleet.apply(engine("a", 500, 4096), 1)
    assert fleet.bounds() == Bounds(500, 4096)
    fleet.apply(engine("b", 300, 8192), 2)
    assert fleet.bounds() == Bounds(300, 4096)
    fleet.apply(engine("a", 500, 1024), 1)
    assert fleet.bounds() == Bounds(300, 1024)
    fleet.apply(engine("b", 300, 8192, leaving=True), 2)
    fleet.detach(2)
    assert fleet.bounds() == Bounds(500, 1024)


SEEDED = {"sampling_seed": 3}


def like_vllm(name: str, kind: EngineKind = BORROWED) -> SimEngine:
    return SimEngine(name, kind=kind, cap=8, refuses=("sampling_seed", "presence_penalty"))


async def test_a_turn_runs_only_on_engines_that_take_its_parameters() -> None:
    """Whatever is free elsewhere; other turns go anywhere."""
    async with world(like_vllm("vllm"), SimEngine("sglang", cap=1)) as w:
        seeded = [w.ask(10, sampling=SEEDED) for _ in range(3)]
        plain = [w.ask(10) for _ in range(6)]
        for turn in (*seeded, *plain):
            judge_whole(await over(turn))
        assert {leg.engine for turn in seeded for leg in turn.transcript.legs} == {"sglang"}
        assert "vllm" in {leg.engine for turn in plain for leg in turn.transcript.legs}


async def test_a_turn_whose_engine_leaves_waits_for_one_that_takes_it() -> None:
    first, second = two()
    async with world(first, like_vllm("vllm")) as w:
        turn = w.ask(60, sampling=SEEDED)
        await started(turn)
        first.leaving = True
        w.gate(first, is_open=False)
        await asyncio.sleep(20)
        assert turn.state is TurnState.WAITING
        w.attach(second)
        judge_whole(await over(turn))
        assert [leg.engine for leg in turn.transcript.legs] == ["a", "b"]


async def test_a_turn_that_cannot_move_is_refused_where_only_borrowed_engines_take_it() -> None:
    async with world(like_vllm("vllm", DEDICATED), SimEngine("sglang")) as w:

        def ask() -> Turn:
            given = {"presence_penalty": 1.0}
            return w.ask(5, sampling=given, dedicated_because=("penalties",))

        refused = await over(ask())
        assert isinstance(refused.error, UnsafeTurn)
        assert "presence_penalty: no engine" in str(refused.error)
        w.attach(SimEngine("own", kind=DEDICATED))
        assert [leg.engine for leg in (await over(ask())).transcript.legs] == ["own"]


both_ways = pytest.mark.parametrize("attached", [True, False], ids=["comes-after", "comes-before"])
"""Whether the engine that refuses the turn is attached when it comes: it must not matter."""


async def beside_vllm(w: World, *, attached: bool) -> list[Turn]:
    """A turn that vLLM refuses, and one that it takes, which has ended."""
    engine = like_vllm("vllm")
    if attached:
        w.attach(engine)
    turns = [w.ask(5, sampling=SEEDED), w.ask(5)]
    await asyncio.sleep(1)
    if not attached:
        w.attach(engine)
    judge_whole(await over(turns[1]))
    return turns


@both_ways
async def test_a_turn_that_no_engine_takes_waits_for_one_that_does(*, attached: bool) -> None:
    """Engines of a lease come one after the other."""
    async with world() as w:
        turn, _ = await beside_vllm(w, attached=attached)
        await asyncio.sleep(50)
        assert turn.state is TurnState.WAITING
        w.attach(SimEngine("sglang"))
        judge_whole(await over(turn))
        assert [leg.engine for leg in turn.transcript.legs] == ["sglang"]


@both_ways
async def test_a_turn_that_no_engine_takes_for_a_minute_is_refused_by_name(
    *, attached: bool
) -> None:
    """And not after the longest wait."""
    async with world() as w:
        turn, _ = await beside_vllm(w, attached=attached)
        await over(turn)
        assert isinstance(turn.error, UnsafeTurn)
        assert "sampling_seed: no engine attached" in str(turn.error)
        assert 60 <= turn.ended - turn.began < 65


async def a_minute_after_it_left(w: World, engine: SimEngine, turn: Turn) -> None:
    """The turn is refused so long after the engine that would have taken it has left."""
    engine.leaving = True
    w.gate(engine, is_open=False)
    w.detach(engine)
    left = w.service.clock()
    await over(turn)
    assert isinstance(turn.error, UnsafeTurn)
    assert 60 <= turn.ended - left < 65


async def test_the_minute_begins_anew_when_the_last_engine_that_takes_the_turn_has_left() -> None:
    full = SimEngine("sglang", cap=1)
    async with world(like_vllm("vllm"), full) as w:
        long = w.ask(10_000, sampling=SEEDED)
        await started(long)
        turn = w.ask(5, sampling=SEEDED)
        await asyncio.sleep(90)
        assert turn.state is TurnState.WAITING
        await a_minute_after_it_left(w, full, turn)


async def test_the_minute_begins_anew_when_an_engine_has_left_whose_kv_pool_was_full() -> None:
    """It would have taken the turn once others' keys were gone."""

    class Full(SimEngine):
        def update(self, head: str = "") -> EngineUpdate:
            return msgspec.structs.replace(super().update(head), kv_tokens=1)

    full = Full("sglang", cap=2)
    async with world(like_vllm("vllm")) as w:
        turn = w.ask(5, sampling=SEEDED)
        first = w.ask(10_000, sampling=SEEDED, priority=1)
        await asyncio.sleep(30)
        w.attach(full)
        await started(first)
        await asyncio.sleep(40)
        assert turn.state is TurnState.WAITING
        await a_minute_after_it_left(w, full, turn)
