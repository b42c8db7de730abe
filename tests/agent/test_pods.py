"""Serving pods and their processes: the API server's view, the kernel's, and a file's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_agent.errors import BadConfiguration
from rose_agent.pods.claims import WrittenClaims
from rose_agent.pods.kubernetes import Access, KubernetesPods
from rose_agent.pods.processes import COMPLETE_EVERY, Processes, Watcher, container_id
from rose_agent.pods.static import StaticPods
from rose_agent.signals.snapshot import Snapshot, mapped, open_snapshot
from rose_core.identity import GpuUuid, PodUid
from rose_core.wire.sync import GroupPlace, PoolPolicy
from rose_dev.waiting import until

POLICY = PoolPolicy("chat/pool", "Lend", {"app": "llm"}, 30000)
UID = PodUid("53099174-d551-433b-9350-adf44bee898e")
CONTAINER = "7" * 64


def pod(name: str = "serving", uid: str = UID, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    status = {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T00:00:00Z"},
            {
                "type": "ContainersReady",
                "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            },
        ],
        "containerStatuses": [{"containerID": f"containerd://{CONTAINER}", "restartCount": 0}],
    }
    meta = {"uid": uid, "name": name, "namespace": "chat", "labels": {"app": "llm", "v": "1"}}
    meta |= {"resourceVersion": "5", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": meta | more.pop("metadata", {}), "status": status | more}


class FakeApi:
    """List and watch of pods, the way the API server answers."""

    def __init__(self) -> None:
        self.pods = [pod()]
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.lists = 0
        self.down = False
        self.selectors: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.selectors.add(request.query["fieldSelector"])
        if self.down:
            return web.Response(status=503, text="away")
        if "watch" not in request.query:
            self.lists += 1
            body = {"metadata": {"resourceVersion": "9"}, "items": self.pods}
            return web.json_response(body)
        stream = web.StreamResponse()
        await stream.prepare(request)
        while (event := await self.events.get()) is not None:
            line = msgspec.json.encode(event) + b"\n"
            await stream.write(line[:10])
            await stream.write(line[10:])
        return stream


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[FakeApi, KubernetesPods]]:
    fake = FakeApi()
    app = web.Application()
    app.router.add_get("/api/v1/pods", fake.answer)
    server = TestServer(app)
    await server.start_server()
    token = tmp_path / "token"
    token.write_text("secret\n")
    access = Access(str(server.make_url("")).rstrip("/"), token, None)
    pods = KubernetesPods(
        access, "node-1", lambda: None, WrittenClaims(lambda: (GpuUuid("GPU-0"), GpuUuid("GPU-1")))
    )
    running = asyncio.create_task(pods.run())
    yield fake, pods
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await fake.events.put(None)
    await server.close()


async def test_list_then_watch(api: tuple[FakeApi, KubernetesPods]) -> None:
    fake, pods = api
    assert not pods.synced
    await until(lambda: pods.synced)
    (found,) = pods.pods([POLICY]).values()
    assert (found.pool, found.address, found.port) == ("chat/pool", "10.0.0.9", 30000)
    assert (found.ready, found.stopped, found.gpu_uuids) == (True, False, ("GPU-0",))
    assert found.ready_since_s == 1767225600.0

    stopped = pod(
        metadata={
            "annotations": {
                "rose-gpu.dev/stop": "true",
                "rose-gpu.dev/gpus": "A,B",
                "rose-gpu.dev/load-feed-port": "5558",
            }
        }
    )
    await fake.events.put({"type": "MODIFIED", "object": stopped})
    await until(lambda: pods.pods([POLICY])[UID].stopped)
    assert pods.pods([POLICY])[UID].gpu_uuids == ("A", "B")
    assert pods.pods([POLICY])[UID].feed_port == 5558
    await fake.events.put({"type": "DELETED", "object": stopped})
    await until(lambda: not pods.pods([POLICY]))
    assert fake.selectors == {"spec.nodeName=node-1"}


def owned_by(version: str, kind: str) -> dict[str, Any]:
    return {"ownerReferences": [{"apiVersion": version, "kind": kind, "controller": True}]}


@pytest.mark.parametrize(
    "marks",
    [
        {"labels": {"app": "llm", "agents.x-k8s.io/sandbox-name-hash": "b5ec8f6b"}},
        owned_by("agents.x-k8s.io/v1beta1", "Sandbox"),
    ],
    ids=["label", "owner"],
)
async def test_a_pod_of_agent_sandbox_is_no_replica_whatever_its_template_says(
    api: tuple[FakeApi, KubernetesPods], marks: dict[str, Any]
) -> None:
    """What its controller gives a pod beside the template's own labels: either is enough."""
    fake, pods = api
    serving = pod(metadata=owned_by("apps/v1", "ReplicaSet"))
    fake.pods = [serving, pod("agent", "an-agent's", metadata=marks)]
    await until(lambda: pods.synced)
    assert [one.name for one in pods.pods([POLICY]).values()] == ["serving"]
    assert "chat/agent" in pods.residents.names.values(), "of the node all the same"


@pytest.mark.parametrize(("written", "size"), [("1", 1), ("4", 4), ("many", 1)])
async def test_a_group_of_pods_is_one_replica(
    api: tuple[FakeApi, KubernetesPods], written: str, size: int
) -> None:
    fake, pods = api
    fake.pods = [pod(metadata={"annotations": {"leaderworkerset.sigs.k8s.io/size": written}})]
    await until(lambda: pods.synced)
    assert pods.pods([POLICY])[UID].group_size == size


LWS = "leaderworkerset.sigs.k8s.io"


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({"name": "llama", "group-index": "3", "worker-index": "1"}, GroupPlace("llama/3", 1, 2)),
        ({"name": "llama", "group-index": "3", "worker-index": "0"}, GroupPlace("llama/3", 0, 2)),
        ({"name": "llama", "group-index": "3"}, None),
        ({"name": "llama", "group-index": "3", "worker-index": "first"}, None),
        ({}, None),
    ],
)
async def test_a_pods_place_in_its_group_is_what_leaderworkerset_wrote(
    api: tuple[FakeApi, KubernetesPods], labels: dict[str, str], place: GroupPlace | None
) -> None:
    fake, pods = api
    written = {f"{LWS}/{word}": value for word, value in labels.items()}
    own = pod()["metadata"]["labels"]
    fake.pods = [pod(metadata={"labels": own | written, "annotations": {f"{LWS}/size": "2"}})]
    await until(lambda: pods.synced)
    found = pods.pods([POLICY])[UID]
    assert found.place == place
    assert found.follows is (place is not None and place.index == 1)


async def test_other_pods_are_none_of_ours(api: tuple[FakeApi, KubernetesPods]) -> None:
    _, pods = api
    await until(lambda: pods.synced)
    other_labels = msgspec.structs.replace(POLICY, labels={"app": "llm", "v": "2"})
    other_namespace = msgspec.structs.replace(POLICY, pool="else/pool")
    no_labels = msgspec.structs.replace(POLICY, labels={})
    for policy in (other_labels, other_namespace, no_labels):
        assert pods.pods([policy]) == {}


async def test_the_last_known_pods_survive_the_api_server(
    api: tuple[FakeApi, KubernetesPods],
) -> None:
    fake, pods = api
    await until(lambda: pods.synced)
    fake.down = True
    await fake.events.put(None)
    await asyncio.sleep(0.3)
    assert set(pods.pods([POLICY])) == {UID}
    fake.down, fake.pods = False, [pod(uid="another")]
    await until(lambda: set(pods.pods([POLICY])) == {"another"})


async def test_an_expired_watch_lists_again(api: tuple[FakeApi, KubernetesPods]) -> None:
    fake, pods = api
    await until(lambda: pods.synced)
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    await fake.events.put(gone)
    await until(lambda: fake.lists == 2)


# --- processes


def process(proc: Path, pid: int, cgroup: str, *, command: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"6:freezer:{cgroup}\n0::{cgroup}\n")
    (folder / "comm").write_text(command[:15] + "\n")  # as the kernel cuts it off


def looking(proc: Path) -> Processes:
    """Number 12 is its container's fourteenth, all others are the first of theirs."""
    return Processes(proc, lambda pid: 14 if pid == 12 else 1)


@pytest.mark.parametrize(
    "path",
    [
        f"/node/kubepods/burstable/pod{UID}/{CONTAINER}",
        f"/kubepods/pod{UID}/{CONTAINER}/engine",
        f"/k.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
    ],
)
def test_processes_are_found_under_every_cgroup_driver(tmp_path: Path, path: str) -> None:
    process(tmp_path, 11, path)
    process(tmp_path, 12, path, command="sglang::scheduler")
    process(tmp_path, 13, path, command="pause")
    process(tmp_path, 14, "/kubepods/podother/" + CONTAINER)
    (tmp_path / "15").mkdir()
    (tmp_path / "self").mkdir()
    found = {f.pid: f for f in looking(tmp_path).scan([UID])[UID]}
    assert set(found) == {11, 12, 13}
    assert (found[11].first, found[12].scheduler, found[13].first) == (True, True, False)
    assert found[11].container == CONTAINER


POD, STRANGER = f"/kubepods/pod{UID}/{CONTAINER}", "/system.slice/sshd.service"


def change(proc: Path, pid: int, cgroup: str) -> None:
    """The process is moved, or its number is another's."""
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")


def pids(processes: Processes) -> list[int]:
    return [one.pid for one in processes.scan([UID])[UID]]


def test_a_process_that_is_moved_into_its_pod_after_a_look_is_found(tmp_path: Path) -> None:
    processes = looking(tmp_path)
    process(tmp_path, 10, POD)
    process(tmp_path, 11, STRANGER)
    assert pids(processes) == [10]
    change(tmp_path, 11, POD)
    assert sorted(pids(processes)) == [10, 11]


def test_strangers_are_asked_again_in_a_complete_look_alone(tmp_path: Path) -> None:
    processes = looking(tmp_path)
    process(tmp_path, 11, STRANGER)
    for _ in range(2):
        assert pids(processes) == []
    change(tmp_path, 11, POD)
    looks = [pids(processes) for _ in range(COMPLETE_EVERY)]
    assert looks[0] == []
    assert looks[-1] == [11]


def test_a_number_that_was_free_in_between_is_no_strangers(tmp_path: Path) -> None:
    processes = looking(tmp_path)
    process(tmp_path, 11, STRANGER)
    for _ in range(2):
        assert pids(processes) == []
    (tmp_path / "11").rename(tmp_path / "ended")
    assert pids(processes) == []
    process(tmp_path, 11, POD)
    assert pids(processes) == [11]


def test_for_a_new_pod_every_process_is_asked(tmp_path: Path) -> None:
    processes = looking(tmp_path)
    process(tmp_path, 11, POD)
    for _ in range(2):
        assert processes.scan([PodUid("another")]) == {"another": []}
    assert pids(processes) == [11]


def test_no_container_is_an_empty_name() -> None:
    assert container_id("0::/user.slice/session.scope\n") == ""


async def test_the_end_of_a_process_is_heard() -> None:
    ended: list[int] = []
    watcher = Watcher(ended.append)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    watcher.watch([child.pid])
    child.kill()
    await until(lambda: ended == [child.pid])
    await child.wait()
    watcher.watch([child.pid])
    await until(lambda: ended == [child.pid, child.pid])
    watcher.watch([os.getpid()])
    watcher.close()


# --- files


def test_the_static_file(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("replicas: [{uid: a, pool: chat/pool, port: 1}, {uid: b, pool: x/y, port: 2}]")
    source = StaticPods(path)
    assert set(source.pods([POLICY])) == {"a"}
    path.write_text("replicas: [{uid: a}]")
    assert set(source.pods([POLICY])) == {"a"}, "a broken file keeps its last content"
    with pytest.raises(BadConfiguration, match=r"replicas\.yaml"):
        StaticPods(path)
    with pytest.raises(BadConfiguration, match=r"none\.yaml"):
        StaticPods(tmp_path / "none.yaml")


def test_the_snapshot_is_found_through_the_process_and_never_by_name(tmp_path: Path) -> None:
    line = "7f0000000000-7f0000001000 rw-s 00000000 00:1b 7   /dev/shm/sglang_loads_1.shm"
    assert mapped(line) == "/dev/shm/sglang_loads_1.shm"
    assert mapped(line + " (deleted)") is None
    assert mapped("") is None
    folder = tmp_path / "42"
    (folder / "root" / "dev" / "shm").mkdir(parents=True)
    (folder / "maps").write_text(line + "\n")
    load = {"num_running_reqs": 2, "num_waiting_reqs": 0}
    packed = msgspec.msgpack.encode(load)
    memory = bytes(12) + len(packed).to_bytes(4, "little") + packed
    (folder / "root" / "dev" / "shm" / "sglang_loads_1.shm").write_bytes(memory)
    descriptor = open_snapshot(42, tmp_path)
    assert descriptor is not None
    snapshot = Snapshot(descriptor)
    assert snapshot.read().running == 2
    snapshot.close()
    assert open_snapshot(43, tmp_path) is None
