"""Which keys engines share, and when they are moved."""

from __future__ import annotations

import threading

import pytest

from rose_core.rollouts.engines.kv_store import PAGE_TOKENS, admits, staging_tokens, whole_pages
from rose_engines.kv.policy import CachePolicy
from rose_engines.sglang.kv_store import StoreThreads

OLD, NEW = "0" * 32, "1" * 32


def test_engines_that_attest_one_version_share_keys_whatever_each_has_committed() -> None:
    one, other = CachePolicy(), CachePolicy()
    assert one.key("turn", "run@1.1", 3, NEW) == other.key("turn", "run@1.1", 8, NEW)
    assert one.key("turn", "run@1.1", 3, NEW) != one.key("turn", "run@1.1", 3, OLD)
    assert one.shares(one.key("turn", "run@1.1", 3, NEW), "run@1.1", 3, NEW)
    assert one.key("turn", "run@1.1", 3) == "turn\nrun@1.1#3"


def test_what_runs_over_a_commit_is_not_shared_from_then_on() -> None:
    policy = CachePolicy()
    began = policy.key("turn", "run@1.0", 0, OLD)
    assert policy.shares(began, "run@1.0", 0, OLD)
    assert not policy.shares(began, "run@1.1", 1, NEW)


def test_weights_that_come_back_share_no_keys_until_the_cache_was_emptied() -> None:
    """Turns that ran over the commits between have left mixed keys under the first name."""
    policy = CachePolicy()
    began = policy.key("turn", "run@1.0", 0, OLD)
    policy.key("turn", "run@1.1", 1, NEW)
    again = policy.key("turn", "run@1.0", 2, OLD)
    assert again != began
    assert not policy.shares(began, "run@1.0", 2, OLD)
    assert not policy.shares(again, "run@1.0", 2, OLD)
    policy.forget()
    assert policy.key("turn", "run@1.0", 2, OLD) == began
    assert policy.shares(began, "run@1.0", 2, OLD)


@pytest.mark.parametrize("key", ["", "turn", "turn\nrun@1.0#0", f"turn\nrun@1.0@{OLD}x"])
def test_keys_of_unnamed_weights_are_not_shared(key: str) -> None:
    assert not CachePolicy().shares(key, "run@1.0", 0, OLD)
    assert not CachePolicy().shares("turn\nrun@1.0#0", "run@1.0", 0, "")


def test_no_page_is_moved_while_the_permit_is_closed() -> None:
    threads, opened = StoreThreads(), threading.Event()
    threads.allow(opened.is_set)
    moved: list[bool] = []
    worker = threading.Thread(target=lambda: moved.append(threads.may_move()))
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    assert not moved
    opened.set()
    worker.join(30)
    assert moved == [True]


def test_a_thread_that_is_to_end_gives_up_its_page() -> None:
    threads = StoreThreads()
    threads.allow(lambda: False)
    moved: list[bool] = []
    worker = threading.Thread(target=lambda: moved.append(threads.may_move()))
    worker.start()
    threads.leave()
    worker.join(30)
    assert moved == [False]
    threads.begin()
    threads.allow(lambda: True)
    assert threads.may_move()


@pytest.mark.parametrize(
    ("context", "kv", "tokens"),
    [(4096, 65_536, 8192), (4096, 4096, 4096), (100, 8192, 208), (1, 16, 16)],
)
def test_host_memory_of_an_engine_is_two_of_its_longest_turns(
    context: int, kv: int, tokens: int
) -> None:
    assert staging_tokens(context, kv) == tokens


def test_a_store_has_whole_pages_and_a_node_what_fits() -> None:
    assert [whole_pages(one) for one in (0, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 1)] == [
        *(0, 0, PAGE_TOKENS, 2 * PAGE_TOKENS)
    ]
    assert admits(1, 1, 2)
    assert not admits(2, 1, 2)
