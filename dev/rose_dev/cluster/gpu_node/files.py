"""Configuration of a GPU node's container runtime: pure functions from places to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rose_dev.cluster.gpu_node.driver_root import ROOT, STATE_NAME, libraries
from rose_dev.cluster.node_files import PAUSE_IMAGE
from rose_dev.cluster.place import NodeFolders

RUNTIME_CLASSES = ("nvidia", "nvidia-cdi")
"""As the GPU operator makes them."""
LABELS = {"nvidia.com/gpu.present": "true", "feature.node.kubernetes.io/pci-10de.present": "true"}
"""As its feature discovery writes them."""
SPECS = Path("/var/run/cdi")
NRI_SOCKET = Path("/var/run/nri/nri.sock")
MANAGEMENT = "management.nvidia.com/gpu"
_DEVICE = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"


def containerd(place: NodeFolders, wrapper: Path) -> str:
    """Configuration of containerd 2: CDI and NRI on, and the classes of NVIDIA's runtime."""
    prefix = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes"
    nvidia = "".join(
        f"""[{prefix}.{name}]
  runtime_type = "io.containerd.runc.v2"
  [{prefix}.{name}.options]
    BinaryName = "{wrapper}"
    SystemdCgroup = false
"""
        for name in RUNTIME_CLASSES
    )
    return f"""version = 3
root = "{place.data}/containerd"
state = "{place.run}/containerd"
[grpc]
  address = "{place.containerd}"
[plugins.'io.containerd.internal.v1.opt']
  path = "{place.data}/opt"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE no pod starts otherwise (runc: "can't get final child's PID").
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["{SPECS}"]
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{place.run}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = "runc"
[{prefix}.runc]
  runtime_type = "io.containerd.runc.v2"
  [{prefix}.runc.options]
    SystemdCgroup = false
{nvidia}[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = "{NRI_SOCKET}"
  plugin_path = "{place.run}/nri/plugins"
  plugin_config_path = "{place.run}/nri/conf.d"
"""


def toolkit(binaries: dict[str, Path]) -> str:
    """Configuration of NVIDIA's container runtime, in the mode that the operator chooses."""
    return f"""accept-nvidia-visible-devices-envvar-when-unprivileged = true
[nvidia-container-cli]
  root = "{ROOT}"
[nvidia-container-runtime]
  mode = "cdi"
  runtimes = ["runc"]
  log-level = "info"
  [nvidia-container-runtime.modes.cdi]
    default-kind = "{MANAGEMENT}"
    annotation-prefixes = ["cdi.k8s.io/"]
    spec-dirs = ["{SPECS}"]
[nvidia-ctk]
  path = "{binaries["nvidia-ctk"]}"
"""


def own_devices(place: NodeFolders) -> str:
    """A shell script that gives the node a layer of its own over the machine's ``/dev``."""
    layer = place.run / "private" / "dev"
    mounted = "pts shm mqueue"
    return f"""set -e
mkdir -p {layer}/upper {layer}/work {layer}/whole
mount -t overlay -o lowerdir=/dev,upperdir={layer}/upper,workdir={layer}/work dev {layer}/whole
for name in {mounted}; do
  if mountpoint -q /dev/$name; then mount --bind /dev/$name {layer}/whole/$name; fi
done
mount --rbind {layer}/whole /dev
"""


def runtime_wrapper(configuration: Path, binary: Path) -> str:
    """A script that gives the runtime its own configuration, as the toolkit's container does."""
    return f'#!/bin/sh\nexport XDG_CONFIG_HOME={configuration}\nexec {binary} "$@"\n'


def with_state(specification: str) -> str:
    """A CDI specification whose containers see the NVML library's state beside the library."""
    spec: dict[str, Any] = json.loads(specification)
    inside = libraries(Path("/")) / STATE_NAME
    spec["containerEdits"].setdefault("mounts", []).append(
        {
            "hostPath": str(libraries(ROOT) / STATE_NAME),
            "containerPath": str(inside),
            "options": ["rw", "nosuid", "nodev", "rbind", "rprivate"],
        }
    )
    return json.dumps(spec)


def runtime_classes() -> str:
    """The RuntimeClasses, as objects."""
    return yaml.safe_dump_all(
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": name},
            "handler": name,
        }
        for name in RUNTIME_CLASSES
    )


def device_class() -> str:
    """The class of dynamic resource allocation, as NVIDIA's DRA driver brings it."""
    return yaml.safe_dump(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "gpu.nvidia.com"},
            "spec": {"selectors": [{"cel": {"expression": _DEVICE}}]},
        }
    )
