"""This node's pods by list and watch over the Kubernetes API; its loss changes nothing.

A small client over aiohttp: one list, then one watch, again from the list when the watch is too
old or breaks. The last known pods stay valid while the API server is away, because tap, pidfds and
cgroups speak for themselves. Credentials are the pod's service account, or ``--kube-url`` with
``--kube-token-file`` outside a cluster.

What a pod's owner has written on it is any text of up to 256 KiB. Whatever of it cannot be read
closes that replica's gate (``PodUnreadable``), by its name, and concerns no other pod.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose_agent import metrics
from rose_agent.errors import ApiUnreachable, BadConfiguration
from rose_agent.pods.claims import GPU_ANNOTATION, ClaimingPod, Claims
from rose_agent.pods.model import NodePods, ServingPod
from rose_agent.pods.processes import MOST_DESCRIBED, PodProcess, Processes
from rose_core.devices.health import DeviceRefusal
from rose_core.devices.ownership import Claim
from rose_core.identity import PodUid
from rose_core.unreadable import UNREADABLE
from rose_core.wire.sync import GroupPlace, PoolPolicy

_log = logging.getLogger(__name__)
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STOP_ANNOTATION = "rose-gpu.dev/stop"
FEED_ANNOTATION = "rose-gpu.dev/load-feed-port"
# What LeaderWorkerSet writes on every pod of a group: how many pods the group has.
GROUP_SIZE_ANNOTATION = "leaderworkerset.sigs.k8s.io/size"
# And which group of the set the pod is of, and its place there: 0 leads.
GROUP_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
# Group of agent-sandbox's kinds (kubernetes-sigs): its controller is the owner of each of its pods,
# also of those that it takes over from a warm pool, and labels them.
AGENT_SANDBOX_GROUP = "agents.x-k8s.io"
AGENT_SANDBOX_LABEL = f"{AGENT_SANDBOX_GROUP}/sandbox-name-hash"
_WATCH_SECONDS = 240
_SCAN_SECONDS = 2.0
_MOST_PORT = 65535
# Far more than any engine stretches over.
_MOST_PODS = 9999
# An engine has a scheduler for each GPU, a pod a few containers; the guard holds a file for each.
_MOST_SERVING = 64
# Of a text that cannot be read, as much as helps to find it.
_MOST_QUOTED = 40
Json = dict[str, Any]
# Something answers in the API server's place: a page for people, or other objects than pods.
_NO_ANSWER = (*UNREADABLE, KeyError, TypeError)


@dataclass(frozen=True)
class Access:
    """How to reach the API server; the token is read anew because it rotates."""

    url: str
    token_file: Path
    ca_file: Path | None

    @classmethod
    def in_cluster(cls) -> Access:
        """From the pod's service account.

        Raises:
            BadConfiguration: not in a cluster.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host or not (_ACCOUNT / "token").exists():
            message = (
                "not in a cluster: give --static-replicas FILE, or --kube-url and --kube-token-file"
            )
            raise BadConfiguration(message)
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")


class KubernetesPods:
    """Pods of one node.

    Args:
        access: the API server.
        node: this node's name.
        on_change: called when a pod changed.
        claims: which GPUs a pod has.
        platform: namespaces of the platform's own pods.
    """

    def __init__(
        self,
        access: Access,
        node: str,
        on_change: Callable[[], None],
        claims: Claims,
        platform: frozenset[str] = frozenset(),
    ) -> None:
        self._access = access
        self._node = node
        self._on_change = on_change
        self._claims = claims
        self._platform = platform
        self._pods: dict[PodUid, Json] = {}
        self._processes = Processes()
        self._found: dict[PodUid, list[PodProcess]] = {}
        self._scanned = 0.0
        self._synced = False
        self._version = ""
        self._warned: set[PodUid] = set()

    @property
    def synced(self) -> bool:
        """The first list has been answered."""
        return self._synced

    def pods(self, policies: Sequence[PoolPolicy]) -> dict[PodUid, ServingPod]:
        """Pods that a pool's labels select."""
        chosen = {
            uid: (pod, policy)
            for uid, pod in self._pods.items()
            if (policy := _policy_of(pod, policies)) is not None
        }
        now = asyncio.get_running_loop().time()
        if now - self._scanned > _SCAN_SECONDS or set(chosen) - set(self._found):
            self._scanned = now
            self._found = self._processes.scan(chosen)
        by_age = sorted(chosen, key=lambda uid: _age(chosen[uid][0]))
        ended = frozenset(_name(pod) for pod in self._pods.values() if _has_ended(pod))
        found: dict[PodUid, ServingPod] = {}
        for uid, (pod, policy) in chosen.items():
            try:
                found[uid] = self._describe(pod, policy, by_age.index(uid), ended)
            except Exception as error:  # noqa: BLE001  # one pod costs no other its guard
                found[uid] = self._unread(pod, policy, error)
        return found

    @property
    def residents(self) -> NodePods:
        """All pods of the node, those of no pool included."""
        names = {uid: _name(pod) for uid, pod in self._pods.items()}
        platform = frozenset(
            uid for uid, pod in self._pods.items() if pod["metadata"]["namespace"] in self._platform
        )
        return NodePods(names, platform)

    @property
    def weakness(self) -> str:
        """Why it is less than proven which GPUs are whose; empty when it is proven."""
        return self._claims.weakness

    def _describe(
        self, pod: Json, policy: PoolPolicy, older: int, ended: frozenset[str]
    ) -> ServingPod:
        meta, status = pod["metadata"], pod.get("status", {})
        found = self._found.get(_uid(pod), [])
        serving = [f for f in found if f.first or f.scheduler]
        crowd = ""
        if len(found) >= MOST_DESCRIBED or len(serving) > _MOST_SERVING:
            # Without how many there are: a text that changes is written down each time.
            crowd = (
                f"it has {MOST_DESCRIBED} processes or more, or more than {_MOST_SERVING} that are"
                " first ones or call themselves SGLang's scheduler; that many are not followed"
            )
            serving = serving[:_MOST_SERVING]
        annotations = meta.get("annotations") or {}
        written = _Written(annotations)
        size = written.number(GROUP_SIZE_ANNOTATION, _MOST_PODS, 1)
        feed_port = written.number(FEED_ANNOTATION, _MOST_PORT, 0)
        asked = ClaimingPod(
            meta["namespace"],
            meta["name"],
            annotations.get(GPU_ANNOTATION, ""),
            older,
            tuple(f.pid for f in found),
            ended,
        )
        ready, since = _ready(status)
        return ServingPod(
            uid=_uid(pod),
            namespace=meta["namespace"],
            name=meta["name"],
            pool=policy.pool,
            address=status.get("podIP", ""),
            port=policy.port,
            instance=_instance(status),
            ready=ready,
            ready_since_s=since,
            restarted=any(c.get("restartCount", 0) for c in status.get("containerStatuses", [])),
            stopped=annotations.get(STOP_ANNOTATION, "").lower() == "true",
            pid=serving[0].pid if serving else 0,
            pids=tuple(sorted(f.pid for f in serving)),
            claim=_unless(written.problem or crowd, self._claims.of(asked)),
            feed_port=feed_port,
            group_size=size,
            place=_place(meta.get("labels") or {}, size),
        )

    def _unread(self, pod: Json, policy: PoolPolicy, error: Exception) -> ServingPod:
        """A replica of which nothing is known but that nothing of it is lent."""
        meta, uid = pod["metadata"], _uid(pod)
        if uid not in self._warned:  # asked five times a second
            self._warned.add(uid)
            _log.error("pod %s cannot be read", _name(pod), exc_info=error)
        return ServingPod(
            uid=uid,
            namespace=meta["namespace"],
            name=meta["name"],
            pool=policy.pool,
            address="",
            port=policy.port,
            ready=False,
            claim=_unless(f"{type(error).__name__} while it was read", Claim()),
        )

    def scheduler(self, uid: PodUid) -> int:
        """Pid of the pod's SGLang scheduler, 0 when it is not visible."""
        return next((f.pid for f in self._found.get(uid, []) if f.scheduler), 0)

    # --- list and watch

    async def run(self) -> None:
        """List and watch, and keep the pods' GPUs known, until cancelled."""
        await asyncio.gather(self._claims.run(), self._follow())

    async def _follow(self) -> None:
        context = ssl.create_default_context(
            cafile=str(self._access.ca_file) if self._access.ca_file else None
        )
        connector = aiohttp.TCPConnector(ssl=context)
        pause = 0.5
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                try:
                    await self._list(session)
                    while True:
                        await self._watch(session)
                        pause = 0.5
                except (ApiUnreachable, aiohttp.ClientError, OSError, *_NO_ANSWER) as error:
                    metrics.API_ERRORS.inc()
                    _log.info("pods of %s: %s", self._node, error)
                await asyncio.sleep(pause)
                pause = min(10.0, pause * 2)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        async with session.get(**self._request(), timeout=aiohttp.ClientTimeout(total=15)) as got:
            body = await self._answer(got)
        self._version = body["metadata"]["resourceVersion"]
        self._pods = {_uid(pod): pod for pod in body["items"]}
        self._synced = True
        self._on_change()

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        more = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_WATCH_SECONDS + 30)
        async with session.get(**self._request(more), timeout=timeout) as answer:
            if answer.status != 200:
                await self._answer(answer)
            buffer = b""
            async for piece in answer.content.iter_any():
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in filter(None, lines):
                    self._event(msgspec.json.decode(line))

    def _event(self, event: Json) -> None:
        kind, pod = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiUnreachable(f"watch ended: {pod.get('message', 'unknown')}")
        self._version = pod["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._pods.pop(_uid(pod), None)
        else:
            self._pods[_uid(pod)] = pod
        self._on_change()

    def _request(self, more: dict[str, str] | None = None) -> dict[str, Any]:
        return {
            "url": f"{self._access.url}/api/v1/pods",
            "params": {"fieldSelector": f"spec.nodeName={self._node}", **(more or {})},
            "headers": {"Authorization": f"Bearer {self._access.token_file.read_text().strip()}"},
        }

    async def _answer(self, answer: aiohttp.ClientResponse) -> Json:
        if answer.status != 200:
            text = (await answer.text())[:300]
            raise ApiUnreachable(f"API server answered {answer.status}: {text}")
        body: Json = msgspec.json.decode(await answer.read())
        return body


def _policy_of(pod: Json, policies: Sequence[PoolPolicy]) -> PoolPolicy | None:
    meta = pod["metadata"]
    if _has_ended(pod):
        return None
    labels = meta.get("labels") or {}
    if AGENT_SANDBOX_LABEL in labels or _is_agent_sandboxes(meta):
        return None  # somebody's agent, whatever labels its template has: no replica to lend
    for policy in policies:
        same = policy.pool.split("/")[0] == meta["namespace"]
        if same and policy.labels and policy.labels.items() <= labels.items():
            return policy
    return None


def _is_agent_sandboxes(meta: Json) -> bool:
    owners = meta.get("ownerReferences") or ()
    return any(one.get("apiVersion", "").partition("/")[0] == AGENT_SANDBOX_GROUP for one in owners)


def _has_ended(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def _name(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _ready(status: Json) -> tuple[bool, float]:
    """Readiness as the kubelet sees it.

    Not the condition ``Ready``: the control plane sets that to False for every pod of a node that
    it has not heard of for a while, as after an outage of the API server, and a healthy serving
    engine would look like one that went down.
    """
    for condition in status.get("conditions", []):
        if condition.get("type") == "ContainersReady":
            since = condition.get("lastTransitionTime")
            seconds = dt.datetime.fromisoformat(since).timestamp() if since else 0.0
            return condition.get("status") == "True", seconds
    return False, 0.0


class _Written:
    """Annotations, of which the first that cannot be read is kept for people."""

    def __init__(self, annotations: Json) -> None:
        self._annotations = annotations
        self.problem = ""

    def number(self, key: str, most: int, unwritten: int) -> int:
        """Read a number from 1 to ``most``; ``problem`` says what is wrong with another.

        Args:
            key: of the annotation.
            most: largest that counts.
            unwritten: what is taken where the annotation is not there.
        """
        text = self._annotations.get(key, "")
        if not text:
            return unwritten
        # By its length first: Python refuses numbers of thousands of digits.
        fits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if fits and 0 < int(text) <= most:
            return int(text)
        quoted = repr(text[:_MOST_QUOTED])
        self.problem = self.problem or f"annotation {key} is no number from 1 to {most}: {quoted}"
        return unwritten


def _unless(problem: str, claim: Claim) -> Claim:
    """What it claims, and where something of the pod cannot be read, that nothing is lent."""
    return replace(claim, refusal=DeviceRefusal.UNREADABLE, message=problem) if problem else claim


def _place(labels: Json, size: int) -> GroupPlace | None:
    """The pod's place in a group of several; None where it is one by itself, or nobody says."""
    name, group = labels.get(GROUP_NAME_LABEL, ""), labels.get(GROUP_INDEX_LABEL, "")
    index = labels.get(WORKER_INDEX_LABEL, "")
    is_valid = name and group.isdecimal() and index.isdecimal() and len(index) < 7
    return GroupPlace(f"{name}/{group}", int(index), size) if is_valid and size > 1 else None


def _instance(status: Json) -> str:
    return ",".join(
        sorted(str(c.get("containerID", "")) for c in status.get("containerStatuses", []))
    )


def _uid(pod: Json) -> PodUid:
    return PodUid(pod["metadata"]["uid"])


def _age(pod: Json) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]
