"""What this host can do beside time-slicing, looked at again every ten seconds.

| capability | works when |
|---|---|
| ``DeviceAccess`` | the driver lists GPUs, engines may open their files, and their CUDA runs |
| ``MPS``, per GPU | a daemon answers and ``rose_core.devices.mps.may_share`` says yes |
| ``DriverMemoryLimit`` | the driver answers for our own cgroup |
| ``ElasticMemory`` | engines have GPUs, and ``kvcached`` is in their environment and hooked in |

Texts are for the pool's owner: a closed word, a colon, why, and what to do. The guard carries them
to the operator with each report. Next step: ``rose_core.devices.capabilities`` has the words.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.devices import access
from rose_agent.devices.driver import DeviceDriver
from rose_agent.errors import DeviceError
from rose_agent.host.sharing.sharing import APART, SharingMeans
from rose_core.devices import drivers
from rose_core.devices.capabilities import Capability, gpu_key
from rose_core.identity import GpuUuid

_log = logging.getLogger(__name__)
PERIOD_SECONDS = 10.0
_IMPORT_SECONDS = 60.0
# The compiled part, the hook that patches engines when they are imported, and a version whose
# segment and limits are those of ``rose_agent.devices.elastic``.
_KVCACHED = """
import importlib.util
if importlib.util.find_spec("kvcached") is None:
    raise SystemExit("No module named 'kvcached'")
import importlib.metadata, pathlib
version = importlib.metadata.version("kvcached")
if tuple(int(part) for part in version.split(".")[:2]) < (0, 1):
    raise SystemExit(f"version {version} is older than 0.1")
root = pathlib.Path(importlib.util.find_spec("kvcached").origin).parents[1]
if not list(root.glob("kvcached*.pth")):
    raise SystemExit(f"no kvcached_autopatch.pth in {root}: engines would not be patched")
import kvcached.vmm_ops
"""
# What the engines' torch was built for, without importing it.
_CUDA = """
import importlib.util, pathlib, re
found = importlib.util.find_spec("torch")
text = (pathlib.Path(found.origin).parent / "version.py").read_text() if found else ""
match = re.search(r"^cuda\\b[^=]*= '(\\d+)\\.(\\d+)'", text, re.MULTILINE)
print(*match.groups() if match else "")
"""
# Where NVIDIA's packages cuda-compat-* put the newer driver's library.
_COMPAT = Path("/usr/local/cuda/compat/libcuda.so.1")
# What a CUDA process opens besides its GPU's own file.
_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"))
_HOW = (
    "let the container runtime show the GPUs to the engine host: engineHost.runtimeClassName, CDI, "
    "or a DRA claim"
)
_LOST = (
    "a systemctl daemon-reload does that where a hook has shown the GPUs; engines that run go on "
    "until their slots are taken back, and the host then starts anew, with the devices"
)


@dataclass
class Capabilities:
    """What the host can do, kept up to date.

    Attributes:
        means: how engines can share GPUs here.
        driver: None = this host was not started for GPUs.
        broken: why there is no driver although one was asked for.
        uid: user of the first engine; 0 = the host's.
        python: Python of the engine environment.
        unprivileged: the host is not root.
        files: device files that every engine opens.
        compat: the library of the CUDA compatibility package, where it is installed.
        texts: the last answer.
    """

    means: SharingMeans
    driver: DeviceDriver | None
    uid: int
    python: Path
    broken: str = ""
    unprivileged: bool = False
    files: tuple[Path, ...] = _FILES
    compat: Path = _COMPAT
    texts: dict[str, str] = field(default_factory=dict)
    _elastic: str | None = None
    _cuda: tuple[int, int] | None = None
    _cuda_asked: bool = False
    _always_denied: frozenset[Path] | None = None

    async def keep(self) -> None:
        """Look again every ten seconds until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Find out anew what this host can do."""
        before, self.texts = self.texts, await asyncio.to_thread(self._all)
        for name, text in self.texts.items():
            if text != before.get(name):
                _log.info("%s: %s", name, text or "works")

    def _all(self) -> dict[str, str]:
        gpus = self._gpus()
        first = gpus[0] if gpus else GpuUuid("")
        access = self._access(gpus)
        return {
            Capability.DEVICE_ACCESS.value: _labelled("DeviceAccess", access)
            or _labelled("DriverTooOld", self._driver_refusal()),
            Capability.ELASTIC.value: _labelled("ElasticUnavailable", self._kvcached()),
            Capability.DRIVER_LIMIT.value: _labelled("DriverLimitUnavailable", self._limit(first)),
            **self._mps(gpus),
        }

    def _gpus(self) -> tuple[GpuUuid, ...]:
        if self.driver is None:
            return ()
        try:
            return tuple(gpu.uuid for gpu in self.driver.gpus())
        except DeviceError as error:
            _log.warning("GPUs: %s", error)
            return ()

    def _access(self, gpus: tuple[GpuUuid, ...]) -> str:
        if self.broken:
            return f"{self.broken}; {_HOW}"
        if self.driver is None or self.driver.name != "nvml":
            return ""
        if not gpus:
            return f"the driver lists no GPU; {_HOW}"
        if lost := self.lost():
            names = ", ".join(map(str, lost))
            return f"AccessLost: this container may not open {names} any more; {_LOST}"
        closed = [str(path) for path in self.files if not self._opens(path)]
        return f"engines cannot open {', '.join(closed)}; {_HOW}" if closed else ""

    def lost(self) -> tuple[Path, ...]:
        """Device files that the container's cgroup forbids, which it did not in the beginning."""
        if self.driver is None or self.driver.name != "nvml":
            return ()
        denied = access.denied(self.files)
        if self._always_denied is None:
            self._always_denied = frozenset(denied)
        return tuple(path for path in denied if path not in self._always_denied)

    def _driver_refusal(self) -> str:
        if self.driver is None or self.driver.name != "nvml":
            return ""
        if not self._cuda_asked:  # an image does not change under a running host
            self._cuda, self._cuda_asked = built_for(self.python), True
        try:
            found = self.driver.version()
        except DeviceError:
            return ""  # the GPUs themselves report what does not answer
        return drivers.refusal(
            found.driver if found is not None else None, self._cuda, compat=self.compat.exists()
        )

    def _opens(self, path: Path) -> bool:
        """Whether an engine may read and write the file: everybody may, or it is its user's."""
        try:
            stat = path.stat()
        except OSError:
            return False
        if not self.uid:
            return os.access(path, os.R_OK | os.W_OK)
        shift = 6 if stat.st_uid == self.uid else 3 if stat.st_gid == self.uid else 0
        return (stat.st_mode >> shift) & 0o6 == 0o6

    def _mps(self, gpus: tuple[GpuUuid, ...]) -> Mapping[str, str]:
        mps = self.means.mps
        found = {
            gpu: mps.may_share([gpu] if gpu else (), self.uid or os.geteuid())
            for gpu in gpus or (GpuUuid(""),)
        }
        texts = {
            gpu: _labelled(verdict.refusal.value, verdict.message) for gpu, verdict in found.items()
        }
        if "" in texts or mps.root is None:
            return {Capability.MPS.value: next(iter(texts.values()))}
        return {gpu_key(Capability.MPS, gpu): text for gpu, text in texts.items()}

    def _limit(self, gpu: GpuUuid) -> str:
        if self.unprivileged:
            return f"this host sets no driver limits; {APART}"
        limits = self.means.limits
        if limits is None or not gpu:
            return "this engine host was started without GPUs (--devices nvml)"
        return limits.refusal(gpu)

    def _kvcached(self) -> str:
        """Looked at once: an image does not change under a running host."""
        if self.unprivileged:
            return f"this host cannot reach its engines' shared memory; {APART}"
        if self._elastic is None:
            self._elastic = self._import_kvcached()
        return self._elastic

    def _import_kvcached(self) -> str:
        try:
            done = subprocess.run(  # the platform's own Python
                [self.python, "-c", _KVCACHED],
                capture_output=True,
                text=True,
                timeout=_IMPORT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return ""
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return f"{self.python} cannot use kvcached ({last[0]}); build the engine image with it"


def built_for(python: Path) -> tuple[int, int] | None:
    """The CUDA that a Python's torch was built for; None when it has none, or cannot be asked."""
    try:
        done = subprocess.run(  # the platform's own Python
            [python, "-c", _CUDA],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s: its CUDA is not known: %s", python, error)
        return None
    numbers = done.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None


def _labelled(label: str, text: str) -> str:
    return f"{label}: {text}" if text else ""
