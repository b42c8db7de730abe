"""What every node of the development cluster runs: container runtime, kubelet, kube-proxy.

Used by the first node, which runs the control plane besides (``node``), and by the second
(``second_node``). Certificates of both come from the first one's folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rose_dev.cluster import node_files
from rose_dev.cluster.namespaces import NodeNamespaces
from rose_dev.cluster.parts import GPU_NODE, place_of
from rose_dev.cluster.place import NodeFolders
from rose_dev.waiting import wait_until

START_SECONDS = 180.0
CONTAINERD_2 = next(part for part in GPU_NODE if part.name == "containerd")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write_files(place: NodeFolders, pki: Path) -> None:
    """Write the configuration of the three into the node's folder."""
    (place.run / "cni").mkdir()
    texts = {
        "containerd.toml": node_files.containerd(place),
        "cni/10-rose.conflist": node_files.cni(place.seat),
        "kubelet.yaml": node_files.kubelet(place, pki),
        "kube-proxy.yaml": node_files.kube_proxy(place.seat, pki),
        "resolv.conf": "options ndots:5\n",
    }
    for name, text in texts.items():
        (place.run / name).write_text(text)


def commands(
    place: NodeFolders, pki: Path, binaries: dict[str, Path], *, gpus: bool = False
) -> dict[str, list[str]]:
    """Command lines of the three by name; with ``gpus`` of the container runtime that has CDI."""
    run, seat = place.run, place.seat
    containerd = [shutil.which("containerd") or "/usr/bin/containerd"]
    if gpus:
        # It starts the shim that it finds first.
        own = place_of(CONTAINERD_2)
        containerd = ["env", f"PATH={own.parent}:{_SYSTEM_PATH}", str(own)]
    kubelet = [
        str(binaries["kubelet"]),
        f"--config={run / 'kubelet.yaml'}",
        f"--kubeconfig={pki / f'{seat.name}.conf'}",
        f"--root-dir={place.kubelet}",
        f"--cert-dir={place.kubelet / 'pki'}",
        f"--hostname-override={seat.name}",
        f"--node-ip={seat.address}",
    ]
    return {
        "containerd": [*containerd, "--config", str(run / "containerd.toml")],
        "kube-proxy": [str(binaries["kube-proxy"]), f"--config={run / 'kube-proxy.yaml'}"],
        "kubelet": kubelet,
    }


def start_runtime(namespaces: NodeNamespaces, command: list[str]) -> None:
    """Start containerd and wait until it answers.

    Raises:
        StartFailed: it does not.
    """

    def ready() -> bool:
        namespaces.pid("containerd")
        return namespaces.succeeds([*_ctr(namespaces), "version"])

    namespaces.start("containerd", command)
    wait_until(ready, "containerd is ready", seconds=START_SECONDS)


def load(namespaces: NodeNamespaces, archive: Path) -> None:
    """Import a docker archive.

    Raises:
        CommandFailed: the runtime refuses it.
    """
    namespaces.run([*_ctr(namespaces), "images", "import", archive], seconds=180)


def load_once(namespaces: NodeNamespaces, archive: Path) -> None:
    """Import ROSE's image unless the node has just this one."""
    loaded = namespaces.place.run / "image"
    if not loaded.exists() or loaded.read_text() != archive.name:
        load(namespaces, archive)
        loaded.write_text(archive.name)


def _ctr(namespaces: NodeNamespaces) -> list[str]:
    with_gpus = (namespaces.place.run / "gpus.json").exists()
    client = str(place_of(CONTAINERD_2).with_name("ctr")) if with_gpus else "ctr"
    return [client, "--address", str(namespaces.place.containerd), "--namespace", "k8s.io"]
