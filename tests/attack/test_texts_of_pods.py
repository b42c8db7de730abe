"""What a serving pod's owner has written, read by the guard itself: names in /proc, annotations.

The other replicas' owners must not notice, whatever it is.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_agent.devices.owners import Owner, command_of, owner_of
from rose_agent.os.processes import shared_memory, start_ticks
from rose_agent.pods import processes
from rose_agent.pods.claims import GPU_ANNOTATION, WrittenClaims
from rose_agent.pods.kubernetes import (
    FEED_ANNOTATION,
    GROUP_SIZE_ANNOTATION,
    Access,
    KubernetesPods,
)
from rose_agent.pods.model import ServingPod
from rose_agent.pods.processes import MOST_DESCRIBED, Processes, inner_pid
from rose_core.identity import GpuUuid, PodUid
from rose_core.wire.sync import PoolPolicy

pytestmark = pytest.mark.timeout(60)
HOSTILE = Path(__file__).with_name("hostile.py")
POLICY = PoolPolicy("evil/pool", "Lend", {"app": "llm"}, 30000)
EVIL, GOOD = PodUid("53099174-d551-433b-9350-adf44bee898e"), PodUid("0" * 8 + "-good")
SHM = Path("/dev/shm")


@pytest.fixture
def misnamed() -> Iterator[int]:
    """A process that has named itself and a mapping to be misread."""
    process = subprocess.Popen([sys.executable, HOSTILE, "names", "0"], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()
    for left in SHM.glob(f"sglang_loads_names_{process.pid}*"):
        left.unlink()


def in_pod(proc: Path, pid: int, uid: str, *, beside: bytes = b"") -> None:
    """What the kernel shows of a real process, as of one of this pod."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_bytes(
        b"0::/kubepods/pod%s/%s%s\n" % (uid.encode(), b"7" * 64, beside)
    )
    (folder / "comm").symlink_to(f"/proc/{pid}/comm")


def test_a_process_may_name_itself_by_any_bytes(tmp_path: Path, misnamed: int) -> None:
    assert b"\xff" in Path(f"/proc/{misnamed}/comm").read_bytes()
    in_pod(tmp_path, misnamed, EVIL)
    in_pod(tmp_path, os.getpid(), GOOD)
    found = Processes(tmp_path).scan([EVIL, GOOD])
    assert [one.pid for one in found[EVIL]] == [misnamed]
    assert [one.pid for one in found[GOOD]] == [os.getpid()]
    assert command_of(misnamed).isprintable()
    assert start_ticks(misnamed) > 0
    assert shared_memory([misnamed]) == frozenset()


def test_who_is_first_of_its_namespace_is_told_without_its_groups() -> None:
    # Any bytes but the kernel's own are no part of it: neither a name nor 65,536 groups.
    assert inner_pid(os.getpid()) == int(
        re.findall(r"^NSpid:.*\t(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[0]
    )
    with pytest.raises(OSError, match="No such process"):
        inner_pid(2**22 - 1)


def test_where_a_pidfd_does_not_tell_it_a_name_is_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"status": "Name:\tNSpid:x\nPid:\t7\nNSpid:\t7\t14\nThreads:\t1\n"}
    monkeypatch.setattr(processes, "proc_text", lambda _, name: found.get(name, "Pid:\t7\n"))
    assert inner_pid(os.getpid()) == 14


def test_a_cgroup_inside_a_container_makes_no_process_another_pods(tmp_path: Path) -> None:
    """A container that may write cgroups names those inside as it likes, by any bytes."""
    in_pod(tmp_path, os.getpid(), EVIL, beside=b"/pod" + GOOD.encode() + b"/\xff")
    found = Processes(tmp_path).scan([GOOD, EVIL])
    assert [one.pid for one in found[EVIL]] == [os.getpid()]
    assert found[GOOD] == []


def test_a_process_whose_first_thread_has_ended_is_its_pods_all_the_same(tmp_path: Path) -> None:
    """As cgroup v1 shows it: else it would be of no pod, and could pass for MPS's own server."""
    root = "6:freezer:/\n"
    for thread, text in (("5", root), ("8", f"6:freezer:/kubepods/burstable/pod{EVIL}/79\n")):
        (tmp_path / "5" / "task" / thread).mkdir(parents=True)
        (tmp_path / "5" / "task" / thread / "cgroup").write_text(text)
    (tmp_path / "5" / "cgroup").write_text(root)
    assert owner_of(5, tmp_path) == Owner(pod=EVIL)


def crowd(proc: Path, many: int, uid: str, first: int) -> None:
    """A pod of many processes, each of which calls itself SGLang's scheduler."""
    for pid in range(first, first + many):
        folder = proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'7' * 64}\n")
        (folder / "comm").write_text("sglang::schedul\n")


async def test_a_crowd_of_processes_costs_its_own_pod_the_loan(tmp_path: Path) -> None:
    crowd(tmp_path, MOST_DESCRIBED + 200, EVIL, 100)
    crowd(tmp_path, 8, GOOD, 10_000)
    pods = guarded({}, {})
    pods._processes = Processes(tmp_path, lambda pid: 1 if pid in {100, 10_000} else pid)
    found = pods.pods([POLICY])
    assert found[EVIL].claim.refusal == "PodUnreadable"
    assert [len(pods._found[uid]) for uid in (EVIL, GOOD)] == [MOST_DESCRIBED, 8]
    assert len(found[EVIL].pids) < 100, "each is a descriptor of the guard's"
    assert (len(found[GOOD].pids), found[GOOD].claim.refusal) == (8, "")
    assert [one.pid for one in pods._found[GOOD] if one.first] == [10_000]


async def test_what_is_said_of_a_crowd_does_not_change_with_it(tmp_path: Path) -> None:
    """The operator writes it down each time that it does."""
    found = set()
    for many in (100, 200):
        (proc := tmp_path / str(many)).mkdir()
        crowd(proc, many, EVIL, 100)
        pods = guarded({}, {})
        pods._processes = Processes(proc, lambda pid: pid)
        found.add(pods.pods([POLICY])[EVIL].claim.message)
    assert len(found) == 1
    assert "64" in found.pop()


def described(**annotations: str) -> dict[PodUid, ServingPod]:
    """What the guard makes of a pod with these annotations, and of one beside it."""
    return asyncio.run(_described({"annotations": annotations}))


async def _described(more: dict[str, Any], status: Any = None) -> dict[PodUid, ServingPod]:  # noqa: ANN401
    return guarded(more, status or {}).pods([POLICY])


def guarded(more: dict[str, Any], status: Any) -> KubernetesPods:  # noqa: ANN401
    """The guard's view of two pods, one of which is as somebody likes."""
    gpus = (GpuUuid("GPU-0"), GpuUuid("GPU-1"))
    pods = KubernetesPods(
        Access("http://nowhere", Path("/"), None), "n", lambda: None, WrittenClaims(lambda: gpus)
    )
    for uid, written in ((EVIL, more), (GOOD, {})):
        meta = {"uid": uid, "name": uid[-4:], "namespace": "evil", "labels": {"app": "llm"}}
        meta |= {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        found = {"podIP": "10.0.0.9"} | (status if uid == EVIL else {})
        pods._event({"type": "ADDED", "object": {"metadata": meta | written, "status": found}})
    return pods


@pytest.mark.parametrize("key", [FEED_ANNOTATION, GROUP_SIZE_ANNOTATION])
@pytest.mark.parametrize(
    "text",
    ["9" * 5000, "9" * 250_000, "99999999", "0", "-1", "1e3", "٣", "²", "5558 ", "nan", "\ud800"],
    ids=lambda text: ascii(text[:9]),
)
def test_what_is_no_number_closes_one_replica_and_says_why(key: str, text: str) -> None:
    found = described(**{key: text})
    assert set(found) == {EVIL, GOOD}
    assert (found[EVIL].feed_port, found[EVIL].group_size) == (0, 1)
    assert found[EVIL].claim.refusal == "PodUnreadable"
    assert key in found[EVIL].claim.message
    assert len(found[EVIL].claim.message) < 300
    assert found[GOOD].claim.refusal == ""


def test_the_names_of_many_gpus_are_no_claim() -> None:
    for text in ("a," * 100_000, "G" * 200_000):
        found = described(**{GPU_ANNOTATION: text})
        assert found[EVIL].gpu_uuids == ()
        assert GPU_ANNOTATION in found[EVIL].claim.message
        assert found[GOOD].gpu_uuids == ("GPU-1",) or found[GOOD].gpu_uuids == ("GPU-0",)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"labels": {"app": "llm"}, "annotations": ["rose"]}, {}),
        ({}, {"conditions": [{"type": "ContainersReady", "lastTransitionTime": "soon"}]}),
        ({}, {"containerStatuses": 7}),
    ],
)
async def test_a_pod_that_cannot_be_described_is_one_replica_without_lending(
    more: dict[str, Any], status: dict[str, Any]
) -> None:
    found = await _described(more, status)
    assert found[EVIL].claim.refusal == "PodUnreadable"
    assert (found[EVIL].name, found[EVIL].ready) == (EVIL[-4:], False)
    assert found[GOOD].claim.refusal == ""
