"""Engines that draft are sent their questions' answers; what they cannot sample so is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from rose_core.rollouts.engines.drafts import CONTEXT, MOST_OF_QUESTION
from rose_core.rollouts.errors import UnsafeTurn
from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_core.rollouts.versions import Pin
from rose_core.wire.routing import EngineUpdate
from rose_router.engines.engine_client import Target
from rose_router.metrics import REGISTRY
from rose_router.turns.drafting import LOOK_SECONDS, Drafter
from rose_router.turns.turn import Turn
from tests.router.world import Run, SimEngine, World, over, started, until, world

pytestmark = pytest.mark.looptime

PROMPT = tuple(range(100, 140))


class Drafting(SimEngine):
    """An engine that says that it drafts."""

    def update(self, head: str = "") -> EngineUpdate:
        return replace(super().update(head), drafts=True)


class Verifying(Drafting):
    """One that counts its steps, as SGLang does."""

    def event(self, run: Run) -> StreamEvent:
        event = super().event(run)
        return replace(event, meta={**(event.meta or {}), "spec_verify_ct": 10})


class Relayed(Drafting):
    """One that is attached to another replica, which speaks for it here."""

    def update(self, head: str = "") -> EngineUpdate:
        return replace(super().update(head), relayed=True)


class Sent:
    """Whoever carries drafts to engines."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []
        self.takes = True
        self.slow = ""
        self.cancelled = 0

    async def __call__(self, target: Target, texts: Sequence[Sequence[int]]) -> bool:
        self.calls.append((target.url, [tuple(text) for text in texts]))
        if target.url == self.slow:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return self.takes


async def look(drafter: Drafter) -> None:
    drafter.look()
    await asyncio.gather(*drafter.under_way.values())


def drafter_of(w: World) -> tuple[Drafter, Sent]:
    sent = Sent()
    service = w.service
    service.drafter = Drafter(service.fleet, lambda: service.ledger, sent, service.clock)
    return service.drafter, sent


def count(name: str, outcome: str) -> float:
    return REGISTRY.get_sample_value(f"{name}_total", {"outcome": outcome}) or 0.0


async def test_a_sibling_drafts_from_what_was_answered_before() -> None:
    async with world(Drafting("a")) as w:
        drafter, sent = drafter_of(w)
        first = await over(w.ask(40, prompt=PROMPT))
        await look(drafter)
        assert not sent.calls  # nobody asks this any more
        sibling = w.ask(400, prompt=PROMPT)
        await until(lambda: sibling.leg is not None)
        await look(drafter)
        ((url, texts),) = sent.calls
        assert url == "sim://a"
        assert texts[0] == (*PROMPT[-CONTEXT:], *first.transcript.tokens)
        await look(drafter)
        assert len(sent.calls) == 1  # nothing new
        await over(sibling)
        await look(drafter)
        assert sent.calls[-1][1] == []  # the group has ended


async def test_siblings_that_run_draft_from_each_other() -> None:
    async with world(Drafting("a")) as w:
        drafter, sent = drafter_of(w)
        turns = [w.ask(300, prompt=PROMPT) for _ in range(2)]
        await until(lambda: all(turn.leg is not None and turn.leg.placed > 64 for turn in turns))
        await look(drafter)
        ((_, texts),) = sent.calls
        assert len(texts) == 2
        for turn in turns:
            await over(turn)


async def test_turns_that_were_queued_before_an_engine_came_are_of_one_group() -> None:
    steps = count("rose_router_draft_tokens", "steps")
    async with world() as w:
        drafter, sent = drafter_of(w)
        turns = [w.ask(40, prompt=PROMPT), w.ask(400, prompt=PROMPT)]
        await asyncio.sleep(1)
        assert all(turn.leg is None for turn in turns)
        w.attach(Verifying("a"))
        first = await over(turns[0])
        await until(lambda: count("rose_router_draft_tokens", "steps") == steps + 10)
        await look(drafter)
        ((_, texts),) = sent.calls
        assert texts[0] == (*PROMPT[-CONTEXT:], *first.transcript.tokens)
        await over(turns[1])


async def test_a_trajectory_whose_first_prompt_nobody_read_is_in_no_group() -> None:
    async with world(SimEngine("plain")) as w:
        drafter, sent = drafter_of(w)
        first = await over(w.ask(40, prompt=PROMPT, session="old"))
        w.detach(w.engines["plain"])
        w.attach(Drafting("a"))
        longer = (*PROMPT, *first.transcript.tokens)
        await over(w.ask(40, prompt=longer, session="old"))
        # Another trajectory that begins with those very tokens shares no question with it.
        sibling = w.ask(400, prompt=longer, session="new")
        await until(lambda: sibling.leg is not None)
        await look(drafter)
        assert not sent.calls
        await over(sibling)


async def test_others_questions_are_not_sent_and_engines_without_drafts_get_none() -> None:
    async with world(SimEngine("plain")) as w:
        drafter, sent = drafter_of(w)
        await over(w.ask(40, prompt=PROMPT))
        other = w.ask(400, prompt=PROMPT)
        await until(lambda: other.leg is not None)
        await look(drafter)
        assert not sent.calls
        await over(other)


async def test_what_was_not_taken_is_sent_again() -> None:
    refused = count("rose_router_draft_corpora", "refused")
    async with world(Drafting("a")) as w:
        drafter, sent = drafter_of(w)
        await over(w.ask(40, prompt=PROMPT))
        sent.takes = False
        turn = w.ask(400, prompt=PROMPT)
        await until(lambda: turn.leg is not None)
        await look(drafter)
        sent.takes = True
        await look(drafter)
        assert len(sent.calls) == 2
        await over(turn)
    assert count("rose_router_draft_corpora", "refused") == refused + 1


async def test_the_loop_looks_by_itself() -> None:
    async with world(Drafting("a")) as w:
        drafter, sent = drafter_of(w)
        loop = asyncio.create_task(drafter.run())
        turns = [w.ask(400, prompt=PROMPT) for _ in range(2)]
        await asyncio.sleep(2 * LOOK_SECONDS + 1)
        assert sent.calls
        loop.cancel()
        for turn in turns:
            await over(turn)


async def test_an_engine_of_another_replica_is_sent_nothing_from_here() -> None:
    async with world(Relayed("a")) as w:
        drafter, sent = drafter_of(w)
        await over(w.ask(40, prompt=PROMPT))
        sibling = w.ask(400, prompt=PROMPT)
        await until(lambda: sibling.leg is not None)
        await look(drafter)
        assert not sent.calls
        engine = w.engines["a"]
        w.service.fleet.apply(Drafting.update(engine), 99)  # type: ignore[arg-type]  # is one
        await look(drafter)
        assert len(sent.calls) == 1  # it has come over to this one
        await over(sibling)


async def test_an_engine_that_takes_its_corpus_slowly_delays_no_other() -> None:
    async with world(Drafting("a"), Drafting("b")) as w:
        drafter, sent = drafter_of(w)
        sent.slow = "sim://a"
        loop = asyncio.create_task(drafter.run())
        turns = [w.ask(400, prompt=PROMPT) for _ in range(8)]
        for turn in turns:
            await started(turn, 40)
        await asyncio.sleep(4 * LOOK_SECONDS)
        urls = [url for url, _ in sent.calls]
        assert urls.count("sim://a") == 1
        assert urls.count("sim://b") > 1
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        assert sent.cancelled == 1
        for turn in turns:
            await over(turn)


async def test_only_answers_that_are_sent_are_read_and_of_those_no_more_than_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    newest = Turn.newest

    def noted(turn: Turn, most: int) -> list[int]:
        assert most <= MOST_OF_QUESTION
        read.append(turn.request.rid)
        return newest(turn, most)

    monkeypatch.setattr(Turn, "newest", noted)
    async with world(Drafting("a", cap=2), SimEngine("plain", cap=8)) as w:
        drafter, sent = drafter_of(w)
        turns = [w.ask(300, prompt=(*PROMPT, number)) for number in range(6)]
        for turn in turns:
            await started(turn, 40)
        for turn in turns:
            assert turn.newest(7) == turn.shown().tokens[-7:]
            assert turn.newest(10_000) == turn.shown().tokens
        there = [turn.request.rid for turn in turns if turn.leg and turn.leg.engine == "a"]
        assert 0 < len(there) < len(turns)
        read.clear()
        monkeypatch.setattr(Turn, "shown", None)
        await look(drafter)
        monkeypatch.undo()
        assert sorted(read) == sorted(there)
        ((_, texts),) = sent.calls
        assert len(texts) == len(there)
        for turn in turns:
            await over(turn)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 20, "top_p": 0.9, "temperature": 0}, {"min_p": 0, "min_new_tokens": 0}]
)
async def test_what_asks_for_nothing_is_let_through(sampling: dict[str, float]) -> None:
    async with world(Drafting("a")) as w:
        for given in (sampling, {"top_k": 20, "top_p": 1.0}, {"top_k": -1, "top_p": 0.9}):
            await over(w.ask(4, prompt=PROMPT, sampling=given))


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"min_new_tokens": 4},
        {"sampling_seed": 0},
        {"top_k": 20, "top_p": 0.9},
    ],
)
async def test_what_verifying_would_pass_over_is_refused(sampling: dict[str, float]) -> None:
    async with world(Drafting("a")) as w:
        with pytest.raises(UnsafeTurn, match=r"spec\.drafts"):
            w.ask(4, prompt=PROMPT, sampling=sampling)
    async with world(SimEngine("a")) as w:
        await over(w.ask(4, prompt=PROMPT, sampling=sampling))


async def test_adapters_of_one_process_draft_from_one_corpus() -> None:
    engine = Drafting("e", cap=4, adapters={"a": "a@1.0", "b": "b@1.0"})
    async with world(engine) as w:
        drafter, sent = drafter_of(w)
        other = tuple(range(300, 340))
        first = await over(w.ask(40, prompt=PROMPT))
        second = await over(w.ask(40, prompt=other, pin=Pin(run="b")))
        turns = [w.ask(400, prompt=PROMPT), w.ask(400, prompt=other, pin=Pin(run="b"))]
        await until(lambda: all(turn.leg is not None for turn in turns))
        await look(drafter)
        ((url, texts),) = sent.calls  # one, of what both answer
        assert url == "sim://e"
        answers = {
            (*turn.request.prompt[-CONTEXT:], *turn.transcript.tokens) for turn in (first, second)
        }
        assert answers <= set(texts)
        await look(drafter)
        assert len(sent.calls) == 1
        for turn in turns:
            await over(turn)
