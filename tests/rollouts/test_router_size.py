"""How large a router is: as large as its lease can use, within bounds that the platform knows."""

from __future__ import annotations

from rose_core.rollouts.capacity.router_size import (
    LEAST_MEMORY,
    MOST_BODY,
    MOST_CONNECTIONS,
    MOST_MEMORY,
    RouterSize,
    kept,
    size_of,
)
from rose_router.http.admission.memory import MemoryLimiter, held_by
from rose_router.turns.request import TurnRequest
from tests.router import test_flood


def size(
    *, context: int = 4096, turns: int = 8, waiting: int = 1024, replicas: int = 1
) -> RouterSize:
    return size_of(context_tokens=context, turns=turns, waiting=waiting, replicas=replicas)


def limiter(found: RouterSize) -> MemoryLimiter:
    return MemoryLimiter(found.memory_bytes, lambda: 0)


def test_every_router_takes_the_largest_body_while_nothing_else_is_there() -> None:
    with limiter(size(context=16, turns=1)).room_for(MOST_BODY):
        pass


def test_a_router_takes_all_turns_of_its_slots_at_full_context() -> None:
    found = size(context=8192, turns=1024)
    assert LEAST_MEMORY < found.memory_bytes < MOST_MEMORY
    memory = limiter(found)
    for number in range(1024):
        memory.take(held := held_by([TurnRequest(str(number), (7,) * 8192, {})]), held)
    assert found.connections >= 1024 + 1024


def test_a_lease_cannot_ask_for_more_than_a_router_may_have() -> None:
    found = size(context=4_194_304, turns=1024 * 1024, waiting=100_000)
    assert found == RouterSize(MOST_MEMORY, MOST_CONNECTIONS)


def test_replicas_share_the_turns_and_the_rest_carries_on_when_one_leaves() -> None:
    alone, three = size(context=8192, turns=1024), size(context=8192, turns=1024, replicas=3)
    assert three < alone
    assert size(context=8192, turns=1024, replicas=2) == alone


def test_a_step_of_the_slots_changes_no_size_and_a_router_that_runs_does_not_shrink() -> None:
    sizes = {size(context=8192, turns=8 * slots) for slots in range(120, 220)}
    assert len({one.memory_bytes for one in sizes}) == 1
    small, large = size(), size(context=32_768, turns=1024)
    assert kept(large, small) == large
    assert kept(None, small) == small


def test_floods_are_survived_with_less_than_any_router_has() -> None:
    assert test_flood.LIMIT <= LEAST_MEMORY
