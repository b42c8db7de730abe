"""A GPU for the fake engine: what CUDA does with MPS and with driver limits, without one.

As CUDA, it reads its environment once: with a control daemon behind ``CUDA_MPS_PIPE_DIRECTORY`` it
becomes a client and sees the multiprocessors of its share; with nobody there it runs with the whole
GPU and says nothing about it. Limits are those of ``rose_agent.devices.fake_limits``.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from rose_engines.process.device import Device

_STEP = 2
_SECONDS = 5.0
_MOST = 1 << 16


def connect(multiprocessors: int, memory_bytes: int, environment: Mapping[str, str]) -> Device:
    """Use a GPU of this size; 0 multiprocessors = there is none.

    Raises:
        ConnectionRefusedError: the daemon lets no more clients in.
    """
    if not multiprocessors:
        return Device()
    memory = min(memory_bytes, _limit(environment) or memory_bytes)
    percent = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    control = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")) / "control"
    if not control.exists():
        return Device(multiprocessors, memory)
    refusal = _send(control, f"fake_connect {os.getpid()} {percent}")
    if refusal:
        raise ConnectionRefusedError(refusal)
    share = math.ceil(multiprocessors * float(percent) / 100 / _STEP) * _STEP
    return Device(min(multiprocessors, share), memory)


def _send(control: Path, line: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(str(control))
        connection.sendall(f"{line}\n".encode())
        return connection.recv(_MOST).decode().strip()


def _limit(environment: Mapping[str, str]) -> int:
    """Hard limit of our own cgroup on our GPU, bytes; 0 = none."""
    store = Path(environment.get("ROSE_FAKE_LIMITS", "/nonexistent"))
    if not store.exists():
        return 0
    ours = Path("/proc/self/cgroup").read_text().split()
    paths = [line.split(":", 2)[2] for line in ours if line.startswith("0::")]
    gpu = environment.get("CUDA_VISIBLE_DEVICES", "")
    for cgroup, limits in json.loads(store.read_text()).items():
        if paths and cgroup.endswith(paths[0]) and paths[0] != "/" and gpu in limits:
            return int(limits[gpu][1]) << 20
    return 0
