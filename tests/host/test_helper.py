"""The root helper: the same engine life with and without it, and all that it refuses."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose_agent.devices.driver import DriverVersion
from rose_agent.devices.static import StaticDriver
from rose_agent.errors import DeviceError, GroupError, HostError, QueryFailed
from rose_agent.host import privilege_split
from rose_agent.host.helper.client import HelpedAccounts, HelpedKvFolders, Helper
from rose_agent.host.helper.messages import (
    CloseKeys,
    Forget,
    Move,
    OpenKeys,
    Quota,
    Reap,
    Release,
    Spawn,
    Steer,
    Take,
)
from rose_agent.host.main import HostPrivileges, NodeFacts
from rose_agent.host.options.arguments import limiter_of, limits_of, parser
from rose_agent.host.processes import process
from rose_agent.host.processes.launchers import EngineProgram
from rose_agent.host.processes.repair import forget_slot
from rose_agent.host.users import kernel_caches
from rose_agent.host.users.accounts import COUNT, Account, Accounts
from rose_agent.host.users.kv_folders import KvOwner
from rose_agent.os import freezers, processes
from rose_agent.os.freezers import Freezer
from rose_agent.os.groups import end, wait_for
from rose_agent.os.limits import Limiter
from rose_dev.waiting import wait_until
from rose_engines.node.rundir import RunDir, SlotDir, write_json
from tests.host.apart import FIRST, HOST, everybodys_python, refusal
from tests.host.left import sweep

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a root helper needs root")


@dataclass
class Hands:
    """What an engine host acts with."""

    freezer: Freezer
    limiter: Limiter
    accounts: Accounts
    forget: Callable[[SlotDir, bool], None]
    helper: Helper | None = None


def arguments(rundir: Path, python: Path, *more: str) -> list[str]:
    words = ["--rundir", str(rundir), "--models", str(rundir), "--engine-python", str(python)]
    return [*words, "--host-uid", str(HOST), "--engine-uid", str(FIRST), *more]


def begun(rundir: Path, python: Path, *more: str) -> Helper:
    return Helper(*privilege_split.begin(arguments(rundir, python, *more)))


def freezer_of(rundir: Path) -> Freezer:
    return freezers.detect("auto", scope=str(rundir.resolve()))


def direct(parsed: argparse.Namespace) -> Hands:
    freezer = freezer_of(parsed.rundir)
    accounts = Accounts(FIRST)
    accounts.open(RunDir(parsed.rundir).create())
    return Hands(freezer, limiter_of(parsed, freezer.prefix), accounts, forget_slot)


@pytest.fixture(params=["direct", "helped"])
async def hands(request: pytest.FixtureRequest, rundir: Path, python: Path) -> AsyncIterator[Hands]:
    parsed = parser().parse_args(arguments(rundir, python, "--engine-pids", "64"))
    if request.param == "direct":
        yield direct(parsed)
    else:
        helper = begun(rundir, python, "--engine-pids", "64")
        made = (
            helper.freezer(),
            helper.limiter(limits_of(parsed)),
            HelpedAccounts(helper, FIRST, kernel_caches.UNKNOWN),
        )
        yield Hands(*made, helper.forget, helper)
        helper.close()
    sweep(rundir, "auto")


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """In place of a Python: something that runs until it is ended."""
    with everybodys_python() as found:
        if reason := refusal(found):
            pytest.skip(reason)
        waiting = found.with_name("waiting")
        waiting.write_text("#!/bin/sh\nexec sleep 1000\n")
        waiting.chmod(0o755)
        yield waiting


@pytest.fixture
def helper(rundir: Path, python: Path) -> Iterator[Helper]:
    made = begun(rundir, python)
    yield made
    made.close()
    sweep(rundir, "auto")


def slot_of_host(rundir: Path, name: str = "slot-1") -> SlotDir:
    slot = RunDir(rundir).slot(name).create()
    for folder in (slot.folder, slot.bundles, slot.own):
        os.chown(folder, HOST, HOST)
    return slot


async def test_an_engines_life_is_the_same_with_and_without_a_helper(
    hands: Hands, rundir: Path, python: Path
) -> None:
    slot = slot_of_host(rundir)
    account = hands.accounts.take(slot)
    assert hands.accounts.take(slot) == account
    assert account.uid == FIRST
    assert account.home is not None
    assert account.home.stat().st_uid == slot.own.stat().st_uid == FIRST
    assert slot.folder.stat().st_mode & 0o777 == 0o710
    assert slot.bundles.stat().st_gid == FIRST
    spawned = await started(hands, slot, account, python)
    assert processes.start_ticks(spawned.root.pid) == spawned.start_ticks > 0
    assert spawned.cgroup_path.endswith("slot-1") or hands.freezer.base is None
    spawned.group.freeze()
    assert wait_for(spawned.group.is_frozen, 10.0)
    spawned.group.thaw()
    assert wait_for(lambda: not spawned.group.is_frozen(), 10.0)
    assert end(spawned.group, 20.0)
    assert await spawned.root.wait() == -9
    hands.limiter.remove("slot-1")
    hands.accounts.release(slot)
    assert not account.home.exists()
    write_json(slot.weights, {})
    hands.forget(slot, False)
    assert slot.folder.exists()
    assert not any(path.exists() for path in (slot.weights, slot.bundles, slot.own))
    hands.forget(slot, True)
    assert not slot.folder.exists()
    if hands.freezer.base is not None:
        assert not list(hands.freezer.base.glob(f"{hands.freezer.prefix}*"))


async def started(hands: Hands, slot: SlotDir, account: Account, python: Path) -> process.Spawned:
    program = EngineProgram((str(python), "-m", "rose_engines.fake"))
    inside = process.Containment(
        slot.uid,
        hands.freezer,
        slot.folder / "log",
        account,
        hands.limiter,
        spawner=hands.helper,
    )
    return await process.spawn(program, inside)


def refused(helper: Helper, request: object, log: int | None = None) -> str:
    with pytest.raises(GroupError) as error:
        helper.ask(request, log)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize("name", ["", "../slot", "/sys/fs/cgroup", "a/b", ".hidden", "a" * 200])
def test_a_name_that_could_leave_its_place_is_refused(helper: Helper, name: str) -> None:
    requests = (
        Take(name, kernel_caches.UNKNOWN),
        Steer(name, Move.KILL),
        Quota(name, True),
        Forget(name, True),
    )
    for request in (*requests, Spawn(name, (), {}), Reap(name), Release(name)):
        assert "is no name of an engine" in refused(helper, request)


def test_only_engines_are_started_and_only_with_a_user(
    helper: Helper, rundir: Path, python: Path
) -> None:
    fake = (str(python), "-m", "rose_engines.fake")
    assert "no user was taken" in refused(helper, Spawn("slot-1", fake, {}), 1)
    slot_of_host(rundir)
    helper.ask(Take("slot-1", kernel_caches.UNKNOWN))
    for argv in (
        ("/bin/sh", "-c", "id"),
        (str(python), "-c", "0"),
        (str(python), "-m", "http.server"),
        (str(python), "-m"),
        (sys.executable + "x", "-m", "rose_engines.fake"),
        (),
    ):
        assert "is no engine of this installation" in refused(helper, Spawn("slot-1", argv, {}), 1)
    assert "needs a log" in refused(helper, Spawn("slot-1", fake, {}))
    assert "cannot be started" in refused(helper, Spawn("slot-1", fake, {"a\0b": ""}), 2)


def test_nothing_but_its_own_engines_is_steered(helper: Helper, rundir: Path) -> None:
    assert "no user was taken" in refused(helper, Steer("slot-1", Move.KILL))
    assert "no user was taken" in refused(helper, Reap("slot-1"))
    slot_of_host(rundir)
    helper.ask(Take("slot-1", kernel_caches.UNKNOWN))
    assert "no engine slot-1 runs" in refused(helper, Steer("slot-1", Move.KILL))
    assert "no engine slot-1 runs" in refused(helper, Reap("slot-1"))


def test_an_engine_is_not_started_twice_nor_forgotten_while_it_runs(
    helper: Helper, rundir: Path, python: Path
) -> None:
    slot = slot_of_host(rundir)
    helper.ask(Take("slot-1", kernel_caches.UNKNOWN))
    order = Spawn("slot-1", (str(python), "-m", "rose_engines.fake"), {})
    with (slot.folder / "log").open("wb") as log:
        _, pidfd = helper.ask(order, log.fileno())
        assert pidfd is not None
        os.close(pidfd)
        assert "runs already" in refused(helper, order, log.fileno())
    assert "has not ended" in refused(helper, Release("slot-1"))


def test_links_of_a_hostile_host_are_not_followed(helper: Helper, rundir: Path) -> None:
    target = rundir / "precious"
    target.mkdir()
    (target / "bundles").mkdir()
    slot = slot_of_host(rundir)
    slot.own.rmdir()
    slot.own.symlink_to(target)
    assert refused(helper, Take("slot-1", kernel_caches.UNKNOWN))
    RunDir(rundir).slot("slot-2").folder.symlink_to(target)
    assert refused(helper, Take("slot-2", kernel_caches.UNKNOWN))
    helper.ask(Forget("slot-2", False))
    helper.ask(Forget("slot-2", True))
    helper.ask(Forget("slot-1", True))
    assert (target / "bundles").is_dir()
    assert target.stat().st_uid == 0
    (RunDir(rundir).slots / "slot-3").mkdir()
    assert "is not the engine host's" in refused(helper, Take("slot-3", kernel_caches.UNKNOWN))


def test_what_is_no_request_is_refused(helper: Helper) -> None:
    helper._connection.send(b"\xc1 what")
    assert b"refusal" in helper._connection.recv(1000)
    helper.ask(Release("slot-1"))  # it goes on


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--engine-uid", "0"), "needs --engine-uid"),
        (("--mps-root", "/mps"), "cannot be together with --mps-root"),
        (("--engine-uid", str(HOST - COUNT + 1)), "is one of the engines' users"),
        (("--engine-python", "python"), "is no absolute path"),
    ],
)
def test_it_does_not_begin_with_what_cannot_be(
    rundir: Path, python: Path, more: tuple[str, ...], why: str
) -> None:
    with pytest.raises(HostError, match=why):
        begun(rundir, python, *more)


def test_all_users_may_be_taken(helper: Helper, rundir: Path) -> None:
    for number in range(COUNT):
        slot_of_host(rundir, f"slot-{number}")
        helper.ask(Take(f"slot-{number}", kernel_caches.UNKNOWN))
    slot_of_host(rundir, "one-more")
    assert f"all {COUNT} users" in refused(helper, Take("one-more", kernel_caches.UNKNOWN))
    for number in range(COUNT):
        helper.ask(Release(f"slot-{number}"))


def test_a_word_for_what_makes_kernels_that_is_none_is_refused(
    helper: Helper, rundir: Path
) -> None:
    """It becomes the name of a folder that root makes and removes others beside."""
    slot_of_host(rundir)
    for word in ("", "../../../etc", "a" * 15, "a" * 17, "A" * 16, "a" * 15 + "/", "a" * 16 + "\n"):
        assert "does not say what makes kernels" in refused(helper, Take("slot-1", word))


class _Driver(StaticDriver):
    """A driver that says a version, or fails to."""

    reported: str | DeviceError

    def version(self) -> DriverVersion:
        if isinstance(self.reported, DeviceError):
            raise self.reported
        return DriverVersion(self.reported, (12, 8))


@pytest.mark.parametrize("how", ["direct", "helped"])
async def test_a_hosts_engines_use_the_kernels_of_its_own_image_and_driver(
    how: str, rundir: Path, python: Path
) -> None:
    """From what the engine's Python and the driver say to the folder that an engine is given."""
    image = python.with_name("image")
    parsed = parser().parse_args(arguments(rundir, image))
    slot, driver = slot_of_host(rundir), _Driver(None)
    helper = begun(rundir, python) if how == "helped" else None
    freezer = freezer_of(rundir)
    found = NodeFacts(parsed, RunDir(rundir).create(), freezer, driver, "")

    async def taken(packages: str, version: str | DeviceError) -> Path:
        """The folder of an engine whose host begins now."""
        image.write_text(f"#!/bin/sh\n{packages}\n")
        image.chmod(0o755)
        driver.reported = version
        rights = await (
            HostPrivileges.with_helper(found, helper) if helper else HostPrivileges.as_root(found)
        )
        account = rights.accounts.take(slot_of_host(rundir))
        rights.accounts.release(slot)
        assert account.kernels is not None
        assert account.kernels.is_dir()
        return account.kernels

    try:
        first = await taken("echo sglang==1", "580.1")
        root = first.parent.parent
        (first / "own.cubin").write_bytes(b"own")
        assert await taken("echo sglang==1", "580.1") == first
        for packages, version in (
            ("exit 3", "580.1"),
            ("echo sglang==1", QueryFailed("the driver did not answer")),
        ):
            assert (await taken(packages, version)).parent.name == kernel_caches.UNKNOWN
        assert (first / "own.cubin").read_bytes() == b"own", "nothing is removed by who knows not"
        for packages, version in (("echo sglang==2", "580.1"), ("echo sglang==1", "590.1")):
            other = await taken(packages, version)
            assert other.parent != first.parent
            assert not (other / "own.cubin").exists()
            assert [one.name for one in root.iterdir()] == [other.parent.name]
    finally:
        if helper is not None:
            helper.close()
        sweep(rundir, "auto")
        shutil.rmtree(
            kernel_caches.root_of(rundir / "slots", kernel_caches.UNKNOWN).parent,
            ignore_errors=True,
        )


def test_folders_of_keys_are_made_and_removed_by_root_and_entered_by_engines_alone(
    rundir: Path, python: Path
) -> None:
    place = Path("/dev/shm") / f"rose-test-helper-{os.getpid()}"
    place.mkdir()
    (place / f"{1:016x}").write_text("by an earlier host")
    helper = begun(rundir, python, "--kv-store", str(place), "--kv-store-mib", "10")
    try:
        assert not list(place.iterdir())
        folders = HelpedKvFolders(helper, place)
        found = folders.open("slot-1", KvOwner("ns/one", "uid-1"), 5 << 20).path
        assert found.parent == place
        assert found.stat().st_mode & 0o7777 == 0o2770
        assert (found.stat().st_uid, found.stat().st_gid) == (0, FIRST + COUNT)
        assert "other leases have" in refused(
            helper, OpenKeys("slot-2", "ns/two", "uid-2", 6 << 20)
        )
        assert "is no name" in refused(helper, CloseKeys("../slot-1"))
        folders.close("slot-1")
        assert not found.exists()
        wait_until(lambda: not list(place.iterdir()), "the keys are gone", seconds=30)
    finally:
        helper.close()
        sweep(rundir, "auto")
        shutil.rmtree(place)
