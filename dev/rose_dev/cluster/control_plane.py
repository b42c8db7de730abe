"""etcd and the API server alone, for tests of the API: real validation, no root, no node.

    with ControlPlane() as plane:
        plane.kubectl("get", "namespaces")
        plane.stop_api_server()     # for tests of what ROSE does meanwhile

Everything lives in one temporary folder and listens on free ports of 127.0.0.1. The processes end
with the one that started them, however it ends. There is no controller manager unless asked for,
so nothing makes service accounts, and deleted namespaces stay.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rose_dev.cluster import components
from rose_dev.cluster.build import build
from rose_dev.cluster.components import Layout
from rose_dev.cluster.parts import CONTROL_PLANE, NODE
from rose_dev.cluster.pki import Authority, service_account_keys
from rose_dev.errors import StartFailed
from rose_dev.shell import ending_with_us, run, succeeds, tail
from rose_dev.waiting import wait_until
from rose_wire.ports import free_ports

_START_SECONDS = 120.0
_ATTEMPTS = 3
_SERVICE_RANGE = "10.96.0.0/16"

# A server of tests lives for minutes and is mostly start-up: with Go's own 100 a seventh of that
# is search for garbage. It has 110 to 170 MB more in return.
_GOGC = "400"


def write_certificates(layout: Layout, hosts: Sequence[str]) -> Authority:
    """Make everything in ``layout.pki`` that the control plane and its admin need."""
    authority = Authority(layout.pki)
    service_account_keys(layout.pki)
    kubernetes = "kubernetes"
    service = [kubernetes, f"{kubernetes}.default", f"{kubernetes}.default.svc"]
    names = ["localhost", "127.0.0.1", *service, f"{service[-1]}.cluster.local", *hosts]
    authority.issue("apiserver", "kube-apiserver", hosts=names)
    authority.issue("apiclient", "kube-apiserver-kubelet-client", "system:masters")
    authority.issue("front", "rose-dev-front")
    clients = {
        "admin": ("admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager", ""),
        "scheduler": ("system:kube-scheduler", ""),
        "proxy": ("system:kube-proxy", ""),
    }
    for name, (common_name, group) in clients.items():
        authority.issue(name, common_name, group)
        authority.kubeconfig(name, layout.server)
    return authority


class Child:
    """A process that writes to a log file and dies with the thread that started it (on Linux)."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.name = Path(argv[0]).name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ending_with_us(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"GOGC": _GOGC, **os.environ},
            )

    def alive(self) -> bool:
        """Whether it still runs.

        Raises:
            StartFailed: it has ended; the message carries the end of its log.
        """
        if self.process.poll() is None:
            return True
        message = f"{self.name} ended with {self.process.returncode}:\n{tail(self.log)}"
        raise StartFailed(message)

    def kill(self) -> None:
        """End it at once and wait for that."""
        self.process.kill()
        self.process.wait(timeout=30)


class ControlPlane:
    """A real API server for tests; a context manager.

    Args:
        folder: where its files go; a temporary folder when None.
        controllers: start the controller manager too (service accounts, namespace deletion).

    Attributes:
        kubeconfig: of an administrator.
    """

    def __init__(self, folder: Path | None = None, *, controllers: bool = False) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="rose-control-plane-"))
        self._controllers = controllers
        self._children: dict[str, Child] = {}
        self._layout: Layout | None = None

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of an administrator."""
        return self._require_layout().pki / "admin.conf"

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self._require_layout().server

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()

    def start(self) -> None:
        """Start etcd and the API server and wait until it is ready.

        Raises:
            BuildFailed: the binaries are missing and cannot be built.
            StartFailed: a component did not come up.
        """
        binaries = build(CONTROL_PLANE + (NODE if self._controllers else ()))
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._start_on(free_ports(4), binaries)
            except StartFailed:  # perhaps somebody took a port in between
                self._kill_all()
                if attempt == _ATTEMPTS:
                    self.stop()
                    raise
            else:
                return

    def stop(self) -> None:
        """End every process and remove the folder if it is a temporary one."""
        self._kill_all()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop_api_server(self) -> None:
        """Kill the API server; etcd keeps the objects."""
        self._children.pop("api-server").kill()

    def start_api_server(self) -> None:
        """Start the API server on its old port and wait until it is ready."""
        layout = self._require_layout()
        extra = () if self._controllers else ("--disable-admission-plugins=ServiceAccount",)
        self._child("api-server", components.api_server(layout, extra))
        wait_until(self._ready, "the API server is ready", seconds=_START_SECONDS)

    def kubectl(
        self, *arguments: str, stdin: str = "", check: bool = True, seconds: float = 60
    ) -> str:
        """Run kubectl as the administrator and return what it printed.

        Raises:
            CommandFailed: it failed (with ``check``) or took too long.
        """
        binary = self._require_layout().binaries["kubectl"]
        command = [str(binary), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(command, seconds=seconds, stdin=stdin.encode(), check=check).stdout

    def _start_on(self, ports: list[int], binaries: dict[str, Path]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        api, client, peer, controllers = ports
        layout = Layout(self.folder, "127.0.0.1", api, client, peer, _SERVICE_RANGE, binaries)
        self._layout = layout
        write_certificates(layout, ["10.96.0.1"])
        self._child("etcd", components.etcd(layout))
        self.start_api_server()
        if self._controllers:
            self._child("controllers", components.controller_manager(layout, controllers))
            wait_until(self._has_service_account, "service accounts", seconds=_START_SECONDS)

    def _child(self, name: str, argv: list[str]) -> None:
        self._children[name] = Child(argv, self.folder / f"{name}.log")

    def _ready(self) -> bool:
        for child in self._children.values():
            child.alive()
        return self._succeeds("get", "--raw=/readyz")

    def _has_service_account(self) -> bool:
        return self._succeeds("get", "serviceaccount", "default", "--namespace=default")

    def _succeeds(self, *arguments: str) -> bool:
        kubectl = self._require_layout().binaries["kubectl"]
        return succeeds([kubectl, f"--kubeconfig={self.kubeconfig}", *arguments])

    def _kill_all(self) -> None:
        while self._children:
            self._children.popitem()[1].kill()

    def _require_layout(self) -> Layout:
        if self._layout is None:
            message = "the control plane has not been started"
            raise StartFailed(message)
        return self._layout
