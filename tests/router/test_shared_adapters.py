"""Turns of several runs on engines that hold an adapter of each."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.errors import InvalidTurn, UnknownVersion
from rose_core.rollouts.placement.views import EngineView
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.training.quorum import Quorum, missing
from rose_core.rollouts.versions import Pin, read_pin
from rose_core.wire.routing import EngineKind, each_adapter
from rose_router import metrics
from rose_router.errors import BadRequest, Conflict
from tests.router.world import SimEngine, World, judge_whole, over, started, until, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def shared(name: str = "e", cap: int = 4, **adapters: str) -> SimEngine:
    """An engine with adapters of these runs; the first is the lease's first."""
    return SimEngine(name, cap=cap, adapters={run: f"{run}@{at}" for run, at in adapters.items()})


def pin(run: str) -> Pin:
    return read_pin(None, None, run)


async def test_a_turn_runs_on_the_adapter_of_the_run_that_it_names() -> None:
    engine = shared(a="1.4", b="1.7")
    async with world(engine) as w:
        turns = {run: w.ask(20, pin=pin(run)) for run in ("a", "b")}
        unnamed = await over(w.ask(20))
        for run, turn in turns.items():
            judge_whole(await over(turn))
            assert [span.version for span in turn.transcript.spans] == [engine.adapters[run]]
            assert turn.transcript.legs[0].engine == f"e/{run}"
        assert [span.version for span in unnamed.transcript.spans] == ["a@1.4"]


async def test_an_unknown_run_is_refused_with_those_that_there_are() -> None:
    async with world(shared(a="1.0", b="1.0")) as w:
        with pytest.raises(Conflict, match="no engine has run c yet; there are a, b"):
            w.ask(20, pin=pin("c"))


async def test_adapters_of_one_process_share_its_cap() -> None:
    engine = shared(cap=2, a="1.0", b="1.0", c="1.0")
    async with world(engine) as w:
        turns = [w.ask(40, pin=pin(run)) for run in ("a", "b", "c")]
        await started(turns[0])
        await started(turns[1])
        assert [turn.leg is not None for turn in turns] == [True, True, False]
        assert sum(one.places for one in w.service.fleet) == 0
        for turn in turns:
            judge_whole(await over(turn))


async def test_a_cap_that_is_cut_moves_the_youngest_of_all_runs() -> None:
    first, second = shared("first", a="1.0", b="1.0"), shared("second", a="1.0", b="1.0")
    second.gate_open = False
    async with world(first, second) as w:
        turns = []
        for run in ("a", "b", "b"):
            turns.append(w.ask(60, pin=pin(run)))
            await started(turns[-1])
        second.gate_open, first.cap = True, 1
        w.update_engine(second)
        w.update_engine(first)
        for turn in turns:
            judge_whole(await over(turn))
        assert [[move.reason for move in turn.moves] for turn in turns] == [
            [],
            [MoveReason.CAP_CUT],
            [MoveReason.CAP_CUT],
        ]


async def test_a_pushed_version_waits_for_no_adapter_of_another_run() -> None:
    engine = EngineView("e/a", EngineKind.DEDICATED, WeightVersion("a", 1, 2), True, 4)
    other = replace(engine, name="e/b", version=WeightVersion("b", 1, 0), named=True)
    assert not missing([engine, other], WeightVersion("a", 1, 2), Quorum())
    assert missing([engine, other], WeightVersion("a", 1, 3), Quorum()) == "e/a"


async def test_staleness_is_each_runs_own() -> None:
    old = shared("old", a="1.9", b="1.0")
    new = shared("new", a="1.9", b="1.5")
    async with world(old, new) as w:
        for _ in range(4):
            turn = await over(w.ask(10, pin=pin("b")))
            assert turn.transcript.legs[0].engine == "new/b"  # b is five publishes behind on "old"
        assert w.service.fleet.head == WeightVersion("a", 1, 9)
        assert w.service.fleet.head_of("b") == WeightVersion("b", 1, 5)
        w.service.fleet.announce(WeightVersion("b", 1, 9))
        waits = w.ask(10, pin=pin("b"))
        await asyncio.sleep(1)
        assert waits.leg is None
        other = await over(w.ask(10, pin=pin("a")))  # nothing of that concerns another run
        judge_whole(other)
        new.adapters["b"] = "b@1.9"
        w.update_engine(new)
        judge_whole(await over(waits))


async def test_a_commit_of_one_run_leaves_spans_of_the_others_whole() -> None:
    engine = shared(a="1.0", b="1.0")
    async with world(engine) as w:
        first, second = w.ask(40, pin=pin("a")), w.ask(40, pin=pin("b"))
        await started(first)
        await started(second)
        engine.adapters["a"] = "a@1.1"
        w.update_engine(engine)
        await over(first)
        await over(second)
        assert [span.version for span in first.transcript.spans] == ["a@1.0", "a@1.1"]
        assert [span.version for span in second.transcript.spans] == ["b@1.0"]


async def test_a_run_that_an_engine_no_longer_holds_goes_on_where_it_is_held() -> None:
    first, second = shared("first", a="1.0", b="1.0"), shared("second", a="1.0", b="1.0")
    second.gate_open = False
    async with world(first, second) as w:
        turn = w.ask(40, pin=pin("b"))
        await started(turn)
        assert turn.leg is not None
        assert turn.leg.engine == "first/b"
        del first.adapters["b"]
        second.gate_open = True
        w.update_engine(first)
        w.update_engine(second)
        judge_whole(await over(turn))
        assert turn.transcript.legs[-1].engine == "second/b"
        assert sorted(one.name for one in w.service.fleet) == ["first/a", "second/a", "second/b"]


async def test_an_engine_that_lost_a_run_before_it_says_so_is_left_alone_for_a_while() -> None:
    engine = shared(a="1.0", b="1.0")
    async with world(engine) as w:
        del engine.adapters["b"]
        turn = w.ask(10, pin=pin("b"))
        await asyncio.sleep(2.2)
        assert 1 < len(engine.seen) <= 5  # one in half a second
        engine.adapters["b"] = "b@1.1"
        w.update_engine(engine)
        judge_whole(await over(turn))
        assert {move.reason for move in turn.moves} == {MoveReason.REFUSED}


async def test_tokens_are_counted_by_run() -> None:
    def kept(run: str) -> float:
        return float(metrics.RUN_TOKENS.labels(run)._value.get())  # of prometheus_client

    before = kept("counted-a"), kept("counted-b")
    async with world(
        SimEngine("e", adapters={r: f"{r}@1.0" for r in ("counted-a", "counted-b")})
    ) as w:
        await over(w.ask(20, pin=pin("counted-a")))
        await over(w.ask(7, pin=pin("counted-b")))
    assert (kept("counted-a") - before[0], kept("counted-b") - before[1]) == (20, 7)


async def test_a_relayed_adapter_still_takes_no_turn_that_names_no_run() -> None:
    """Another replica passes on each adapter as an engine of its own."""
    engine = shared(a="1.0", b="1.0")
    parts = each_adapter(engine.update())
    async with world() as w:
        w.engines["e"] = engine
        w.service.fleet.apply(replace(parts[1], relayed=True), 1)
        turn = w.ask(10)
        await asyncio.sleep(1)
        assert turn.leg is None
        w.service.fleet.apply(replace(parts[0], relayed=True), 1)
        await until(lambda: turn.is_over)
        assert [span.version for span in turn.transcript.spans] == ["a@1.0"]


async def test_a_pin_names_its_run_and_two_runs_are_no_turn() -> None:
    assert read_pin("b@1.7", None) == Pin(WeightVersion("b", 1, 7), run="b")
    with pytest.raises(InvalidTurn, match="name a, b"):
        read_pin("b@1.7", None, "a")


def at_gate(w: World) -> dict[str, bool]:
    return {one.name: one.gate_open for one in w.service.fleet}


async def test_an_update_that_names_no_adapters_closes_all_of_its_engine() -> None:
    """Its owner knows nothing of them at the moment: the host has not said."""
    engine = shared(a="1.4", b="1.7")
    async with world(engine) as w:
        turn = w.ask(400, pin=pin("b"))
        await started(turn)
        closed = replace(engine.update(), adapters=(), version="", gate_open=False)
        w.service.fleet.apply(closed, 1)
        assert at_gate(w) == {"e/a": False, "e/b": False}
        w.update_engine(engine)
        assert at_gate(w) == {"e/a": True, "e/b": True}
        w.service.fleet.apply(replace(closed, leaving=True), 1)
        assert [one.update.leaving for one in w.service.fleet] == [True, True]
        w.service.abort_all()
        await until(lambda: turn.is_over)


async def test_a_bare_update_leaves_no_engine_once_there_are_adapters() -> None:
    engine = shared(a="1.4", b="1.7")
    async with world() as w:
        w.service.fleet.apply(
            replace(engine.update(), adapters=(), version="", url="", gate_open=False), 1
        )
        assert at_gate(w) == {"e": False}
        w.attach(engine)
        assert at_gate(w) == {"e/a": True, "e/b": True}
        engine.adapters = {}
        w.update_engine(engine)  # it was started anew, for one run
        assert at_gate(w) == {"e": True}


async def test_another_replicas_word_of_a_bare_engine_closes_no_adapter() -> None:
    """Replicas pass on each adapter by itself; one of before keeps a bare engine beside them."""
    engine = shared(a="1.4", b="1.7")
    async with world(engine) as w:
        bare = replace(engine.update(), adapters=(), version="", gate_open=False, relayed=True)
        w.service.fleet.apply(bare, 7)
        assert at_gate(w) == {"e": False, "e/a": True, "e/b": True}


async def test_a_trajectory_grows_old_by_its_own_runs_publishes() -> None:
    engine = shared(a="1.0", b="1.0")
    async with world(engine) as w:
        memory = w.service.prospects
        await asyncio.sleep(1)  # the supervisor has looked
        await over(w.ask(10, session="of-a"))
        await over(w.ask(10, session="of-b", pin=pin("b")))
        for sequence in (1, 2, 3):
            w.service.fleet.announce(WeightVersion("a", 1, sequence))
            await asyncio.sleep(1)
        first, other = (memory.conclude(name, trained=True) for name in ("of-a", "of-b"))
        assert first is not None
        assert other is not None
        assert (first.stale, other.stale) == (3, 0)


async def test_a_process_counts_once_for_what_dedicated_engines_could_finish() -> None:
    async with world(shared("shared", a="1.0", b="1.0"), SimEngine("plain")) as w:
        assert sorted(one.name for one in w.service.fleet.processes()) == ["plain", "shared/a"]


async def test_a_version_of_another_run_may_come_only_where_engines_hold_several() -> None:
    wanted = read_pin(None, "b@1.7")
    async with world(shared(a="1.0")) as w:
        with pytest.raises(Conflict, match="no engine has run b yet"):
            w.ask(10, pin=wanted)
    async with world(SimEngine("e", version="a@1.0")) as w:
        with pytest.raises(BadRequest, match=r"no engine has version b@1\.7"):
            w.ask(10, pin=wanted)
        with pytest.raises(Conflict, match="no engine has run b yet"):
            w.ask(10, pin=pin("b"))


async def test_a_pin_to_the_newest_version_waits_while_its_engine_has_not_attested_again() -> None:
    """The guard's first word after a restart has the runs and none of their versions."""
    engine, other = shared("e", a="1.0", b="1.0"), shared("other", a="1.0")
    engine.gate_open = False
    async with world(engine, other) as w:
        exact, any_of_b = w.ask(10, pin=read_pin(None, "b@1.0")), w.ask(10, pin=pin("b"))
        await asyncio.sleep(0.1)
        held = engine.adapters
        engine.adapters = dict.fromkeys(held, "")
        w.update_engine(engine)
        later = w.ask(10, pin=pin("b"))
        await asyncio.sleep(1)
        assert not any(turn.is_over for turn in (exact, any_of_b, later))
        engine.adapters, engine.gate_open = held, True
        w.update_engine(engine)
        for turn in (exact, any_of_b, later):
            judge_whole(await over(turn))
            assert [span.version for span in turn.transcript.spans] == ["b@1.0"]
        engine.adapters = {"a": "a@1.0"}  # the lease has lost the run
        w.update_engine(engine)
        with pytest.raises(Conflict, match="no engine has run b yet"):
            w.ask(10, pin=pin("b"))


async def test_engines_that_are_reached_nowhere_yet_are_no_one_process() -> None:
    first, second = shared("first", a="1.0", b="1.0"), shared("second", a="1.0", b="1.0")
    async with world() as w:
        fleet = w.service.fleet
        for stream, engine in enumerate((first, second)):
            fleet.apply(replace(engine.update(), url="", gate_open=False), stream)
        apart = [{"first/a", "first/b"}, {"second/a", "second/b"}]
        for _ in range(2):
            groups = [{one.name for one in engine.together} for engine in fleet]
            assert groups == [apart[0], apart[0], apart[1], apart[1]]
            assert len(fleet.processes()) == 2
            w.attach(first)
            w.attach(second)


async def test_a_turn_that_waits_is_told_when_no_engine_has_its_run_any_more() -> None:
    engine, other = shared("e", a="1.0", b="1.0"), shared("other", a="1.0")
    engine.gate_open = False
    async with world(engine, other) as w:
        turn = w.ask(10, pin=pin("b"))
        await asyncio.sleep(5)
        assert not turn.is_over, "its engine's gate is shut"
        engine.adapters = {"a": "a@1.0"}
        w.update_engine(engine)
        await over(turn)
        assert isinstance(turn.error, UnknownVersion)
        assert "no engine has run b yet; there are a" in str(turn.error)
