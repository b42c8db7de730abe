"""Engines that draft are sent their questions' answers; what they cannot sample so is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from rose_core.rollouts.drafts import CONTEXT
from rose_core.rollouts.errors import UnsafeTurn
from rose_core.wire.routing import EngineUpdate
from rose_router.engines.engine_client import Target
from rose_router.metrics import REGISTRY
from rose_router.turns.drafting import LOOK_SECONDS, Drafter
from tests.router.world import SimEngine, World, over, until, world

pytestmark = pytest.mark.looptime

PROMPT = tuple(range(100, 140))


class Drafting(SimEngine):
    """An engine that says that it drafts."""

    def update(self, head: str = "") -> EngineUpdate:
        return replace(super().update(head), drafts=True)


class Sent:
    """Whoever carries drafts to engines."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []
        self.takes = True

    async def __call__(self, target: Target, texts: Sequence[Sequence[int]]) -> bool:
        self.calls.append((target.url, [tuple(text) for text in texts]))
        return self.takes


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
        await drafter.look()
        assert not sent.calls  # nobody asks this any more
        sibling = w.ask(400, prompt=PROMPT)
        await until(lambda: sibling.leg is not None)
        await drafter.look()
        ((url, texts),) = sent.calls
        assert url == "sim://a"
        assert texts[0] == (*PROMPT[-CONTEXT:], *first.transcript.tokens)
        await drafter.look()
        assert len(sent.calls) == 1  # nothing new
        await over(sibling)
        await drafter.look()
        assert sent.calls[-1][1] == []  # the group has ended


async def test_siblings_that_run_draft_from_each_other() -> None:
    async with world(Drafting("a")) as w:
        drafter, sent = drafter_of(w)
        turns = [w.ask(300, prompt=PROMPT) for _ in range(2)]
        await until(lambda: all(turn.leg is not None and turn.leg.placed > 64 for turn in turns))
        await drafter.look()
        ((_, texts),) = sent.calls
        assert len(texts) == 2
        for turn in turns:
            await over(turn)


async def test_others_questions_are_not_sent_and_engines_without_drafts_get_none() -> None:
    async with world(SimEngine("plain")) as w:
        drafter, sent = drafter_of(w)
        await over(w.ask(40, prompt=PROMPT))
        other = w.ask(400, prompt=PROMPT)
        await until(lambda: other.leg is not None)
        await drafter.look()
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
        await drafter.look()
        sent.takes = True
        await drafter.look()
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


@pytest.mark.parametrize(
    "sampling", [{"min_p": 0.1}, {"presence_penalty": 1.0}, {"min_new_tokens": 4}]
)
async def test_what_verifying_would_pass_over_is_refused(sampling: dict[str, float]) -> None:
    async with world(Drafting("a")) as w:
        with pytest.raises(UnsafeTurn, match=r"spec\.drafts"):
            w.ask(4, prompt=PROMPT, sampling=sampling)
    async with world(SimEngine("a")) as w:
        await over(w.ask(4, prompt=PROMPT, sampling=sampling))
