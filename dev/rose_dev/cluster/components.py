"""Command lines of Kubernetes' components: pure functions from a layout to arguments.

The same command lines serve the control plane alone (``control_plane``) and the whole node
(``node``); only addresses and folders differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Where a control plane lives.

    Attributes:
        folder: etcd's data, and the folder ``pki``.
        address: IP address of the API server, which its certificate names.
        api_port, etcd_port, peer_port: TCP ports; etcd's are on 127.0.0.1.
        service_range: CIDR of ClusterIPs; its first address is the API server's.
        binaries: binary of each part by name.
    """

    folder: Path
    address: str
    api_port: int
    etcd_port: int
    peer_port: int
    service_range: str
    binaries: dict[str, Path]

    @property
    def pki(self) -> Path:
        """Folder of certificates and kubeconfigs."""
        return self.folder / "pki"

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.address}:{self.api_port}"


def etcd(layout: Layout) -> list[str]:
    """Arguments of etcd; durability is given up for speed, the data dies with the cluster."""
    client = f"http://127.0.0.1:{layout.etcd_port}"
    peer = f"http://127.0.0.1:{layout.peer_port}"
    return [
        str(layout.binaries["etcd"]),
        f"--data-dir={layout.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(layout: Layout, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of the API server: RBAC on, anonymous requests get nothing."""
    pki = layout.pki
    return [
        str(layout.binaries["kube-apiserver"]),
        f"--etcd-servers=http://127.0.0.1:{layout.etcd_port}",
        f"--secure-port={layout.api_port}",
        f"--bind-address={layout.address}",
        f"--advertise-address={layout.address}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--cert-dir={layout.folder / 'apiserver'}",
        f"--kubelet-client-certificate={pki / 'apiclient.crt'}",
        f"--kubelet-client-key={pki / 'apiclient.key'}",
        # Aggregated API servers, such as KEDA's of metrics, hear from us for whom we ask.
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=rose-dev-front",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        # They are called at their pods: this network has no route to a Service's own address.
        "--enable-aggregator-routing=true",
        f"--proxy-client-cert-file={pki / 'front.crt'}",
        f"--proxy-client-key-file={pki / 'front.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged",
        f"--service-cluster-ip-range={layout.service_range}",
        "--enable-admission-plugins=NodeRestriction",
        "--shutdown-delay-duration=0s",
        *extra,
    ]


def controller_manager(layout: Layout, port: int) -> list[str]:
    """Arguments of the controller manager; one instance, so no leader election."""
    return [
        str(layout.binaries["kube-controller-manager"]),
        f"--kubeconfig={layout.pki / 'controller-manager.conf'}",
        f"--service-account-private-key-file={layout.pki / 'sa.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--cert-dir={layout.folder / 'controller-manager'}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
    ]


def scheduler(layout: Layout, port: int) -> list[str]:
    """Arguments of the scheduler."""
    return [
        str(layout.binaries["kube-scheduler"]),
        f"--kubeconfig={layout.pki / 'scheduler.conf'}",
        f"--cert-dir={layout.folder / 'scheduler'}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
    ]
