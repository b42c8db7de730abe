"""Brings the demo's world up, step by step, and says where its parts are.

| step | done when |
|---|---|
| node | the one-node Kubernetes is ready |
| ROSE | the chart is installed |
| objects | replicas, store, dedicated engine, pool and lease are applied |
| replicas | both serving pods are Ready |
| parts | ROSE, store and dedicated engine are Ready and the lease has its router |
| slot | the slot's engine runs and waits for weights |
"""

from __future__ import annotations

import base64
import functools
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose_core.api.reasons import ConditionType, Reason
from rose_demo import cores, manifests
from rose_demo.calibrate import LEAST_OBJECTIVE, Objective
from rose_demo.errors import AlreadyRunning, SetUpFailed
from rose_demo.manifests import dedicated
from rose_demo.options import KINDS, SERVING_KIND, Options
from rose_demo.pieces import (
    DEDICATED,
    LEASE,
    RESEARCH,
    ROUTER,
    ROUTERS,
    RUN,
    SANDBOXES,
    SERVING,
    SERVING_PORT,
    STORE_PORT,
    SYSTEM,
    TRACES,
    TRAINER,
    Engines,
    Object,
)
from rose_demo.span_receiver import HTTP_PORT
from rose_dev.cluster.namespaces import marked
from rose_dev.cluster.node import Node
from rose_dev.errors import StartFailed
from rose_dev.image import checkout
from rose_dev.models import make_named
from rose_dev.waiting import wait_until
from rose_sandbox.errors import Unavailable
from rose_sandbox.runtimes.parts import find_parts
from rose_weights.serve import tenants
from rose_wire.bearer import lease_token

Log = Callable[[str], None]

_READY_SECONDS = 420.0
_TRACES_SECONDS = 30.0
_GUARD_PORT = 9101
_SANDBOX_HOSTS = f"rose-gpu.dev/sandboxes={SANDBOXES}"


@dataclass(frozen=True)
class Addresses:
    """Where the demo's own processes find the parts.

    Attributes:
        lent, control: URLs of the two serving replicas.
        router: the lease's URL as this machine reaches it.
        store: ``host:port`` of the weight store.
        guard: base URL of the guard's pages.
        traces: of the receiver of the router's spans.
    """

    lent: str
    control: str
    router: str
    store: str
    guard: str
    traces: str


@dataclass(frozen=True)
class Pod:
    """What the demo needs to know of a pod."""

    name: str
    uid: str
    address: str
    ready: bool


def pods_of(answer: str) -> list[Pod]:
    """Pods of a ``kubectl get pods -o json``; those that are ending are left out."""
    found = []
    for item in json.loads(answer)["items"]:
        meta, status = item["metadata"], item.get("status", {})
        if "deletionTimestamp" in meta:
            continue
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        found.append(
            Pod(
                meta["name"],
                meta["uid"],
                status.get("podIP", ""),
                conditions.get("Ready") == "True",
            )
        )
    return found


def resting(lease: dict[str, Any]) -> str:
    """Why waiting for the slot is in vain, from the lease's status; empty while it is not.

    The breaker rests for longer than the demo waits.
    """
    for condition in lease.get("conditions", []):
        if (
            condition["type"] == ConditionType.GRANTED
            and condition["reason"] == Reason.BREAKER_OPEN
        ):
            return (
                f"lending rests before it began: {condition['message']}. Live traffic was slow "
                "without it, so something else needs this machine's cores, or the machine is "
                "slower than the objective allows. End what runs beside the demo, or give it a "
                "wider objective (--ttft-slo-ms, --tpot-slo-ms)"
            )
    return ""


def _sandbox_parts() -> tuple[Path | None, str]:
    """Where this machine has what sandboxes need, or why it has not."""
    try:
        return find_parts().folder, ""
    except Unavailable as error:
        return None, str(error)


class Stack:
    """The demo's world.

    Args:
        node: the one-node Kubernetes.
        options: knobs.
        scratch: folder for files that helm and the trainer read.
        log: receives a line per step.
    """

    def __init__(self, node: Node, options: Options, scratch: Path, log: Log) -> None:
        self.node = node
        self.options = options
        self._scratch = scratch
        self._log = log
        self._began = time.monotonic()
        self.engines = self._engines()
        self.sandbox_parts, self.no_sandboxes = _sandbox_parts()
        self.sandbox_token, self._record = secrets.token_hex(16), ""
        self.promised = options.promise(LEAST_OBJECTIVE)

    def refuse_to_share(self) -> None:
        """Check that no cluster runs.

        Raises:
            AlreadyRunning: one does.
        """
        if self.node.namespaces.alive():
            message = (
                "a development cluster is running already and the demo would disturb it; end it "
                "with `rose dev down`, then try again"
            )
            raise AlreadyRunning(message)

    def up(self) -> None:
        """Start the node, install ROSE, apply every object.

        Raises:
            DevelopmentError: a tool failed; says what it said.
        """
        self.node.up(gpus=2, log=self._log)
        self._apply([*manifests.namespaces(), manifests.trainer_account()])
        self._apply([self._grant_tenants(), *self._sandbox_secrets()])
        self._apply([manifests.serving(self.engines)])
        values = self._scratch / "values.json"
        given = manifests.chart_values(self.options, self.engines, self.sandbox_parts)
        values.write_bytes(msgspec.json.encode(given))
        chart = str(checkout() / "helm" / "rose")
        place = ["--namespace", SYSTEM, "--create-namespace"]
        self.node.helm("install", "rose", chart, *place, "--values", str(values))
        self.step("ROSE installed with helm")
        self.show_token_to_router()
        self._apply([*manifests.store(), *manifests.receiver()])
        self._apply([manifests.policy()])
        self.promise(LEAST_OBJECTIVE)
        self._apply([manifests.lease(self.options, self.engines)])
        self._apply([self._router_token(), *dedicated(self.options, self.engines)])
        self.step("replicas, store, dedicated engine, pool and lease applied")

    def wait_for_parts(self) -> None:
        """Wait until everything but the slot is there.

        Raises:
            SetUpFailed: something did not come up in time.
        """
        others, what = f"--selector=app!={TRACES}", "ROSE, the weight store, the dedicated engine"
        self._until(lambda: self._all_ready(SYSTEM, others), what)
        self._until(lambda: self._all_ready(SERVING), "both replicas")
        self._wait_for_traces()
        self._until(lambda: bool(self._lease().get("routerURL")), "the lease's router")

    def _wait_for_traces(self) -> None:
        """Wait shortly for the receiver of spans: without it a picture is missing, no figure."""
        deadline = time.monotonic() + _TRACES_SECONDS
        while not self._all_ready(SYSTEM, f"--selector=app={TRACES}"):
            if time.monotonic() > deadline:
                self.step(
                    f"{TRACES}, which takes the router's spans, is not ready after "
                    f"{_TRACES_SECONDS:.0f} s: going on; the report may have no waterfall"
                )
                return
            time.sleep(1.0)

    def wait_for_slot(self) -> None:
        """Wait until the slot's engine runs; its weights come from the trainer.

        Raises:
            SetUpFailed: not in time; says the slot's and the lease's conditions.
        """
        self._until(lambda: self._slot_state() in {"Syncing", "Running", "Stopped"}, "the slot")

    def refuse_to_rest(self) -> None:
        """Check that waiting for the slot is not in vain.

        Raises:
            SetUpFailed: lending rests for longer than the demo waits.
        """
        reason = resting(self._lease())
        if reason:
            message = f"{reason}\n{self.evidence()}"
            raise SetUpFailed(message)

    def promise(self, objective: Objective) -> None:
        """Apply the pool with this objective, or with what the command line asks for instead."""
        self.promised = self.options.promise(objective)
        self._apply([manifests.pool(self.options, self.promised)])

    def addresses(self) -> Addresses:
        """Where everything is."""
        serving = {pod.name: pod for pod in self._pods(SERVING)}
        lent = serving.pop(self._member()["podName"])
        control = next(iter(serving.values()))
        agent = self._component("agent")
        return Addresses(
            lent=f"http://{lent.address}:{SERVING_PORT}",
            control=f"http://{control.address}:{SERVING_PORT}",
            router=self.router(),
            store=f"{self._service('rose-weights')}:{STORE_PORT}",
            guard=f"http://{agent.address}:{_GUARD_PORT}",
            traces=f"http://{self._service(TRACES)}:{HTTP_PORT}",
        )

    def router(self) -> str:
        """The lease's URL as this machine reaches it."""
        return f"http://{self._service(ROUTER, ROUTERS)}:8000"

    def serving_urls(self) -> list[str]:
        """URLs of both replicas, before it is known which one is lent."""
        return [f"http://{pod.address}:{SERVING_PORT}" for pod in self._pods(SERVING)]

    def place_processes(self) -> None:
        """Give the stand-in core to the lent replica and its rollout engine alone.

        Again and again, because processes come and go; the pods are looked up once.
        """
        lent, host, agent = self._placed_pods
        decision = cores.decide(
            cores.read(marked(self.node.place)), lent_pod=lent, host_pod=host, free_pods=[agent]
        )
        cores.apply(decision, cores.cores())

    @functools.cached_property
    def _placed_pods(self) -> tuple[str, str, str]:
        """Uids of the lent replica, the engine host and the agent."""
        host, agent = (self._component(name).uid for name in ("engine-host", "agent"))
        return self._member()["podUid"], host, agent

    def _grant_tenants(self) -> Object:
        """Who may use the store: the team publishes its run, the serving cluster reads it."""
        file, run = self._scratch / "tenants.json", RUN
        team = tenants.grant(file, "research", publish=(run,), read=(run,))
        cluster = tenants.grant(file, "serving-cluster", read=(run,))
        self._record = tenants.grant(file, "sandboxes", record=(run,))
        self.credential.touch(mode=0o600)
        self.credential.write_text(team + "\n")
        return manifests.credentials(file.read_bytes(), cluster)

    def _sandbox_secrets(self) -> list[Object]:
        """What hosts of sandboxes and those who call them show, each in its namespace."""
        if self.sandbox_parts is None:
            return []
        shown = {"token": self.sandbox_token, "record": self._record}
        shown["traffic"] = secrets.token_hex(16)
        return [manifests.secret(SANDBOXES, SYSTEM, shown)]

    def show_token_to_router(self) -> None:
        """Give the lease's router the sandbox hosts' token; its namespace comes with the chart."""
        if self.sandbox_parts is not None:
            self._apply([manifests.secret(SANDBOXES, ROUTERS, {"token": self.sandbox_token})])

    def sandbox_host(self) -> str:
        """URL of the host of sandboxes; empty while none is ready."""
        ready = [pod for pod in self._pods(SYSTEM, "-l", _SANDBOX_HOSTS) if pod.ready]
        return f"http://{ready[0].address}:7600" if ready else ""

    def kill_sandbox_host(self) -> None:
        """End it without a word; its DaemonSet begins another one."""
        at_once = ("--grace-period=0", "--force", "--wait=false")
        self._kubectl("delete", "pods", "-n", SYSTEM, "-l", _SANDBOX_HOSTS, *at_once)

    def turn_token(self) -> Path:
        """A token of the RL team's service account for its lease, in a file of ours, made anew."""
        audience = f"--audience=rose-lease/{RESEARCH}/{LEASE}"
        made = self._kubectl(
            "create", "token", TRAINER, f"-n={RESEARCH}", audience, "--duration=8h"
        )
        path = self._scratch / "turn-token"
        path.touch(mode=0o600)
        path.write_text(made)
        return path

    def _router_token(self) -> Object:
        """What the dedicated engine's host shows to the lease's router."""
        self._until(lambda: bool(self.installation_token()), "the installation's token")
        token = lease_token(self.installation_token(), f"{RESEARCH}/{LEASE}")
        return manifests.secret(DEDICATED, SYSTEM, {"token": token})

    @property
    def credential(self) -> Path:
        """The RL team's credential of the weight store, in a file that only we can read."""
        return self._scratch / "store-credential"

    def installation_token(self) -> str:
        """What the platform's own pages ask for: the guard's report and flight recorder.

        The operator makes it; until then it is empty.
        """
        path = "jsonpath={.data.token}"
        encoded = self._kubectl("get", "secret", "rose-token", "-n", SYSTEM, "-o", path)
        return base64.b64decode(encoded).decode().strip()

    def story(self) -> str:
        """What a user sees of the three kinds now."""
        parts = [
            self._kubectl("get", kind, "-A", check=False)
            for kind in ("servpool", "rlease", "rslot")
        ]
        return "\n".join(part.rstrip() + "\n" for part in parts)

    def evidence(self) -> str:
        """What is known when something did not come up, for the error message."""
        pods = self._kubectl("get", "pods", "-A", "-o", "wide", check=False)
        events = self._kubectl(
            "get", "events", "-A", "--sort-by=.lastTimestamp", check=False
        ).splitlines()[-15:]
        return "\n".join([pods, self.story(), *events])

    def save_logs(self, folder: Path) -> None:
        """Write what ROSE's containers said, one file each, for a look afterwards."""
        folder.mkdir(parents=True, exist_ok=True)
        for namespace in (SYSTEM, ROUTERS):
            for pod in self._pods(namespace):
                named = ["-n", namespace, pod.name]
                text = self._kubectl("logs", *named, "--all-containers", "--prefix", check=False)
                (folder / f"{pod.name}.log").write_text(text)

    def _engines(self) -> Engines:
        serving, rollout = (
            make_named(name) for name in (self.options.serving_model, self.options.rollout_model)
        )
        return Engines(
            serving_build=SERVING_KIND.build(),
            rollout_build=KINDS[self.options.rollout_engine].build(),
            models=serving.parent,
            serving=serving.name,
            rollout=rollout.name,
        )

    def _slot(self) -> dict[str, Any]:
        items = json.loads(self._kubectl("get", "rslot", "-A", "-o", "json"))["items"]
        lent = [item for item in items if item["spec"].get("desired", "Lent") == "Lent"]
        slot: dict[str, Any] = lent[0] if lent else {}
        return slot

    def _slot_state(self) -> str:
        return str(self._slot().get("status", {}).get("state", ""))

    def _member(self) -> dict[str, Any]:
        slot = self._slot()
        if not slot:
            message = f"the slot is gone\n{self.evidence()}"
            raise SetUpFailed(message)
        member: dict[str, Any] = slot["spec"]["members"][0]
        return member

    def _lease(self) -> dict[str, Any]:
        answer = self._kubectl("get", "rlease", LEASE, "-n", RESEARCH, "-o", "json")
        status: dict[str, Any] = json.loads(answer).get("status", {})
        return status

    def _service(self, name: str, namespace: str = SYSTEM) -> str:
        answer = self._kubectl("get", "service", name, "-n", namespace, "-o", "json")
        return str(json.loads(answer)["spec"]["clusterIP"])

    def _pods(self, namespace: str, *selector: str) -> list[Pod]:
        return pods_of(self._kubectl("get", "pods", "-n", namespace, "-o", "json", *selector))

    def _component(self, name: str) -> Pod:
        found = self._pods(SYSTEM, "-l", f"app.kubernetes.io/name=rose-{name}")
        if len(found) != 1:
            message = f"{len(found)} pods of {name}, expected one\n{self.evidence()}"
            raise SetUpFailed(message)
        return found[0]

    def _all_ready(self, namespace: str, *selector: str) -> bool:
        found = self._pods(namespace, *selector)
        return bool(found) and all(pod.ready for pod in found)

    def _kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        return self.node.kubectl(*arguments, stdin=stdin, check=check)

    def _apply(self, objects: list[Object]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self._kubectl("apply", "--filename=-", stdin=json.dumps(listed))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(
                condition,
                what,
                seconds=_READY_SECONDS,
                pause=1.0,
                why=lambda: f"\n{self.evidence()}",
            )
        except StartFailed as error:
            raise SetUpFailed(str(error)) from error
        self.step(f"{what}: ready")

    def step(self, text: str) -> None:
        """Say that a step is done."""
        self._log(f"[demo] {time.monotonic() - self._began:5.0f} s  {text}")
