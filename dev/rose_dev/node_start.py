"""Starts the node's parts in the order in which they need each other.

Process 1 with its namespaces (``sandbox``) comes first, then etcd and the API server while the
container runtime imports the images, then the rest at once. Next step: ``components`` and
``machinery`` have the command of each part.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rose_dev import components, image, machinery, node_files
from rose_dev.cluster import Cluster
from rose_dev.components import Layout
from rose_dev.control_plane import write_certificates
from rose_dev.gpu_node.starting import DRIVERS, GpuNode
from rose_dev.pki import Authority
from rose_dev.place import NODE_NAME
from rose_dev.waiting import wait_until

_START_SECONDS = 180.0

Say = Callable[[str], None]
"""Takes one line per step."""


class Start:
    """One start of the node.

    Args:
        cluster: nothing of it runs.
        say: receives one line per step.
    """

    def __init__(self, cluster: Cluster, say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._gpus: GpuNode | None = None

    def run(self, gpus: int | str, driver: int = DRIVERS[0]) -> None:
        """Start everything, in order; nothing of an earlier run may be left.

        Args:
            gpus: how many the node claims to have, or the machine that it is.
            driver: branch of NVIDIA's driver, of such a machine.

        Raises:
            DevelopmentError: a part did not start.
        """
        cluster, place, say = self._cluster, self._cluster.place, self._say
        began = time.monotonic()
        step = Step(say)
        archives = [image.pause_archive(node_files.PAUSE_IMAGE), image.archive(say)]
        step("images")
        self._gpus = GpuNode(cluster, gpus, driver) if isinstance(gpus, str) else None
        cluster.sandbox.open()
        layout = self._write_files()
        step("namespaces, network, certificates")
        if self._gpus is not None:
            self._gpus.prepare(say)
            step(f"driver of {self._gpus.profile}, CDI")
        commands = self._commands(layout)
        (place.run / "commands.json").write_text(json.dumps(commands))
        with ThreadPoolExecutor(1) as aside:
            imported = aside.submit(self._start_runtime, commands, archives)
            cluster.sandbox.start("etcd", commands["etcd"])
            cluster.sandbox.start("kube-apiserver", commands["kube-apiserver"])
            wait_until(self._api_ready, "the API server is ready", seconds=_START_SECONDS)
            step("API server")
            self._start_rest(commands)
            imported.result()
            step("container runtime with images")
        cluster.sandbox.start("kubelet", commands["kubelet"])
        cluster.kubectl("apply", "--filename=-", stdin=node_files.dns_objects(place.seat))
        wait_until(cluster.ready, "the node is ready", seconds=_START_SECONDS, why=cluster.faults)
        wait_until(self._has_service_account, "service accounts", seconds=_START_SECONDS)
        if isinstance(gpus, int):
            cluster.claim_gpus(NODE_NAME, gpus)
        step("node ready")
        if self._gpus is not None:
            self._gpus.join()
            step("device plugin, NRI plugin, runtime classes")
        say(f"[cluster] up in {time.monotonic() - began:.1f} s; KUBECONFIG={cluster.kubeconfig}")

    def _write_files(self) -> Layout:
        folder, seat = self._cluster.place.run / "control-plane", self._cluster.place.seat
        services, binaries = seat.ranges.services, self._cluster.binaries()
        layout = Layout(folder, seat.address, 6443, 2379, 2380, services, binaries)
        authority = write_certificates(layout, node_files.api_hosts(seat))
        self._issue_node_certificates(authority, layout.server)
        machinery.write_files(self._cluster.place, layout.pki)
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
            **machinery.commands(
                self._cluster.place, layout.pki, binaries, gpus=self._gpus is not None
            ),
            **(self._gpus.commands() if self._gpus is not None else {}),
        }

    def _start_runtime(self, commands: dict[str, list[str]], archives: list[Path]) -> None:
        machinery.start_runtime(self._cluster.sandbox, commands["containerd"])
        pause, rose = archives
        machinery.load(self._cluster.sandbox, pause)
        machinery.load_once(self._cluster.sandbox, rose)

    def _start_rest(self, commands: dict[str, list[str]]) -> None:
        for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns"):
            self._cluster.sandbox.start(name, commands[name])

    def _api_ready(self) -> bool:
        self._cluster.sandbox.pid("etcd")
        self._cluster.sandbox.pid("kube-apiserver")
        return self._cluster.agrees("get", "--raw=/readyz")

    def _has_service_account(self) -> bool:
        return self._cluster.agrees("get", "serviceaccount", "default", "--namespace=default")


class Step:
    """Says what took how long."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._since = time.monotonic()

    def __call__(self, name: str) -> None:
        """The step ``name`` is done."""
        now = time.monotonic()
        self._say(f"[cluster]   {name}: {now - self._since:.1f} s")
        self._since = now
