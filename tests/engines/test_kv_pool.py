"""Pages in the platform's pool: who can open them, and how long an engine waits for them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose_core.rollouts.engines.kv_store import KvPoolSpec, pool_secret
from rose_dev.waiting import wait_until
from rose_engines.kv.pages import PageFolder
from rose_engines.kv.pool import KvPool
from rose_engines.kv.pool_process import AT_ONCE, Mover, PoolSetup, checksum
from rose_engines.kv.seal import SEAL_BYTES, Seal

PAGE = bytes(range(256)) * 4
ONE, OTHER = pool_secret("token of a lease"), pool_secret("token of another")
SLOW = 0.01  # seconds a token: a pull may take long
LINK = 1e9


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
    assert len({ONE, OTHER, pool_secret("")}) == 3
    assert pool_secret("") == ""
    assert "token of a lease" not in ONE
    assert ONE not in repr(KvPoolSpec("m:1", secret=ONE))


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
    time.sleep(float(sys.argv[2]))
    print(json.dumps({"done": min(len(order["pages"]), int(sys.argv[3]))}), flush=True)
"""


class Asked:
    """A pool whose process writes down what it is asked, and answers after a while."""

    def __init__(self, pool: KvPool, log: Path) -> None:
        self.pool, self._log = pool, log

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def ready(self) -> None:
        wait_until(lambda: self.pool.count(["x"] * 64) > 0, "it answers", seconds=30)
        self._log.unlink()


@contextmanager
def asked(
    tmp_path: Path,
    *,
    wait: float = 0.0,
    done: int = 99,
    seconds_per_token: float = SLOW,
    may_move: Callable[[], bool] = lambda: True,
) -> Iterator[Asked]:
    log = tmp_path / "asked"
    command = [sys.executable, "-c", STUB, str(log), str(wait), str(done)]
    setup = PoolSetup("127.0.0.1:1", "tcp", ONE, str(tmp_path), 1 << 20, len(PAGE))
    pool = KvPool(command, setup, LINK, lambda: seconds_per_token, may_move)
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
        one.ready()
        assert one.pool.pull(names(20), room(20)) == 5
        assert one.lines == ["pull " + " ".join(names(8))]


def test_all_pages_are_pulled_where_all_are_there(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        one.ready()
        into = room(20)
        assert one.pool.pull(names(20), into) == 20
        assert {bytes(page) for page in into} == {bytes(range(8)) * (len(PAGE) // 8)}
        assert [len(line.split()) - 1 for line in one.lines] == [8, 8, 4]


@pytest.mark.parametrize("seconds_per_token", [0.0, 1e-9])
def test_nothing_is_asked_where_prefilling_is_as_quick_or_its_pace_is_not_known(
    tmp_path: Path, seconds_per_token: float
) -> None:
    with asked(tmp_path, seconds_per_token=seconds_per_token) as one:
        assert one.pool.count(names(64)) == 0
        assert one.pool.pull(names(64), room(64)) == 0
        assert one.lines == []


def test_nothing_is_asked_under_a_closed_permit(tmp_path: Path) -> None:
    permit = threading.Event()
    permit.set()
    with asked(tmp_path, may_move=permit.is_set) as one:
        one.ready()
        permit.clear()
        assert one.pool.count(names(64)) == 0
        assert one.pool.pull(names(64), room(64)) == 0
        one.pool.push("p0")
        assert one.lines == []


def test_a_late_answer_is_not_waited_for_and_the_pool_is_then_left_alone(tmp_path: Path) -> None:
    with asked(tmp_path) as ready:
        ready.ready()
    with asked(tmp_path, wait=3600.0) as one:
        wait_until(one.pool._look, "it has started", seconds=30)
        assert one.pool.count(names(64)) == 0  # returns, after what a prefill would take
        assert one.lines == ["count " + " ".join(names(64))]
        assert one.pool.pull(names(64), room(64)) == 0  # at once
        assert len(one.lines) == 1


def test_a_process_that_ends_costs_no_more_than_its_pages(tmp_path: Path) -> None:
    with asked(tmp_path) as one:
        one.ready()
        process = one.pool._process
        assert process is not None
        process.kill()
        process.wait()
        assert one.pool.count(names(64)) == 0
        assert one.pool.pull(names(64), room(64)) == 0
        assert one.lines == []
        one.pool._rests_until = 0.0  # it has rested
        one.ready()  # another one answers


def test_a_program_that_cannot_be_run_costs_nothing(tmp_path: Path) -> None:
    setup = PoolSetup("127.0.0.1:1", "tcp", ONE, str(tmp_path), 1 << 20, len(PAGE))
    pool = KvPool(["/nowhere/python"], setup, LINK, lambda: SLOW, lambda: True)
    assert pool.count(names(64)) == 0
    assert pool.pull(names(64), room(64)) == 0


def test_new_pages_are_written_beside_everything_else_and_not_more_than_can_wait(
    tmp_path: Path,
) -> None:
    with asked(tmp_path) as one:
        one.ready()
        for name in names(20):
            one.pool.push(name)
        wait_until(
            lambda: sum(len(line.split()) - 1 for line in one.lines) == 20, "written", seconds=30
        )
        assert {line.split()[0] for line in one.lines} == {"push"}
    for name in names(5000):  # nobody takes them any more
        one.pool.push(name)
    assert one.pool._waiting.qsize() <= 512
