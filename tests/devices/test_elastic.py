"""Elastic KV memory: what is decided, and one contract for pools under kvcached's segment."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_agent.devices.elastic import SHM, KvcachedSegment
from rose_agent.errors import QueryFailed
from rose_agent.os.groups import wait_for
from rose_core.devices.elastic import (
    ElasticLimits,
    ElasticPool,
    OrderEffect,
    Orders,
    PoolSeen,
    judge,
)

LIMITS = ElasticLimits()
POOL = ElasticPool(1000, 10)


@pytest.mark.parametrize(
    ("permille", "limit"), [(1000, 990), (999, 990), (500, 500), (505, 500), (9, 10), (0, 10)]
)
def test_a_limit_is_of_whole_bundles_and_never_one_that_kvcached_ignores(
    permille: int, limit: int
) -> None:
    assert POOL.limit(permille) == limit


def look(
    before: OrderEffect, seen: PoolSeen | None, at: float, *, running: bool = True
) -> tuple[OrderEffect, Orders]:
    return judge(before, seen, 500, at, running=running, limits=LIMITS)


def test_a_limit_that_is_not_the_wanted_one_is_written_again() -> None:
    assert look(OrderEffect(), PoolSeen(990, 100, 0), 0.0)[1] == Orders(write=500)
    assert look(OrderEffect(), PoolSeen(500, 100, 0), 0.0)[1] == Orders()


def test_an_engine_that_gives_back_is_left_alone() -> None:
    effect, orders = look(OrderEffect(), PoolSeen(500, 700, 10), 0.0)
    assert orders == Orders()
    effect, orders = look(effect, PoolSeen(500, 700, 10), 1.5)
    assert orders.flush
    effect, orders = look(effect, PoolSeen(500, 490, 10), 3.0)
    assert (effect, orders) == (OrderEffect(looked_s=3.0), Orders())


def test_spare_pages_count_as_held() -> None:
    effect, _ = look(OrderEffect(), PoolSeen(500, 495, 10), 0.0)
    effect, _ = look(effect, PoolSeen(500, 495, 10), 11.0)
    assert effect.reason == "MemoryKept"


def test_an_engine_that_keeps_its_memory_is_ended_and_one_that_is_stopped_is_not() -> None:
    kept = PoolSeen(500, 900, 0)
    effect = OrderEffect()
    for second in range(60):
        effect, orders = look(effect, kept, float(second), running=False)
        assert (effect.reason, orders) == ("", Orders())
    flushes = 0
    for second in range(60, 70):
        effect, orders = look(effect, kept, float(second))
        flushes += orders.flush
    assert (effect.reason, flushes) == ("MemoryKept", 10)
    assert "0 MiB" in effect.message


def test_a_segment_that_is_gone_is_unknown_and_after_a_while_the_end() -> None:
    effect, orders = look(OrderEffect(), None, 0.0)
    assert (effect.reason, orders) == ("", Orders())
    back, _ = look(effect, PoolSeen(500, 100, 0), 5.0)
    assert back.unknown_since_s is None
    effect, _ = look(effect, None, LIMITS.unknown_s)
    assert effect.reason == "ElasticUnavailable"


# --- the contract: whoever makes the segment


class Subject:
    """A pool in a process of its own, and its segment."""

    def __init__(self, module: str, name: str) -> None:
        self.segment = KvcachedSegment(name)
        self.path = SHM / name
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        shape = self.answer()
        self.bundle, self.bundles = shape["bundle"], shape["bundles"]

    def answer(self) -> dict[str, int]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def command(self, line: str) -> object:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.segment.forget()

    @property
    def seen(self) -> PoolSeen:
        seen = self.segment.read()
        assert seen is not None
        return seen

    def limit(self, bundles: int) -> None:
        """Order it, and let it look."""
        assert self.segment.limit(bundles * self.bundle)
        wait_for(lambda: bool(self.command("free 0")) and False, 0.3)

    def falls_to(self, bundles: int) -> bool:
        return wait_for(lambda: self.seen.held <= bundles * self.bundle, 5.0)


def real_is_here() -> bool:
    """kvcached, and a GPU to put its pool on."""
    return importlib.util.find_spec("kvcached") is not None and Path("/dev/nvidiactl").exists()


@pytest.fixture(params=["rose_engines.fake.kvcached", "bench.gpu.kvcached_pool"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "bench.gpu.kvcached_pool" and not real_is_here():
        pytest.skip("needs kvcached and a GPU; `make gpu-check` runs it on one")
    made = Subject(request.param, f"rose-test-{uuid.uuid4().hex}")
    try:
        yield made
    finally:
        made.end()


def test_the_pool_without_a_gpu_starts_without_the_engine_that_uses_it() -> None:
    program = "import sys, rose_engines.fake.kvcached as _; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert not {"aiohttp", "numpy", "rose_engines.fake.scheduler"} & set(run.stdout.split())


def test_contract_a_fresh_pool_tells_its_size_and_holds_next_to_nothing(subject: Subject) -> None:
    assert subject.seen.limit == subject.bundles * subject.bundle
    assert subject.seen.held <= 2 * subject.bundle


def test_contract_use_shows_and_what_is_freed_comes_back(subject: Subject) -> None:
    before = subject.seen.used
    assert subject.command("alloc 20")
    assert subject.seen.used == before + 20 * subject.bundle
    subject.command("free 20")
    assert wait_for(lambda: subject.seen.used == before, 5.0)


def test_contract_a_lower_limit_holds_for_what_comes_after_it(subject: Subject) -> None:
    subject.limit(10)
    assert not subject.command("alloc 30")
    assert subject.command("alloc 8")
    assert subject.falls_to(10)


def test_contract_what_is_in_use_is_not_taken_but_never_grows_and_falls_as_it_is_freed(
    subject: Subject,
) -> None:
    assert subject.command("alloc 40")
    subject.limit(10)
    assert not subject.command("alloc 1")
    assert subject.seen.used >= 40 * subject.bundle, "an order is not its effect"
    subject.command("free 35")
    assert subject.falls_to(10)


def test_contract_a_limit_grows_again_to_all_but_one_bundle(subject: Subject) -> None:
    subject.limit(10)
    assert not subject.command("alloc 30")
    subject.limit(subject.bundles - 1)
    assert subject.command("alloc 30")


def test_contract_a_limit_of_nothing_and_of_everything_changes_nothing(subject: Subject) -> None:
    subject.limit(0)
    assert subject.command("alloc 30"), "which is why it is never written"
    subject.command("free 30")
    subject.limit(10)
    assert not subject.command("alloc 30")
    subject.limit(subject.bundles)
    assert not subject.command("alloc 30"), "which is why the whole size is never written"


def test_contract_the_segment_goes_with_the_pool_and_stays_when_it_is_killed(
    subject: Subject,
) -> None:
    subject.process.kill()
    subject.process.wait()
    assert subject.segment.read() is not None
    subject.segment.forget()
    assert subject.segment.read() is None
    with pytest.raises(QueryFailed, match="No such file"):
        subject.segment.limit(5)


def test_no_lending_cycle_leaves_anything_behind(subject: Subject) -> None:
    """200 times lent, taken back and lent again: neither leak nor fragmentation."""
    first = subject.seen.held
    for _ in range(200):
        assert wait_for(lambda: bool(subject.command("alloc 40")), 5.0)
        assert subject.segment.limit(5 * subject.bundle)
        subject.command("free 40")
        assert subject.segment.limit((subject.bundles - 1) * subject.bundle)
    assert wait_for(lambda: subject.seen.held <= first, 5.0)
    assert wait_for(lambda: bool(subject.command("alloc 60")), 5.0)


# --- the driver's own manners


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.write_bytes(b"".join(n.to_bytes(8, sys.byteorder) for n in (990, 500, 10)))
    return path


def test_a_lock_that_a_frozen_engine_holds_is_not_waited_for(file: Path) -> None:
    segment = KvcachedSegment("pool", folder=file.parent)
    with file.open("r+b") as engine:
        fcntl.flock(engine, fcntl.LOCK_EX)
        assert not segment.limit(500)
        assert segment.read() == PoolSeen(990, 500, 10), "reading needs no lock"
    assert segment.limit(500)
    assert segment.read() == PoolSeen(500, 500, 10)


def test_only_the_limit_is_written(file: Path) -> None:
    before = file.read_bytes()
    assert KvcachedSegment("pool", folder=file.parent).limit(500)
    assert file.read_bytes()[8:] == before[8:]


def test_a_file_that_is_not_the_engines_own_is_no_segment(file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(file.read_bytes())
    (tmp_path / "link").symlink_to(secret)
    os.link(secret, tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "hard", "pipe"):
        segment = KvcachedSegment(name, folder=tmp_path)
        assert segment.read() is None
        with pytest.raises(QueryFailed):
            segment.limit(500)
    assert KvcachedSegment("pool", os.geteuid() + 1, tmp_path).read() is None
    assert secret.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("words", [b"", b"\0" * 24, b"\xff" * 24])
def test_what_is_no_pool_is_unknown(file: Path, words: bytes) -> None:
    file.write_bytes(words)
    assert KvcachedSegment("pool", folder=file.parent).read() is None


def test_an_engine_with_several_pools_is_unknown_because_one_would_be_steered(file: Path) -> None:
    (file.parent / "pool_g1").write_bytes(file.read_bytes())
    segment = KvcachedSegment("pool", folder=file.parent)
    assert segment.read() is None
    segment.forget()
    assert list(file.parent.iterdir()) == []
