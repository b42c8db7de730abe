"""Brings up what a GPU node has besides a node: driver, CDI, runtime classes, plugins.

The order is the one of ``node.Start``: ``prepare`` before the container runtime, ``join`` once the
node is ready. What this machine cannot get is left out by name, with ``missing``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rose_dev.cluster.build import build
from rose_dev.cluster.gpu_node import driver_root, files
from rose_dev.cluster.kubectl import Cluster
from rose_dev.cluster.parts import GPU_NODE
from rose_dev.cluster.place import NODE_NAME
from rose_dev.errors import NotSupported, StartFailed
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import State
from rose_dev.waiting import wait_until

COMPONENTS = ("device-plugin", "dra-driver", "nri-plugin")
DRIVERS = (550, 535)
NAMESPACES = "rose-system,gpu-managed"
"""Those that NVIDIA's NRI plugin lets have management devices; the operator has a value for it."""
_SECONDS = 60.0

Log = Callable[[str], None]


class GpuNode:
    """The GPUs of the first node.

    Args:
        cluster: whose node it is.
        profile: name of the machine.
        driver: branch of NVIDIA's driver.
    """

    def __init__(self, cluster: Cluster, profile: str, driver: int = DRIVERS[0]) -> None:
        if profile not in PROFILES:
            message = f"no GPUs {profile!r}; there are {', '.join(PROFILES)}, or a number"
            raise NotSupported(message)
        self._cluster, self.profile, self._driver = cluster, profile, driver
        self.missing: list[str] = []

    @property
    def _folder(self) -> Path:
        return self._cluster.place.run / "nvidia"

    def prepare(self, log: Log) -> None:
        """Lay out the driver, write CDI specifications and the runtime's configuration.

        Raises:
            DevelopmentError: a step failed.
        """
        binaries = build(GPU_NODE, log)
        try:
            trees = driver_root.programs_of(self._driver)
        except NotSupported as error:
            trees = []
            self.missing.append(f"NVIDIA's programs of driver {self._driver}: {error}")
        for what in self.missing:
            log(f"[gpus] left out: {what}")
        root = self._cluster.root()
        driver = root / driver_root.ROOT.relative_to("/")
        driver_root.lay_out(driver, self.profile, trees).close()
        self._cluster.namespaces.run(["sh", "-c", files.own_devices(place := self._cluster.place)])
        driver_root.make_device_files(root / "dev", self.profile)
        self._write_specifications(binaries)
        configuration = self._folder / "nvidia-container-runtime"
        configuration.mkdir(parents=True)
        (configuration / "config.toml").write_text(files.toolkit(binaries))
        wrapper = self._folder / "runtime"
        text = files.runtime_wrapper(self._folder, binaries["nvidia-container-runtime"])
        wrapper.write_text(text)
        wrapper.chmod(0o755)
        (place.run / "containerd.toml").write_text(files.containerd(place, wrapper))
        note = {"profile": self.profile, "driver": self._driver, "missing": self.missing}
        (place.run / "gpus.json").write_text(json.dumps(note))

    def _write_specifications(self, binaries: dict[str, Path]) -> None:
        """By NVIDIA's own generator, once for allocated GPUs and once for managers of all."""
        namespaces = self._cluster.namespaces
        vendor, _, kind = files.MANAGEMENT.partition("/")
        for name, extra in {
            "nvidia": (),
            "management": ("--mode=management", f"--vendor={vendor}", f"--class={kind}"),
        }.items():
            made = namespaces.run(
                [
                    *(binaries["nvidia-ctk"], "--quiet", "cdi", "generate", "--format=json"),
                    *(f"--driver-root={driver_root.ROOT}", f"--dev-root={driver_root.ROOT}"),
                    f"--nvidia-cdi-hook-path={binaries['nvidia-cdi-hook']}",
                    *extra,
                ]
            )
            specs = self._cluster.root() / "run/cdi"
            specs.mkdir(exist_ok=True)
            (specs / f"{name}.json").write_text(files.with_state(made))

    def commands(self) -> dict[str, list[str]]:
        """Command lines of the plugins by name."""
        binaries = build(GPU_NODE)
        place = self._cluster.place
        pki = place.run / "control-plane" / "pki"
        library = driver_root.libraries(driver_root.ROOT) / "libnvidia-ml.so.1"
        return {
            "device-plugin": [str(binaries["device-plugin"]), f"-library={library}"],
            "dra-driver": [
                str(binaries["dra-driver"]),
                f"-library={library}",
                f"-node={place.seat.name}",
                f"-kubelet={place.kubelet}",
                # With the node's own rights: the API server lets it publish its own slices alone.
                f"-kubeconfig={pki / f'{place.seat.name}.conf'}",
            ],
            "nri-plugin": [
                str(binaries["nri-plugin"]),
                f"-socket={files.NRI_SOCKET}",
                f"-namespaces={NAMESPACES}",
            ],
        }

    def join(self) -> None:
        """Start the plugins beside a node that is ready, and label it as the operator does.

        Raises:
            DevelopmentError: one did not start, or the node does not offer its GPUs.
        """
        cluster = self._cluster
        for name, command in self.commands().items():
            cluster.namespaces.start(name, command)
        classes = f"{files.runtime_classes()}---\n{files.device_class()}"
        cluster.kubectl("apply", "--filename=-", stdin=classes)
        labels = [f"{key}={value}" for key, value in files.LABELS.items()]
        cluster.kubectl("label", "node", NODE_NAME, "--overwrite", *labels)
        wait_until(self._offered, "the node offers its GPUs", seconds=_SECONDS)

    def _offered(self) -> bool:
        for name in COMPONENTS:
            namespaces = self._cluster.namespaces
            namespaces.pid(name)
        path = "{.status.allocatable.nvidia\\.com/gpu}"
        allocatable = self._cluster.kubectl("get", "node", NODE_NAME, f"--output=jsonpath={path}")
        devices = "--output=jsonpath={.items[*].spec.devices[*].name}"
        sliced = self._cluster.kubectl("get", "resourceslices", devices)
        count = PROFILES[self.profile].count
        return allocatable.strip() == str(count) and len(sliced.split()) == count


def profile_of(cluster: Cluster) -> str:
    """The machine that a running node is; empty when its GPUs are a claim, or it does not run."""
    try:
        note = json.loads((cluster.place.run / "gpus.json").read_text())
    except OSError:
        return ""
    return str(note["profile"])


def state_of(cluster: Cluster) -> State:
    """The GPUs of the running node, to be changed.

    Raises:
        StartFailed: there is no node with GPUs.
    """
    if not profile_of(cluster) or not cluster.namespaces.alive():
        message = "no node with GPUs runs: rose dev up --gpus h100x8"
        raise StartFailed(message)
    root = cluster.root() / driver_root.ROOT.relative_to("/")
    return State.open(driver_root.state_file(root))


def ask_smi(cluster: Cluster, *arguments: str) -> str:
    """What NVIDIA's own nvidia-smi says on the node."""
    root = driver_root.ROOT
    program, libraries = root / "usr/bin/nvidia-smi", driver_root.libraries(root)
    return cluster.namespaces.run(["env", f"LD_LIBRARY_PATH={libraries}", program, *arguments])
