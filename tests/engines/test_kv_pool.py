"""Pages in the platform's pool: who can open them, and how long an engine waits for them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rose_engines.kv.pool
from rose_core.rollouts.engines.kv_store import (
    PAGE_TOKENS,
    SETUP_SECONDS,
    pool_secret,
)
from rose_dev.waiting import wait_until
from rose_engines.kv.pages import PageFolder
from rose_engines.kv.pool import (
    GRACE_SECONDS,
    REST_SECONDS,
    WAITING,
    WRITTEN_AT_ONCE,
    KvPool,
    PoolTurn,
)
from rose_engines.kv.pool_process import AT_ONCE, Mover, PoolSetup, checksum
from rose_engines.kv.seal import SEAL_BYTES, Seal
from rose_engines.sglang.kv_store import PrefillRate
from rose_engines.weights.calls import JoinPool

PAGE = bytes(range(256)) * 4
ONE, OTHER = pool_secret("token of a lease", "uid-1"), pool_secret("token of another", "uid-2")
SLOW = 0.01  # seconds a token: a pull may take long
QUICK = 1e-6  # seconds a page


class Memory:
    """What Mooncake's client does, in one process: objects by name, moved by address."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.lost = False

    def register_buffer(self, at: int, size: int) -> int:
        return 0 if at and size else -1

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [-900 if self.lost else int(name in self.held) for name in names]

    def batch_get_into(self, names: list[str], at: list[int], sizes: list[int]) -> list[int]:
        found = []
        for name, place, size in zip(names, at, sizes, strict=True):
            held = self.held.get(name, b"")
            if held and len(held) <= size:
                ctypes.memmove(place, held, len(held))
            found.append(-900 if self.lost else len(held) or -704)
        return found

    def batch_put_from(self, names: list[str], at: list[int], sizes: list[int]) -> list[int]:
        for name, place, size in zip(names, at, sizes, strict=True):
            self.held.setdefault(name, ctypes.string_at(place, size))
        return [-900 if self.lost else 0] * len(names)

    def remove(self, name: str) -> int:
        return 0 if self.held.pop(name, b"") else -704


def folder(path: Path) -> PageFolder:
    path.mkdir(exist_ok=True)
    return PageFolder(path, 1 << 20, checksum)


def mover(memory: Memory, path: Path, secret: str = ONE) -> tuple[Mover, memoryview]:
    """And where it puts what it pulls."""
    into = memoryview(bytearray(AT_ONCE * len(PAGE)))
    return Mover(memory, folder(path), Seal(secret), len(PAGE), into), into


def test_a_page_is_opened_by_its_lease_alone_and_under_its_own_name() -> None:
    sealed, into = memoryview(bytearray(len(PAGE) + SEAL_BYTES)), memoryview(bytearray(len(PAGE)))
    seal = Seal(ONE)
    seal.close("page", memoryview(PAGE), sealed)
    assert Seal(ONE).open("page", sealed, into)
    assert bytes(into) == PAGE
    assert PAGE[:64] not in bytes(sealed)
    assert not Seal(ONE).open("another", sealed, into)
    assert not Seal(OTHER).open("page", sealed, into)
    assert Seal(OTHER).name("page") != seal.name("page") != seal.name("another")
    for place in (0, SEAL_BYTES, len(sealed) - 1):
        sealed[place] ^= 1
        assert not seal.open("page", sealed, into)
        sealed[place] ^= 1
    with pytest.raises(ValueError, match="secret"):
        Seal("")


def test_a_lease_has_a_secret_where_its_router_has_a_token() -> None:
    anew = pool_secret("token of a lease", "uid-2")  # a later one of its name
    assert len({ONE, OTHER, anew, ""}) == 4
    assert pool_secret("", "uid-1") == pool_secret("token of a lease", "") == ""
    assert "token of a lease" not in ONE
    assert ONE not in repr(JoinPool(ONE))


def test_pages_go_from_one_node_to_another(tmp_path: Path) -> None:
    memory = Memory()
    (here, _), (there, into) = mover(memory, tmp_path / "here"), mover(memory, tmp_path / "there")
    for name, content in (("a", PAGE), ("b", PAGE[::-1])):
        assert folder(tmp_path / "here").put(name, memoryview(content))
    assert here.push(["a", "b", "gone"]) == 2
    assert there.count(["a", "b", "c"]) == 2
    assert there.pull(["a", "b", "c"]) == 2
    assert bytes(into[: 2 * len(PAGE)]) == PAGE + PAGE[::-1]


def test_another_leases_pages_are_not_found_and_what_was_changed_does_not_come(
    tmp_path: Path,
) -> None:
    memory = Memory()
    (here, _), (there, _) = mover(memory, tmp_path / "here"), mover(memory, tmp_path / "there")
    for name in ("a", "b"):
        folder(tmp_path / "here").put(name, memoryview(PAGE))
    here.push(["a", "b"])
    stranger, _ = mover(memory, tmp_path / "stranger", OTHER)
    assert (stranger.count(["a"]), stranger.pull(["a"])) == (0, 0)
    first, second = memory.held
    memory.held[first] = memory.held[second]  # another page's bytes, well sealed
    assert there.pull(["a", "b"]) == 0
    assert first not in memory.held
    memory.held[second] = memory.held[second][:-1]
    assert there.pull(["b"]) == 0


def test_a_client_of_a_lost_store_gives_up_so_that_another_joins_what_comes_back(
    tmp_path: Path,
) -> None:
    memory = Memory()
    (one, _) = mover(memory, tmp_path / "one")
    folder(tmp_path / "one").put("a", memoryview(PAGE))
    memory.lost = True
    for move in (one.count, one.pull, one.push):
        with pytest.raises(OSError, match="does not answer"):
            move(["a"])


STUB = """
import json, os, sys, time
setup = json.loads(sys.stdin.readline())
os.pwrite(setup["shared"], bytes(range(8)) * setup["page_bytes"], 0)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with open(sys.argv[1], "a") as log:
        print(order["do"], *order["pages"], file=log)
    waits = json.loads(sys.argv[2])
    time.sleep(waits.get(order["do"], 0))
    print(json.dumps({"done": min(len(order["pages"]), int(sys.argv[3]))}), flush=True)
"""
FOR_EVER = 3600.0


class Asked:
    """A pool whose process writes down what it is asked, and answers after a while."""

    def __init__(self, pool: KvPool, log: Path) -> None:
        self.pool, self._log = pool, log
        wait_until(self._joined, "it has joined", seconds=30)

    def _joined(self) -> bool:
        with self.pool._lock:
            return self.pool._look()

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    @property
    def written(self) -> int:
        return sum(len(line.split()) - 1 for line in self.lines if line.startswith("push"))

    @property
    def page_seconds(self) -> float:
        return self.pool._pace.cost.seconds_per_page

    def process(self) -> int:
        assert self.pool._process is not None
        return self.pool._process.pid

    def turn(self, pages: int = 64, *, ago: float = 0.0) -> PoolTurn:
        return self.pool.begin(pages, time.monotonic() - ago)

    def count(self, pages: int = 64) -> int:
        return self.pool.count(self.turn(pages), names(pages))

    def pull(self, pages: int = 64, turn: PoolTurn | None = None) -> int:
        turn = turn or self.turn(pages)
        try:
            return self.pool.pull(turn, names(pages), room(pages))
        finally:
            self.pool.finish(turn)


@contextmanager
def asked(
    tmp_path: Path,
    *,
    waits: dict[str, float] | None = None,
    done: int = 99,
    seconds_per_token: float = SLOW,
    seconds_per_page: float = QUICK,
    may_move: Callable[[], bool] = lambda: True,
    leaving: Callable[[], bool] = lambda: False,
) -> Iterator[Asked]:
    log = tmp_path / "asked"
    command = [sys.executable, "-c", STUB, str(log), json.dumps(waits or {}), str(done)]
    setup = PoolSetup("127.0.0.1:1", "tcp", ONE, str(tmp_path), 1 << 20, len(PAGE))
    pool = KvPool(command, setup, lambda: seconds_per_token, may_move=may_move, leaving=leaving)
    if seconds_per_page:
        pool._pace.note(seconds_per_page, 1)  # no second length: the set-up is the assumed one
        pool._measured = time.monotonic()
    try:
        yield Asked(pool, log)
    finally:
        pool.close()


def names(count: int) -> list[str]:
    return [f"p{place}" for place in range(count)]


def room(count: int) -> list[memoryview]:
    return [memoryview(bytearray(len(PAGE))) for _ in range(count)]


def test_pages_are_pulled_a_few_at_a_time_up_to_the_first_that_is_not_there(
    tmp_path: Path,
) -> None:
    with asked(tmp_path, done=5) as one:
        assert one.pull(20) == 5
        assert one.lines == ["pull " + " ".join(names(8))]


def test_all_pages_are_pulled_where_all_are_there(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        into = room(20)
        assert one.pool.pull(one.turn(20), names(20), into) == 20
        assert {bytes(page) for page in into} == {bytes(range(8)) * (len(PAGE) // 8)}
        assert [len(line.split()) - 1 for line in one.lines] == [8, 8, 4]


def test_what_is_pulled_is_decided_for_a_whole_turn_however_many_pages_are_asked_for_at_once(
    tmp_path: Path,
) -> None:
    """256 tokens are no gain here, and 2,048 of the same turn are."""
    a_token = 1.2 * SETUP_SECONDS / (8 * 16 * PAGE_TOKENS)
    with asked(tmp_path, seconds_per_token=a_token) as one:
        alone = one.turn(16)
        assert one.pool.count(alone, names(16)) == 0
        assert not one.pool.pulls(alone)
        turn = one.pool.begin(8 * 16, time.monotonic() + 60)  # on a machine of any speed
        assert [one.pool.count(turn, names(16)) for _ in range(8)] == [16] * 8
        assert one.pool.pulls(turn)
        assert turn.until - turn.asked == pytest.approx(1.2 * SETUP_SECONDS)
        few = one.pool.begin(8 * 16, time.monotonic() + 60)
        assert one.pool.count(few, names(16)) == 16
        assert not one.pool.pulls(few)  # the pool has no more of it


@pytest.mark.parametrize("seconds_per_token", [0.0, 1e-9])
def test_nothing_is_asked_where_prefilling_is_as_quick_or_its_pace_is_not_known(
    tmp_path: Path, seconds_per_token: float
) -> None:
    with asked(tmp_path, seconds_per_token=seconds_per_token) as one:
        assert (one.count(), one.pull(), one.lines) == (0, 0, [])


def test_a_turn_that_has_waited_behind_others_waits_no_longer_for_its_own(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        late = one.turn(64, ago=64 * PAGE_TOKENS * SLOW + 1)
        assert one.pool.count(late, names(64)) == 0
        assert (one.pull(64, late), one.lines) == (0, [])
        assert one.pull(64, one.turn(64, ago=1.0)) == 64


def test_nothing_is_asked_under_a_closed_permit(tmp_path: Path) -> None:
    permit = threading.Event()
    with asked(tmp_path, may_move=permit.is_set) as one:
        one.pool.push("p0")
        assert (one.count(), one.pull(), one.lines) == (0, 0, [])


def test_a_slow_process_is_left_at_the_end_of_patience_and_goes_on_living(tmp_path: Path) -> None:
    with asked(tmp_path, waits={"pull": 0.5}, seconds_per_token=1.2 / 64 / PAGE_TOKENS) as one:
        before = one.process()
        assert 0 < one.pull(64) < 64
        wait_until(lambda: one.pull(8, one.turn(64)) == 8, "it is asked again", seconds=30)
        assert one.process() == before


def test_a_process_that_owes_an_answer_for_long_is_ended_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asked(tmp_path, waits={"count": FOR_EVER}) as one:
        turn = one.pool.begin(64, time.monotonic() - 64 * PAGE_TOKENS * SLOW + 0.2)
        assert one.pool.count(turn, names(64)) == 0
        assert one.process()
        one.pool._owes = time.monotonic() - GRACE_SECONDS - 1
        assert one.pull() == 0
        assert one.pool._process is None
        assert "left alone for 10 s: no answer for 2 s" in caplog.text
        assert (one.count(), len(one.lines)) == (0, 1)


def test_whoever_waits_gives_up_at_once_when_the_store_is_to_give_way(tmp_path: Path) -> None:
    leaving = threading.Event()
    with asked(tmp_path, waits={"pull": FOR_EVER}, leaving=leaving.is_set) as one:
        pulled: list[int] = []
        waiting = [threading.Thread(target=lambda: pulled.append(one.pull(4096))) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: bool(one.lines), "one has asked", seconds=30)
        leaving.set()
        for thread in waiting:
            thread.join(10)  # SGLang's engine thread gives each as long
        assert pulled == [0, 0]


def test_a_process_that_ends_costs_no_more_than_its_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asked(tmp_path) as one:
        for rest in (10, 20):  # twice as long, since none has answered meanwhile
            process = one.pool._process
            assert process is not None
            process.kill()
            process.wait()
            assert (one.count(), one.pull(), one.lines) == (0, 0, [])
            assert f"left alone for {rest} s: its process has ended" in caplog.text
            assert not one.pool.counts().joined
            assert one.pool.counts().failures == rest // 10
            one.pool._rests_until = 0.0  # it has rested
            wait_until(one._joined, "another has joined", seconds=30)
        assert one.count() == 64
        assert one.pool._rest_seconds == REST_SECONDS


def test_an_engine_with_nothing_to_ask_joins_again_under_an_open_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rose_engines.kv.pool, "_IDLE_SECONDS", 0.01)
    permit = threading.Event()
    permit.set()
    with asked(tmp_path, may_move=permit.is_set) as one:
        os.kill(one.process(), signal.SIGKILL)
        wait_until(lambda: not one.pool.counts().joined, "it is found out", seconds=30)
        permit.clear()
        one.pool._rests_until = 0.0  # it has rested
        time.sleep(0.2)
        assert one.pool._process is None
        permit.set()
        wait_until(lambda: one.pool.counts().joined, "it has joined again", seconds=30)


def test_a_program_that_cannot_be_run_costs_nothing(tmp_path: Path) -> None:
    setup = PoolSetup("127.0.0.1:1", "tcp", ONE, str(tmp_path), 1 << 20, len(PAGE))
    pool = KvPool(["/nowhere/python"], setup, lambda: SLOW, may_move=lambda: True)
    assert pool.count(pool.begin(64, time.monotonic()), names(64)) == 0
    pool.close()


def test_new_pages_are_written_a_few_at_a_time_while_no_turn_asks(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        with one.pool._turn_asks():
            for name in names(20):
                one.pool.push(name)
            assert one.pull(16) == 16
            assert one.written == 0
        wait_until(lambda: one.written == 20, "they are written", seconds=30)
        assert max(len(line.split()) - 1 for line in one.lines if line.startswith("push")) == 2
        with one.pool._turn_asks():
            for name in names(5000):
                one.pool.push(name)
            # The writer has taken an order's worth already, or has not.
            assert WAITING - one.pool._waiting.qsize() in range(WRITTEN_AT_ONCE + 1)


def test_what_pulls_take_is_learned_from_pages_that_are_read_back(tmp_path: Path) -> None:
    with asked(tmp_path, seconds_per_page=0.0) as one:
        assert (one.count(), one.pull(), one.lines) == (0, 0, [])  # nothing is known of the pool
        one.pool.push("p0")
        wait_until(
            lambda: one.pool._pace.cost.seconds_per_page > 0, "a pull is measured", seconds=30
        )
        # The first one also connects.
        assert one.lines == ["push p0", *["count p0", "pull p0"] * 2]
        assert one.count() == 64
        one.pool.push("p1")
        written = 2 * len(PAGE)
        wait_until(lambda: one.pool.counts().written_bytes == written, "it is", seconds=30)
        assert one.lines[-1] == "push p1", "what is known is not old yet"
        counts = one.pool.counts()
        assert (counts.joined, counts.failures, counts.late_orders) == (True, 0, 0)
        assert counts.pulled_bytes == 2 * len(PAGE)
        assert counts.pull_seconds > 0


def test_two_lengths_are_read_back_which_tell_the_set_up_from_the_pages(tmp_path: Path) -> None:
    with asked(tmp_path, waits={"count": 0.3}, seconds_per_page=0.0) as one:
        one.pool._measured = time.monotonic()  # nothing is read back yet
        for name in names(20):
            one.pool.push(name)
        wait_until(lambda: one.written == 20, "they are written", seconds=30)
        one.pool._is_connected, one.pool._measured = True, None
        one.pool.push("p20")
        wait_until(lambda: one.pool._pace.cost.setup_seconds > 0.2, "it is told", seconds=30)
        read = [line.split()[1:] for line in one.lines if line.startswith("pull")]
        assert [len(pages) for pages in read] == [1, 8, 8, 5]
        assert [name for pages in read[1:] for name in pages] == names(21)


def test_a_pool_that_is_well_again_is_believed_at_the_first_measure(tmp_path: Path) -> None:
    slow = 100.0
    with asked(tmp_path, seconds_per_page=slow) as one:
        assert one.pull() == 0
        one.pool._measured = None
        one.pool.push("p0")
        wait_until(
            lambda: one.pool._pace.cost.seconds_per_page < slow / 10, "it is measured", seconds=30
        )
        assert one.count() == 64


def test_a_pull_that_nobody_waited_for_says_that_pulls_are_slow(tmp_path: Path) -> None:
    with asked(tmp_path, waits={"pull": FOR_EVER}, seconds_per_token=0.5 / 64 / 16) as one:
        before = one.page_seconds
        assert one.pull(64) == 0
        assert one.page_seconds > before
        assert one.pool.counts().late_orders == 1


def test_a_pool_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        shared = one.pool._setup.shared
        one.pool.close()
        assert (one.count(), one.pull()) == (0, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(shared)
        wait_until(
            lambda: "rose-kv-pool" not in {one.name for one in threading.enumerate()},
            "its thread has ended",
            seconds=30,
        )


def test_a_prefill_is_what_iterations_that_fill_half_a_chunk_take() -> None:
    rate = PrefillRate()
    assert rate.seconds_per_token == 0
    for tokens in (20, 255):  # an iteration's own time is most of it
        rate.begin(0.0)
        rate.end(0.015, tokens, 512)
    assert rate.seconds_per_token == 0
    rate.begin(1.0)
    rate.end(1.5, 500, 512)
    assert rate.seconds_per_token == pytest.approx(0.001)
    rate.begin(2.0)
    rate.end(902.0, 500, 512)  # it was frozen for a quarter of an hour
    assert rate.seconds_per_token < 0.004
    for at in range(100):
        rate.begin(float(at))
        rate.end(at + 1.0, 500, 512)
    assert rate.seconds_per_token == pytest.approx(0.002, rel=0.01)
