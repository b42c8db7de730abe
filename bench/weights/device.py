"""Weights on an accelerator: what scattering changes and attesting take, beside its memory.

A synthetic BF16 state of a model's size lies on the device. Changes are put in as an engine's
commit does (``fused_scatter``: one launch that reads positions and values in pinned host memory),
and once more with both on the device already, which is what a commit would cost if they had been
staged there. The digest is
``rose_engines.ondevice.device_digest`` over everything, as at an attestation. A copy of the same
bytes on the device says what its memory carries. ``make gpu-check`` runs this; without a GPU a tiny
state on the CPU shows that it runs, and its times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rose_core.delta.digest import Digest, digest_run, total
from rose_engines.ondevice import device_digest
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.weights.fused_scatter import FusedScatter, StagedScatter, lane_of

SIZES = {"8B": 8_000_000_000, "32B": 32_000_000_000}
SHARE = 0.01
_TENSOR = 1 << 27
_ROUNDS = 5


class WrongDigest(Exception):
    """What is on the device is not what the host says: no figure counts."""


def measure(elements: int, device: str) -> dict[str, Any]:
    """One size; times in milliseconds, rates in GB/s of the state.

    Raises:
        WrongDigest: the digests differ.
    """
    tensors = _state(elements, device)
    _check(tensors[0])
    changes = [_changes(tensor, seed) for seed, tensor in enumerate(tensors)]
    there = [
        (torch.from_numpy(where).to(device), torch.from_numpy(new.view(np.int16)).to(device))
        for where, new in changes
    ]
    size = sum(tensor.flat.numel() for tensor in tensors) * 2

    live = {tensor.name: tensor for tensor in tensors}
    staged = (
        StagedScatter(name, where, new, new)
        for name, (where, new) in zip(live, changes, strict=True)
    )
    fused = FusedScatter(tuple(staged), live, lane_of(tensors[0].flat))

    def put() -> None:
        if (wrong := fused.put()) is not None:
            raise WrongDigest(f"{wrong} did not keep what was written")

    def scatter() -> None:
        for tensor, (where, new) in zip(tensors, there, strict=True):
            tensor.flat[where] = new

    spare = torch.empty_like(tensors[0].flat)
    copied = _median(lambda: spare.copy_(tensors[0].flat), device)
    digest = _median(lambda: total(tensor.digest() for tensor in tensors), device)
    return {
        "state_bytes": size,
        "changes": sum(len(where) for where, _ in changes),
        "commit_from_host_ms": _median(put, device),
        "scatter_on_device_ms": _median(scatter, device),
        "digest_ms": digest,
        "digest_gb_per_second": size / digest / 1e6,
        "copy_gb_per_second": 2 * 2 * spare.numel() / copied / 1e6,
    }


def _state(elements: int, device: str) -> list[DeviceTensor]:
    found = []
    for number, first in enumerate(range(0, elements, _TENSOR)):
        count = min(_TENSOR, elements - first)
        flat = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, device=device)
        found.append(DeviceTensor(f"l{number}.weight", "BF16", (count,), flat))
    return found


def _changes(tensor: DeviceTensor, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    count = tensor.flat.numel()
    where = np.unique(draw.integers(0, count, int(count * SHARE)))
    return where, draw.integers(0, 1 << 16, len(where), np.uint16)


def _check(tensor: DeviceTensor) -> None:
    end = min(tensor.flat.numel(), 1 << 20)
    here: Digest = digest_run(tensor.name, 0, np.ascontiguousarray(tensor.span(0, end)))
    if device_digest.digest_run(tensor.name, 0, tensor.flat[:end]) != here:
        raise WrongDigest(f"the digest computed on {tensor.flat.device} is not the host's")


def _median(work: Callable[[], object], device: str) -> float:
    """Milliseconds; the first round is not counted."""
    times = []
    for _ in range(_ROUNDS + 1):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
