"""A real one-node Kubernetes on this machine: kubelet, containerd, kube-proxy, DNS, RBAC.

States of the node, and what leads from one to the next:

    Absent --up--> Running --down--> Absent
       ^              | a component dies
       +---down/up-- Broken

``up`` on a running node only brings its image of ROSE up to date with the checkout; on one with
other GPUs, on a broken one, and on leftovers of a run that was killed, it clears them away and
starts anew. Next step: ``Start`` has the order of a start, ``kubectl`` what a running one can be
asked, ``namespaces`` the namespaces and processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from rose_dev import image
from rose_dev.cluster import components, kwok, node_components, node_files
from rose_dev.cluster.build import build
from rose_dev.cluster.components import Layout
from rose_dev.cluster.control_plane import write_certificates
from rose_dev.cluster.gpu_node import starting as gpu_node
from rose_dev.cluster.gpu_node.starting import DRIVERS, GpuNode, profile_of
from rose_dev.cluster.kubectl import COMPONENTS, Cluster
from rose_dev.cluster.namespaces import NodeNamespaces, sweep
from rose_dev.cluster.node_packages import install_packages
from rose_dev.cluster.parts import SCALE, cache_root
from rose_dev.cluster.pki import Authority
from rose_dev.cluster.place import NODE_NAME, NodeFolders, place
from rose_dev.cluster.second_node import SecondNode
from rose_dev.errors import DevelopmentError, NotSupported, StartFailed
from rose_dev.shell import locked
from rose_dev.waiting import wait_until

_START_SECONDS = 180.0

Log = Callable[[str], None]
"""Takes one line per step."""
_CLAIMED = 8


class Start:
    """Starts the node's parts in the order in which they need each other.

    Process 1 with its namespaces (``namespaces``) comes first, then etcd and the API server while
    the container runtime imports the images, then the rest at once. ``components`` and
    ``node_components`` have the command of each part.

    Args:
        cluster: nothing of it runs.
        log: receives one line per step.
    """

    def __init__(self, cluster: Cluster, log: Log) -> None:
        self._cluster, self._log = cluster, log
        self._gpus: GpuNode | None = None

    def run(self, gpus: int | str, driver: int = DRIVERS[0]) -> None:
        """Start everything, in order; nothing of an earlier run may be left.

        Args:
            gpus: how many the node claims to have, or the machine that it is.
            driver: branch of NVIDIA's driver, of such a machine.

        Raises:
            DevelopmentError: a part did not start.
        """
        cluster, place, log = self._cluster, self._cluster.place, self._log
        began = time.monotonic()
        step = Step(log)
        archives = [image.pause_archive(node_files.PAUSE_IMAGE), image.archive(log)]
        step("images")
        self._gpus = GpuNode(cluster, gpus, driver) if isinstance(gpus, str) else None
        cluster.namespaces.open()
        layout = self._write_files()
        step("namespaces, network, certificates")
        if self._gpus is not None:
            self._gpus.prepare(log)
            step(f"driver of {self._gpus.profile}, CDI")
        commands = self._commands(layout)
        (place.run / "commands.json").write_text(json.dumps(commands))
        with ThreadPoolExecutor(1) as aside:
            imported = aside.submit(self._start_runtime, commands, archives)
            cluster.namespaces.start("etcd", commands["etcd"])
            cluster.namespaces.start("kube-apiserver", commands["kube-apiserver"])
            wait_until(self._api_ready, "the API server is ready", seconds=_START_SECONDS)
            step("API server")
            self._start_rest(commands)
            imported.result()
            step("container runtime with images")
        cluster.namespaces.start("kubelet", commands["kubelet"])
        cluster.kubectl("apply", "--filename=-", stdin=node_files.dns_objects(place.seat))
        wait_until(cluster.ready, "the node is ready", seconds=_START_SECONDS, why=cluster.faults)
        wait_until(self._has_service_account, "service accounts", seconds=_START_SECONDS)
        if isinstance(gpus, int):
            cluster.claim_gpus(NODE_NAME, gpus)
        step("node ready")
        if self._gpus is not None:
            self._gpus.join()
            step("device plugin, NRI plugin, runtime classes")
        log(f"[cluster] up in {time.monotonic() - began:.1f} s; KUBECONFIG={cluster.kubeconfig}")

    def _write_files(self) -> Layout:
        folder, seat = self._cluster.place.run / "control-plane", self._cluster.place.seat
        services, binaries = seat.ranges.services, self._cluster.binaries()
        layout = Layout(folder, seat.address, 6443, 2379, 2380, services, binaries)
        authority = write_certificates(layout, node_files.api_hosts(seat))
        self._issue_node_certificates(authority, layout.server)
        node_components.write_files(self._cluster.place, layout.pki)
        texts = {
            "Corefile": node_files.corefile(seat, layout.pki),
            "audit-policy.yaml": node_files.audit_policy(),
        }
        for name, text in texts.items():
            (self._cluster.place.run / name).write_text(text)
        shutil.copy(layout.pki / "admin.conf", self._cluster.kubeconfig)
        return layout

    def _issue_node_certificates(self, authority: Authority, server: str) -> None:
        authority.issue("dns", "rose-dev-dns", "system:masters")
        authority.kubeconfig("dns", server)
        place = self._cluster.place
        for seat in (place.seat, place.second().seat):
            authority.issue(seat.name, f"system:node:{seat.name}", "system:nodes")
            authority.kubeconfig(seat.name, server)
            authority.issue(f"{seat.name}-serving", seat.name, hosts=[seat.name, seat.address])

    def _commands(self, layout: Layout) -> dict[str, list[str]]:
        run_directory, binaries = self._cluster.place.run, layout.binaries
        audit = [
            f"--audit-policy-file={run_directory / 'audit-policy.yaml'}",
            f"--audit-log-path={self._cluster.place.audit}",
        ]
        return {
            "etcd": components.etcd(layout),
            "kube-apiserver": components.api_server(layout, audit),
            "kube-controller-manager": components.controller_manager(layout, 10257),
            "kube-scheduler": components.scheduler(layout, 10259),
            "coredns": [str(binaries["coredns"]), "-conf", str(run_directory / "Corefile")],
            **node_components.commands(
                self._cluster.place, layout.pki, binaries, gpus=self._gpus is not None
            ),
            **(self._gpus.commands() if self._gpus is not None else {}),
        }

    def _start_runtime(self, commands: dict[str, list[str]], archives: list[Path]) -> None:
        node_components.start_runtime(self._cluster.namespaces, commands["containerd"])
        pause, rose = archives
        node_components.load(self._cluster.namespaces, pause)
        node_components.load_once(self._cluster.namespaces, rose)

    def _start_rest(self, commands: dict[str, list[str]]) -> None:
        for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns"):
            self._cluster.namespaces.start(name, commands[name])

    def _api_ready(self) -> bool:
        self._cluster.namespaces.pid("etcd")
        self._cluster.namespaces.pid("kube-apiserver")
        return self._cluster.agrees("get", "--raw=/readyz")

    def _has_service_account(self) -> bool:
        return self._cluster.agrees("get", "serviceaccount", "default", "--namespace=default")


class Step:
    """Says what took how long."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._since = time.monotonic()

    def __call__(self, name: str) -> None:
        """The step ``name`` is done."""
        now = time.monotonic()
        self._log(f"[cluster]   {name}: {now - self._since:.1f} s")
        self._since = now


class Node(Cluster):
    """The machine's node. Everything that ``rose dev`` does, for tests and the demo."""

    def __init__(self, at: NodeFolders | None = None) -> None:
        super().__init__(at or place())

    def up(
        self, *, gpus: int | str | None = None, driver: int = DRIVERS[0], log: Log = print
    ) -> None:
        """Bring the node up; a node that runs stays as it is, with a fresh image of ROSE.

        Args:
            gpus: how many ``nvidia.com/gpu`` the node claims to have, or a machine of
                ``rose_dev.gpu.profiles``, whose GPUs NVIDIA's own programs can see; None = what
                runs will do, else a claim.
            driver: branch of NVIDIA's driver, of such a machine.
            log: receives one line per step.

        Raises:
            NotSupported: not Linux, or not root.
            DevelopmentError: a part could not be built or did not start.
        """
        require_root()
        with self._lock(log):
            self.build(log)
            install_packages(log)
            if self.healthy() and (gpus is None or _machine(gpus) == profile_of(self)):
                archive = image.archive(log)
                for namespaces in self._all_namespaces():
                    node_components.load_once(namespaces, archive)
                log(f"[cluster] runs already; KUBECONFIG={self.kubeconfig}")
                return
            try:
                self._sweep()
                Start(self, log).run(_CLAIMED if gpus is None else gpus, driver)
            except DevelopmentError as error:
                logs = self._keep_logs()
                self._sweep()
                message = f"the node did not come up: {error}\nlogs are kept in {logs}"
                raise StartFailed(message) from error

    def down(self, *, log: Log = print) -> None:
        """End the node and remove every trace of it; also of one that was killed half-way.

        Raises:
            NotSupported: not Linux, or not root.
            DevelopmentError: something would not go.
        """
        require_root()
        with self._lock(log):
            self._sweep()
        log("[cluster] down")

    def components(self) -> dict[str, bool]:
        """Each component's name, and whether it runs."""
        plugins = gpu_node.COMPONENTS if profile_of(self) else ()
        return {name: self.namespaces.running(name) for name in (*COMPONENTS, *plugins)}

    def kill(self, component: str) -> None:
        """Kill a component as a crash would; ``restart`` brings it back."""
        self.namespaces.kill(component)

    def restart(self, component: str) -> None:
        """Start a component that was killed, with the arguments it had."""
        commands = json.loads((self.place.run / "commands.json").read_text())
        self.namespaces.start(component, commands[component])

    def load(self, *archives: Path) -> None:
        """Import docker archives, so that pods can use them with ``imagePullPolicy: Never``.

        Raises:
            CommandFailed: the runtime refuses one.
        """
        for namespaces in self._all_namespaces():
            for archive in archives:
                node_components.load(namespaces, archive)

    def second(self) -> SecondNode:
        """The node beside this one, whether it runs or not."""
        return SecondNode(self)

    def add_kwok_nodes(self, count: int) -> None:
        """Stand nodes without machines beside the real one; they last as long as it does."""
        if not self.namespaces.running("kwok"):
            rules = self.place.run / "kwok.yaml"
            rules.write_text(kwok.stages())
            binary = build(SCALE)["kwok"]
            self.namespaces.start("kwok", kwok.command(binary, self.kubeconfig, rules))
        names = [f"kwok-{number}" for number in range(count)]
        self.kubectl("apply", "--filename=-", stdin=kwok.nodes(names))
        for name in names:
            self.kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=60s")

    def _sweep(self) -> None:
        """The second node hangs on the first, so it goes first."""
        sweep(self.place.second())
        sweep(self.place)

    def _keep_logs(self) -> Path:
        kept = cache_root() / "node-logs"
        shutil.rmtree(kept, ignore_errors=True)
        if self.place.logs.exists():
            shutil.copytree(self.place.logs, kept)
        return kept

    def _all_namespaces(self) -> list[NodeNamespaces]:
        """Of the nodes that run."""
        second = self.second()
        return [self.namespaces, *([second.namespaces] if second.namespaces.alive() else [])]

    def _lock(self, log: Log) -> AbstractContextManager[None]:
        busy = "[cluster] somebody else brings the node up or down; waiting"
        return locked(self.place.run.with_suffix(".lock"), lambda: log(busy))


def _machine(gpus: int | str) -> str:
    """Its name; empty for GPUs that are only claimed."""
    return gpus if isinstance(gpus, str) else ""


def can_run_node() -> bool:
    """Whether this is Linux and we are root."""
    return sys.platform == "linux" and os.geteuid() == 0


def require_root() -> None:
    """Check that a node can run here.

    Raises:
        NotSupported: it cannot; the message says what works instead.
    """
    if not can_run_node():
        message = (
            "a node needs root on Linux; elsewhere set KUBECONFIG to an existing cluster (kind, a "
            "real one), which then takes its place. The control plane alone, for tests of the API, "
            "works without root"
        )
        raise NotSupported(message)
