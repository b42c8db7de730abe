"""Folders of leases' keys: whose they are, how much they hold, when they go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rose_agent.errors import BadEngine, BadInput, NoMemory
from rose_agent.host import main
from rose_agent.host.options import inputs
from rose_agent.host.options.arguments import kv_pool_of, parser
from rose_agent.host.processes import exec_engine
from rose_agent.host.slots.engine_host import EngineHost
from rose_agent.host.slots.engine_process import EngineProcess
from rose_agent.host.slots.site import Site
from rose_agent.host.users import kv_folders
from rose_agent.host.users.accounts import COUNT
from rose_agent.host.users.kv_folders import KvFolders, KvOwner
from rose_agent.os.freezers import Freezer
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.host import EngineState, EnsureEngine, HostStatusRequest, StopEngine
from rose_dev.waiting import until, wait_until
from tests.host import apart
from tests.host.helpers import guarding, order

FIRST = 61000
MIB = 1 << 20
SECRET = "the secret of the lease"
SHM = Path("/dev/shm")  # a tmpfs that is there

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def place() -> Iterator[Path]:
    path = SHM / f"rose-test-{os.getpid()}"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def folders(path: Path, room: int = 100) -> KvFolders:
    return KvFolders(path, room * MIB, FIRST)


def lease(name: str, uid: str = "") -> KvOwner:
    return KvOwner(name, uid or f"uid of {name}")


def read_of(pid: int) -> bytes:
    """What any process of its user reads of another."""
    return b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for what in ("environ", "cmdline"))


def as_engine(uid: int, group: int, program: str) -> bool:
    """Whether a program succeeds as an engine of this user."""
    line = [sys.executable, "-I", "-S", exec_engine.__file__, f"--uid={uid}", f"--group={group}"]
    done = subprocess.run([*line, "--", "/bin/sh", "-c", program], check=False)
    return done.returncode == 0


@root
def test_engines_of_a_lease_share_its_folder_and_no_others_enter(place: Path) -> None:
    kept = folders(place)
    kept.sweep()
    one = kept.open("slot-1", lease("ns/one"), MIB)
    assert kept.open("slot-2", lease("ns/one"), MIB) == one
    other = kept.open("slot-3", lease("ns/other"), MIB)
    assert kept.group_of("slot-2") == one.group != other.group >= FIRST + COUNT
    assert kept.group_of("nobody") == 0
    assert as_engine(FIRST, one.group, f"umask 007; echo page > {one.path}/page")
    assert as_engine(FIRST + 1, one.group, f"cat {one.path}/page && rm {one.path}/page")
    assert as_engine(FIRST, one.group, f"echo page > {one.path}/page")
    assert not as_engine(FIRST + 2, other.group, f"cat {one.path}/page 2>&-")
    assert not as_engine(FIRST + 2, other.group, f"ls {one.path} 2>&-")
    assert not as_engine(FIRST + 2, other.group, f"ls {place} 2>&-")


@root
def test_a_folder_goes_with_the_last_slot_of_its_lease(place: Path) -> None:
    kept = folders(place)
    one = kept.open("slot-1", lease("ns/one"), MIB)
    kept.open("slot-2", lease("ns/one"), MIB)
    (one.path / "page").write_bytes(b"keys")
    kept.close("slot-1")
    assert (one.path / "page").exists()
    kept.close("slot-2")
    assert not one.path.exists()
    kept.close("slot-2")
    assert kept.group_of("slot-1") == 0


@root
def test_a_lease_that_is_made_anew_under_its_name_finds_no_key_of_the_first(place: Path) -> None:
    kept = folders(place)
    first = kept.open("slot-1", lease("ns/one", "uid-1"), MIB)
    (first.path / "page").write_bytes(b"keys")
    second = kept.open("slot-2", lease("ns/one", "uid-2"), MIB)  # the first's slot is still there
    assert not list(second.path.iterdir())
    assert not as_engine(FIRST, second.group, f"cat {first.path}/page 2>&-")
    kept.close("slot-1")
    assert second.path.exists()
    third, fourth = (kept.open(f"slot-{n}", KvOwner("ns/one", ""), MIB) for n in (3, 4))
    assert len({one.path for one in (second, third, fourth)}) == 3, "of an unknown lease each"


@root
def test_whoever_ends_a_slot_does_not_wait_until_its_pages_are_freed(place: Path) -> None:
    freed = threading.Event()
    gone: list[Path] = []

    def slow(path: Path) -> None:
        gone.append(path)
        freed.wait(60)

    kept = KvFolders(place, 100 * MIB, FIRST, remove=slow)
    one = kept.open("slot-1", lease("ns/one"), 60 * MIB)
    (one.path / "page").write_bytes(b"keys")
    kept.close("slot-1")  # returns
    assert not freed.is_set()
    again = kept.open("slot-2", lease("ns/one"), 60 * MIB)
    assert again.path == one.path
    assert not list(again.path.iterdir())
    wait_until(lambda: bool(gone), "it is being removed", seconds=30)
    freed.set()
    folders(place).sweep()  # as after a host that was killed meanwhile
    assert not list(place.iterdir())


@root
def test_what_a_killed_host_has_left_is_swept_by_the_next(place: Path) -> None:
    left = folders(place).open("slot-1", lease("ns/one"), MIB)
    (left.path / "page").write_bytes(b"keys")
    folders(place).sweep()
    assert not list(place.iterdir())


@root
def test_leases_get_no_more_together_than_the_node_has(place: Path) -> None:
    kept = folders(place, 100)
    kept.open("slot-1", lease("ns/one"), 60 * MIB)
    with pytest.raises(NoMemory, match="lower kvStoreGiB"):
        kept.open("slot-2", lease("ns/other"), 60 * MIB)
    kept.open("slot-3", lease("ns/one"), 10 * MIB)
    with pytest.raises(NoMemory):  # the first engine still keeps as much as it was started with
        kept.open("slot-2", lease("ns/other"), 60 * MIB)
    kept.close("slot-1")
    kept.close("slot-3")
    kept.open("slot-2", lease("ns/other"), 60 * MIB)


@pytest.mark.parametrize(
    ("host", "name", "says"),
    [
        (KvFolders(), "ns/one", "--kv-store DIR"),
        (KvFolders(SHM, 100 * MIB, 0), "ns/one", "--engine-uid"),
        (KvFolders(SHM, 1 * MIB, FIRST), "ns/one", "engineHost.kvStoreGibibytes"),
        (KvFolders(SHM, 100 * MIB, FIRST, 2 * MIB), "ns/one", "--engine-memory-mib"),
        (KvFolders(SHM, 100 * MIB, FIRST), "", "no lease"),
    ],
)
def test_a_host_without_room_for_keys_says_what_to_change(
    host: KvFolders, name: str, says: str
) -> None:
    with pytest.raises(BadEngine, match=says) as refused:
        host.open("slot-1", lease(name), 2 * MIB)
    assert "kvStoreGiB: 0" in str(refused.value)


def test_a_folder_that_is_gone_costs_no_other_metric(tmp_path: Path) -> None:
    assert KvFolders(tmp_path, MIB, FIRST).used() > 0
    assert KvFolders(tmp_path / "gone", MIB, FIRST).used() == 0


def test_a_place_that_is_no_tmpfs_or_too_small_is_refused_at_the_start(place: Path) -> None:
    kv_folders.check(None, 0, 0)
    kv_folders.check(place, MIB, 0)
    for wrong, room, shm, says in (
        (place, 0, 0, "go together"),
        (None, MIB, 0, "go together"),
        (place / "not-there", MIB, 0, "tmpfs"),
        (Path("/proc"), MIB, 0, "tmpfs"),
        (place, 1 << 60, 0, "larger"),
        (place, MIB, MIB, "/dev/shm"),
        (SHM, MIB, 0, "a folder of its own"),
    ):
        with pytest.raises(BadInput, match=says):
            kv_folders.check(wrong, room, shm)


@root
def test_nobody_elses_files_are_swept(place: Path) -> None:
    (place / "rank-0").write_bytes(b"shared memory of somebody")
    with pytest.raises(BadInput, match="a folder of its own"):
        kv_folders.check(place, MIB, 0)
    folders(place).sweep()
    assert (place / "rank-0").exists()


@root
async def test_an_engine_has_its_leases_folder_and_the_end_of_its_slot_empties_it(
    place: Path, rundir: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = order("slot-1")
    engine = replace(made.engine, kv_store_bytes=MIB)
    with apart.everybodys_python() as python:
        if reason := apart.refusal(python):
            pytest.skip(reason)
        shutil.copytree(models, python.parent / "models").chmod(0o755)  # for every user
        for file in (python.parent / "models").rglob("*.safetensors"):
            file.chmod(0o644)
        words = ["--rundir", str(rundir), "--models", str(python.parent / "models")]
        words += ["--engine-python", str(python), "--data-port", "0", "--http-port", "0"]
        words += ["--kv-store", str(place), "--kv-store-mib", "10", "--engine-uid", str(FIRST)]
        words += ["--kv-pool", "127.0.0.1:1"]
        freezer = Freezer("signals", "for the test", prefix=f"rose-{rundir.name}-")
        running = await main.start(parser().parse_args(words), freezer)
        host = running.host
        try:
            await host.ensure(replace(made, engine=engine, lease="ns/one", kv_secret=SECRET))
            with guarding(rundir):
                await until(lambda: groups_of(host) == [group_of(place)])
                # It is told the secret by its control socket, and by nothing that others read.
                await until(lambda: "joins no pool of keys: this engine keeps no" in caplog.text)
                (status,) = (await host.status(HostStatusRequest())).engines
                assert status.pids
                told = [read_of(pid) for pid in status.pids]
                assert any(b"ROSE_" in one for one in told)
                assert not [one for one in told if SECRET.encode() in one]
            await host.stop(StopEngine(made.slot, "test"))
            await until(lambda: not content(place))

            await host.ensure(replace(order("slot-2"), engine=engine))
            await until(lambda: found(host, EngineState.FAILED, "no lease"))
        finally:
            await running.stop(0.0)


POOL = ["--kv-store", "/keys", "--kv-store-mib", "10", "--kv-pool", "m:50051"]


def test_an_engine_is_told_of_the_pool_where_its_lease_has_a_secret(rundir: Path) -> None:
    words = ["--rundir", str(rundir), "--engine-python", "/e/python"]
    assert kv_pool_of(parser().parse_args(words)) is None
    pool = kv_pool_of(parser().parse_args([*words, *POOL]))
    assert pool == KvPoolSpec("m:50051", "tcp", "/e/python")
    made = replace(order("slot-1"), kv_secret="of the lease")
    keeping = replace(made, engine=replace(made.engine, kv_store_bytes=MIB))
    assert pool_of(keeping, pool) == pool
    assert pool_of(made, pool) is None
    assert pool_of(keeping, None) is None
    assert pool_of(replace(keeping, kv_secret=""), pool) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv-pool", "m:50051"], "--kv-pool needs --kv-store"),
        ([*POOL[:-1], "nowhere"], "is no HOST:PORT"),
        ([*POOL[:-1], "[::1]:50051"], "IPv4"),
        ([*POOL[:-1], "tls://m:50051"], "without a scheme"),
        ([*POOL, "--kv-pool-python", "/nowhere/python"], "cannot be run"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_at_the_start(
    rundir: Path, models: Path, place: Path, words: list[str], says: str
) -> None:
    given = ["--rundir", str(rundir), "--models", str(models), "--engine-python", sys.executable]
    words = [str(place) if word == "/keys" else word for word in words]
    with pytest.raises(BadInput, match=says):
        inputs.check(parser().parse_args([*given, *words]))


def pool_of(made: EnsureEngine, pool: KvPoolSpec | None) -> KvPoolSpec | None:
    """What the engine of an order is told."""
    site = cast("Site", SimpleNamespace(kv_pool=pool))
    nobody = cast("Any", None)
    return EngineProcess(made, nobody, site, nobody, nobody).pool()


def found(host: EngineHost, state: EngineState, says: str) -> bool:
    """Whether the only engine stands there, and says so."""
    (engine,) = host.engines()
    return engine.state is state and says in engine.status("").message


def content(place: Path) -> list[Path]:
    return list(place.iterdir())


def group_of(place: Path) -> int:
    """Of the only folder there, as soon as there is one."""
    return next((folder.stat().st_gid for folder in content(place)), 0)


def groups_of(host: EngineHost) -> list[int]:
    """Those that the only engine is in beside its own."""
    for pid in host.engines()[0].status("").pids:
        status = Path(f"/proc/{pid}/status").read_text()
        return [int(group) for group in status.split("Groups:")[1].split("\n")[0].split()]
    return []
