"""Requests take a part of a router's memory, and are refused before they take more."""

from __future__ import annotations

import contextlib

import pytest

from rose_core.rollouts.capacity.router_size import MIB
from rose_router.errors import Overloaded, TooLarge
from rose_router.http.admission.memory import MemoryLimiter, held_by
from rose_router.turns.request import TurnRequest

LIMIT = 1024 * MIB


def empty() -> MemoryLimiter:
    return MemoryLimiter(LIMIT, lambda: 0)


def turns(count: int, tokens: int) -> list[TurnRequest]:
    prompt = (7,) * tokens
    return [TurnRequest(str(number), prompt, {}) for number in range(count)]


def test_a_request_that_never_fits_is_too_large() -> None:
    with pytest.raises(TooLarge, match="MiB of this router's memory"), empty().room_for(64 * MIB):
        pass


def test_a_request_that_does_not_fit_beside_others_is_told_to_come_again() -> None:
    memory = empty()
    with memory.room_for(16 * MIB):
        with pytest.raises(Overloaded) as refused, memory.room_for(16 * MIB):
            pass
        assert refused.value.retry_after > 0
    with memory.room_for(16 * MIB):
        pass
    assert memory.taken == 0


def test_large_requests_that_are_still_coming_leave_room_for_small_ones() -> None:
    memory = empty()
    with contextlib.ExitStack() as coming:
        for _ in range(4):
            coming.enter_context(memory.room_for(4 * MIB))
        with pytest.raises(Overloaded):
            coming.enter_context(memory.room_for(4 * MIB))
        for _ in range(100):
            coming.enter_context(memory.room_for(10_000))


def test_a_refused_request_gives_back_what_it_held() -> None:
    memory = empty()
    with pytest.raises(TooLarge), memory.room_for(MIB) as room:
        room.resize(LIMIT)
    assert memory.taken == 0


def test_a_process_that_is_nearly_full_takes_no_request_whatever_was_counted() -> None:
    with pytest.raises(Overloaded), MemoryLimiter(LIMIT, lambda: 900 * MIB).room_for(1):
        pass


def test_answers_to_one_prompt_hold_its_ids_once() -> None:
    one, many = held_by(turns(1, 100_000)), held_by(turns(8, 100_000))
    assert many < 8 * one / 2


def test_n_is_bounded_by_the_tokens_that_each_answer_sends() -> None:
    with empty().room_for(MIB) as room:
        room.resize(held_by(turns(64, 16_384)))
        with pytest.raises(TooLarge):
            room.resize(held_by(turns(4096, 1_000_000)))
